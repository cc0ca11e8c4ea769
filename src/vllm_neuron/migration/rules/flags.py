"""Flags of `vllm serve` and keywords of `LLM(...)` that are not simply kept."""

from typing import Any

from vllm_neuron.config.buckets import DEFAULT_BLOCK_SIZE
from vllm_neuron.migration.draft import Draft
from vllm_neuron.migration.launch import Verdict
from vllm_neuron.migration.rules.rule import Outcome, Rule, dropped, table, undecided, unsupported
from vllm_neuron.migration.values import is_on, read_mapping, whole_number

EAGLE3_ONLY = (
    "Of speculative decoding there is EAGLE3 only, through --speculative-config: train or choose an EAGLE3 draft of "
    "this model. Without it the answers are the same, only later."
)
SIZED_AUTOMATICALLY = (
    "The KV cache is sized automatically. --keep-tuning keeps the value where it was chosen to tune something."
)
GONE = "vLLM's engine of today has no such option."


def _device(draft: Draft, value: Any) -> Outcome | None:
    return None if value in ("neuron", "auto") else Outcome(Verdict.DECIDE, "", f"The device was {value}, not Neuron.")


def _task(draft: Draft, value: Any) -> Outcome | None:
    if value in ("auto", "generate"):
        return None
    if value in ("embed", "embedding", "classify", "score", "reward"):
        draft.set("runner", "pooling")
        return Outcome(Verdict.RENAMED, "--runner pooling", "vLLM tells by the model which of them it is.")
    return Outcome(Verdict.DECIDE, "--runner", "vLLM only tells generating models from pooling ones.")


def _guided_decoding(draft: Draft, value: Any) -> Outcome | None:
    if value == "auto":
        return Outcome(Verdict.DROPPED, "", "auto is the default.")
    draft.set("structured_outputs_config", {"backend": value})
    return None


