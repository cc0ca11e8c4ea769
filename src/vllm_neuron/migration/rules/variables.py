"""Environment variables of the old integration."""

from typing import Any

from vllm_neuron.migration.draft import Draft
from vllm_neuron.migration.launch import Verdict
from vllm_neuron.migration.rules.fields import context_buckets, prompt_buckets
from vllm_neuron.migration.rules.rule import Outcome, Rule, dropped, table, undecided
from vllm_neuron.migration.values import is_on


def _framework(draft: Draft, value: Any) -> Outcome | None:
    if "transformers" not in value:
        return None
    text = "It selected Transformers NeuronX, whose settings are others than those of NxD Inference."
    return Outcome(Verdict.DECIDE, "", text)


def _sampling_disabled(draft: Draft, value: Any) -> Outcome | None:
    return None if is_on(value) else Outcome(Verdict.DROPPED, "", "On-device sampling is set in neuron_config.")


def _quantized(draft: Draft, value: Any) -> Outcome | None:
    if value not in ("s8", "int8"):
        return Outcome(Verdict.DECIDE, "", f"{value} is no dtype that is known here.")
    draft.neuron |= {"quantized": True, "quantization_dtype": "int8"}
    return None


VARIABLES = table(
    Rule("VLLM_NEURON_FRAMEWORK", Verdict.DROPPED, "", "The plugin registers itself with vLLM.",
         "neuronx-distributed-inference", _framework),
    Rule("NEURON_COMPILED_ARTIFACTS", Verdict.DECIDE, "NEURON_COMPILED_ARTIFACTS",
         "The variable stays, but what NxD Inference compiled cannot be loaded: name an empty folder, which is filled, "
         "or unset it.", "artifacts/llama",
         lambda draft, value: draft.environment.update(NEURON_COMPILED_ARTIFACTS=value), True),
    Rule("NEURON_CONTEXT_LENGTH_BUCKETS", Verdict.RENAMED, "neuron_config.num_batched_tokens_buckets",
         "Buckets are options of neuron_config.", "128,512", prompt_buckets),
    Rule("NEURON_TOKEN_GEN_BUCKETS", Verdict.RENAMED, "neuron_config.decode_context_length_buckets",
         "Buckets are options of neuron_config.", "256,512", context_buckets),
    Rule("NEURON_QUANT_DTYPE", Verdict.RENAMED, "neuron_config.quantization_dtype",
         "Quantization is an option of neuron_config.", "s8", _quantized),
    Rule("NEURON_ON_DEVICE_SAMPLING_DISABLED", Verdict.DROPPED, "",
         "Sampling on the CPU is what happens without on_device_sampling_config.", "1", _sampling_disabled),
    *dropped("vLLM has one engine now.", VLLM_USE_V1="1"),
    *dropped("It was for building vLLM.", VLLM_TARGET_DEVICE="neuron"),
    *dropped("Compiled graphs lie under VLLM_CACHE_ROOT; NEURON_LIBTORCH_REMOTE_CACHE names a folder that machines "
             "share.", NEURON_COMPILE_CACHE_URL="cache", NEURONX_CACHE="on"),
    *dropped("NxD Inference needed it for FP8.", XLA_HANDLE_SPECIAL_SCALAR="1", UNSAFE_FP8FNCAST="1"),
    *undecided("It belongs to the KV transfer of NxD Inference; NIXL has settings of its own.",
               NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT="45645", NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED="1",
               NEURON_SEND_IP="10.0.0.1", NEURON_RECV_IP="10.0.0.2"),
)  # fmt: skip
"""By name. Other variables are kept; a row says so of those of Neuron's runtime and of vLLM."""
