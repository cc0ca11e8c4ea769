"""The migration guide's table of features: what it says, and whether that holds here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_neuron.config import ConfigurationError, OnDeviceSamplingConfig, ResolvedConfig, ServingSettings, resolve

OPEN = {
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_num_seqs_set": False,
    "max_num_batched_tokens_set": False,
    "architectures": ("LlamaForCausalLM",),
}
"""A launch that sets nothing but the length; the limits are vLLM's defaults."""


def resolved(neuron: dict[str, Any] | None = None, **settings: Any) -> ResolvedConfig:
    return resolve(ServingSettings(**{**OPEN, **settings}), {"neuron_config": neuron or {}}, {})


def refusals(neuron: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    """What the validator says, a line each."""
    try:
        resolved(neuron, **settings)
    except ConfigurationError as error:
        return list(map(str, error.faults))
    return []


@dataclass(frozen=True)
class Feature:
    """A row of the guide.

    Attributes:
        name: NxD Inference's feature.
        here: what the guide says of it here, in short.
        old: what is gone from a launch, or "".
        refused: what the validator says of it as long as it is not there: (line, how to ask for it); None if it is.
        holds: shows that the statement holds.
    """

    name: str
    here: str
    old: str
    refused: tuple[str, Callable[[], list[str]]] | None = None
    holds: Callable[[], bool] | None = None


FEATURES = (
    Feature(
        "Continuous batching",
        "on by default",
        "`is_continuous_batching`",
        holds=lambda: resolved().max_num_seqs > 1 and resolved().num_seqs_buckets[0] == 1,
    ),
    Feature(
        "Prefix caching",
        "on by default",
        "`is_prefix_caching`, `is_block_kv_layout`, `prefix_buckets`",
        holds=lambda: resolved().enable_prefix_caching,
    ),
    Feature(
        "Speculative decoding",
        "EAGLE3 only, through `--speculative-config`; a plain draft model is refused",
        "`--speculative-model`, `enable_fused_speculation`",
        refused=("not supported yet: speculative decoding", lambda: refusals(speculative_method="eagle3")),
    ),
    Feature(
        "Disaggregated inference",
        "1P1D and xPyD, with another topology configuration",
        "`NeuronConnector` and its addresses",
        refused=("not supported yet: disaggregated inference", lambda: refusals(kv_connector="NixlConnector")),
    ),
    Feature(
        "Quantization (INT8, FP8)",
        "`quantized` and `quantization_dtype` in `neuron_config`",
        "`quantized_checkpoints_path`",
        refused=(
            "not supported yet: weight quantization",
            lambda: refusals({"quantized": True, "quantization_dtype": "int8"}),
        ),
    ),
    Feature(
        "On-device sampling",
        "on by default, with temperature, top_k and top_p (off by default in the configuration reference, and here: "
        "`on_device_sampling_config` turns it on)",
        "`dynamic`, `deterministic`",
        holds=lambda: (
            resolved().on_device_sampling is None
            and resolved({"on_device_sampling_config": {}}).on_device_sampling == OnDeviceSamplingConfig()
            and resolved(
                {"on_device_sampling_config": {"temperature": "0.7", "top_k": 5, "top_p": 0.9}}
            ).on_device_sampling
            == OnDeviceSamplingConfig(temperature=0.7, top_k=5, top_p=0.9)
        ),
    ),
    Feature(
        "Sequence parallelism",
        "on by default wherever tensor parallelism is",
        "`sequence_parallel_enabled`",
        refused=("not supported yet: tensor parallelism", lambda: refusals(tensor_parallel_size=2)),
    ),
    Feature(
        "Data parallelism",
        "vLLM's own: `--data-parallel-size`",
        "`dp_degree`, `attention_dp_degree`",
        refused=("not supported yet: data parallelism", lambda: refusals(data_parallel_size=2)),
    ),
    Feature(
        "Expert parallelism",
        "vLLM's own: `--enable-expert-parallel`",
        "`ep_degree`, `moe_ep_degree`",
        refused=("not supported yet: expert parallelism", lambda: refusals(enable_expert_parallel=True)),
    ),
    Feature(
        "Decode bucketing",
        "by the number of requests by default; by context length too with `decode_context_length_buckets`",
        "`token_generation_buckets`",
        holds=lambda: (
            resolved(max_num_seqs=8, max_num_seqs_set=True).num_seqs_buckets == (1, 2, 4, 8)
            and resolved().decode_context_length_buckets == (4096,)
            and resolved({"decode_context_length_buckets": [512]}).decode_context_length_buckets == (512, 4096)
        ),
    ),
)