def _multimodal_limit(draft: Draft, value: Any) -> Outcome | None:
    """`image=5` was the first form; later ones are JSON."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, tuple | list) and all(isinstance(text, str) and "=" in text for text in texts):
        pairs = (part.split("=", 1) for text in texts for part in text.split(","))
        draft.set("limit_mm_per_prompt", {name: whole_number(count) for name, count in pairs})
        return None
    draft.keep("limit_mm_per_prompt")
    return Outcome(Verdict.KEPT, "--limit-mm-per-prompt")


def _quantization(draft: Draft, value: Any) -> Outcome | None:
    if value != "neuron_quant":
        draft.keep("quantization")
        return Outcome(Verdict.KEPT, "--quantization", "An option of vLLM.")
    return Outcome(Verdict.DROPPED) if is_on(draft.fields.get("quantized") or draft.neuron.get("quantized")) else None


def _executor(draft: Draft, value: Any) -> Outcome | None:
    if value in ("mp", "uni"):
        draft.keep("distributed_executor_backend")
        return Outcome(Verdict.KEPT, "--distributed-executor-backend", "An option of vLLM.")
    return None


def _worker_class(draft: Draft, value: Any) -> Outcome | None:
    return None if "euron" in str(value) else Outcome(Verdict.DECIDE, "", "A worker class of your own does not fit.")


def _default_switch(name: str, off_reason: str) -> Any:
    """An option that is on by default: on is left out, off is kept."""

    def apply(draft: Draft, value: Any) -> Outcome | None:
        if is_on(value):
            return None
        draft.keep(name)
        return Outcome(Verdict.KEPT, f"--no-{name.replace('_', '-')}", off_reason)

    return apply


def block_size(draft: Draft, value: Any) -> Outcome | None:
    """Dropped, or kept with --keep-tuning if it is neither the default nor a whole sequence."""
    size = whole_number(value)
    if size == DEFAULT_BLOCK_SIZE:
        return Outcome(Verdict.DROPPED, "", f"{size} is the default.")
    length = draft.number("max_model_len")
    if size is not None and length is not None and size >= length:
        text = "A block held a whole sequence, because the KV cache was contiguous; it is paged now."
        return Outcome(Verdict.DROPPED, "", text)
    if draft.keep_tuning:
        draft.set("block_size", value)
        return Outcome(Verdict.KEPT, "--block-size", "Kept because of --keep-tuning.")
    return None


def number_of_blocks(draft: Draft, value: Any) -> Outcome | None:
    """Dropped, or kept with --keep-tuning."""
    if draft.keep_tuning:
        draft.set("num_gpu_blocks_override", value)
        return Outcome(Verdict.KEPT, "--num-gpu-blocks-override", "Kept because of --keep-tuning.")
    return None


def _speculative_config(draft: Draft, value: Any) -> Outcome | None:
    found = (value, True) if isinstance(value, dict) else read_mapping(str(value))
    if found is None:
        return Outcome(Verdict.DECIDE, "--speculative-config", "It cannot be read here.")
    if found[0].get("method") == "eagle3":
        draft.keep("speculative_config")
        return Outcome(Verdict.KEPT, "--speculative-config", "EAGLE3 is what there is of speculative decoding.")
    return None


def _kv_transfer(draft: Draft, value: Any) -> Outcome | None:
    """The role goes over; how the two sides find each other is no longer in this option."""
    found = (value, True) if isinstance(value, dict) else read_mapping(str(value))
    role = found[0].get("kv_role") if found else None
    if found and found[0].get("kv_connector") not in (None, "NeuronConnector"):
        draft.keep("kv_transfer_config")
        return Outcome(Verdict.KEPT, "--kv-transfer-config", "An option of vLLM.")
    if isinstance(role, str):
        draft.set("kv_transfer_config", {"kv_connector": "NixlConnector", "kv_role": role})
    return None


FLAGS = table(
    Rule("device", Verdict.DROPPED, "", "The plugin finds Neuron hardware by itself.", "neuron", _device),
    Rule("block_size", Verdict.DROPPED, "", SIZED_AUTOMATICALLY, "64", block_size),
    Rule("num_gpu_blocks_override", Verdict.DROPPED, "", SIZED_AUTOMATICALLY, "2048", number_of_blocks),
    Rule("enable_prefix_caching", Verdict.DROPPED, "", "On by default; --no-enable-prefix-caching is kept.", True,
         _default_switch("enable_prefix_caching", "It is on by default; you had it off.")),
    *dropped("Prompts that are longer than a step are split over steps by default; NxD Inference could not do that.",
             enable_chunked_prefill=False),
    Rule("async_scheduling", Verdict.DROPPED, "", "On by default; --no-async-scheduling is kept.", True,
         _default_switch("async_scheduling", "It is on by default; you had it off.")),
    Rule("speculative_config", Verdict.UNSUPPORTED, "", f"Kept if its method is eagle3. {EAGLE3_ONLY}",
         '{"method": "eagle", "model": "draft"}', _speculative_config),
    *unsupported(EAGLE3_ONLY, speculative_model="draft"),
    *dropped("It belongs to a draft model, which goes into --speculative-config with everything that concerns it.",
             num_speculative_tokens="7", speculative_max_model_len="4096", speculative_model_quantization="fp8",
             speculative_draft_tensor_parallel_size="1", speculative_disable_mqa_scorer=True,
             spec_decoding_acceptance_method="rejection_sampler", ngram_prompt_lookup_max="4",
             ngram_prompt_lookup_min="1", speculative_disable_by_batch_size="8"),
    Rule("kv_transfer_config", Verdict.DECIDE, "--kv-transfer-config",
         "Disaggregation has another topology configuration: the connector is NixlConnector, and addresses, ranks and "
         "etcd of NeuronConnector have no place in it. Check ports and proxy of both sides.",
         '{"kv_connector": "NeuronConnector", "kv_role": "kv_producer", "kv_rank": 0}', _kv_transfer),
    Rule("quantization", Verdict.DECIDE, "",
         "Must not be neuron_quant. Say it in neuron_config with quantized and quantization_dtype, or serve a "
         "checkpoint whose own quantization_config says it.", "neuron_quant", _quantization),
    *unsupported("Scales of the KV cache are read from the checkpoint.", quantization_param_path="scales.json"),
    Rule("task", Verdict.DROPPED, "", "The model says so itself; pooling models become --runner pooling.", "generate",
         _task),
    Rule("guided_decoding_backend", Verdict.RENAMED, "--structured-outputs-config", "vLLM renamed it.", "xgrammar",
         _guided_decoding),
    Rule("limit_mm_per_prompt", Verdict.RENAMED, "--limit-mm-per-prompt", "vLLM takes JSON.", "image=5",
         _multimodal_limit),
    Rule("worker_cls", Verdict.DROPPED, "", "The plugin chooses its worker.", "neuron_worker.NeuronWorker",
         _worker_class),
    Rule("distributed_executor_backend", Verdict.DECIDE, "", "mp and uni are there, other executors are not.", "ray",
         _executor),
    *dropped("Requests are not logged unless --enable-log-requests is given.", disable_log_requests=True),
    *dropped("--reasoning-parser alone turns it on.", enable_reasoning=True),
    *undecided("The options in that file have to be migrated as well.", config="serve.yaml"),
    *undecided("vLLM has no such option; --hf-overrides changes the model's configuration.",
               rope_scaling='{"rope_type": "dynamic"}', rope_theta="500000"),
    *dropped(GONE, use_v2_block_manager=True, num_scheduler_steps="8", num_lookahead_slots="4",
             preemption_mode="recompute", worker_use_ray=True, tokenizer_pool_size="2", tokenizer_pool_type="ray",
             tokenizer_pool_extra_config="{}", disable_async_output_proc=True, scheduler_delay_factor="0.5",
             multi_step_stream_outputs=True, max_seq_len_to_capture="8192", enable_lora_bias=True,
             lora_extra_vocab_size="256", disable_logprobs_during_spec_decoding=True, cuda_graph_sizes="1"),
)  # fmt: skip
"""By name of the option, with underscores. Other options are vLLM's and are kept."""
