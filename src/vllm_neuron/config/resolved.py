"""The one resolved configuration: computed once at start, frozen, and read by everything else."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_neuron.config.options import OnDeviceSamplingConfig


class Notice(NamedTuple):
    """Something to log once at start: a level of the logging module and the text."""

    level: int
    text: str


class EffectiveOption(NamedTuple):
    """An option as it is in effect.

    `source` is "set" (by the user), "default", "derived" (from other options), "vLLM" (its parameter, as it stands) or
    the name of an environment variable.
    """

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class ResolvedConfig:
    """All decisions taken from vLLM's parameters, `additional_config` and the environment.

    Attributes:
        backend: "neuron_native" or "vllm_neuron".
        cpu_mode: run on the CPU instead of Neuron devices.
        cpu_compile: compile for Neuron devices that are not here, and run nothing.
        platform_target: "trn2" or "trn3" under cpu_compile, else None.
        max_model_len: longest sequence in tokens.
        max_num_seqs: most requests that run at once; the largest batch bucket.
        max_num_batched_tokens: most tokens of a prefill step; the largest token bucket.
        num_batched_tokens_buckets: prefill token counts, ascending.
        num_seqs_buckets: decode batch sizes, ascending.
        decode_context_length_buckets: decode context lengths in tokens, ascending; the last is max_model_len.
        kv_segment_size: tokens per prefill segment, or None when segmented prefill is off.
        block_size: tokens per KV block.
        fp8_kv_cache: keys and values are stored as 8-bit floats; otherwise in the model's dtype.
        enable_prefix_caching: reuse KV blocks of shared prefixes.
        enable_prompt_embeds: prompts may be embeddings instead of token ids.
        v2_model_runner: which scheduler protocol the model runner speaks.
        disable_warmup_compile: a graph that is not in the cache is a fatal error.
        disable_nki_kernels: trace torch twins instead of kernels.
        nki_simulator: trace NKI kernels in CPU mode, which run in the simulator.
        attn_mask_torch: decode attention takes a mask that torch made.
        disable_compile_cache: compile every graph anew, and keep none.
        compiled_artifacts: folder of compiled graphs to load, or to fill; None for none.
        remote_cache: folder of compiled graphs that machines share; None for none.
        compile_workers: graphs compiled at the same time, each in a process of its own; None for one after the other in
            the worker itself.
        compile_timeout: seconds that one graph may take to compile; None for any time.
        tensor_parallel_size: devices that a model is spread over.
        on_device_sampling: sample on the device, with these defaults; None samples on the host.
        async_scheduling: prepare a step while the one before it runs.
        gpu_memory_utilization: fraction of memory that may be used, in (0, 1]; 1.0 under an explicit headroom.
        kv_cap_fraction: cap of the default KV budget, in (0, 1]; unused under an explicit headroom.
        kv_headroom_gib: memory kept free per worker, in GiB, or None for the default KV budget. Zero is a headroom.
        kv_minimum_gib: smallest KV budget, in GiB, that the server starts with.
        num_gpu_blocks_override: number of KV blocks, or None for as many as the budget holds.
        options: every option as it is in effect, for printing.
        notices: what is to be logged once at start.
    """

    backend: str
    cpu_mode: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_batched_tokens_buckets: tuple[int, ...]
    num_seqs_buckets: tuple[int, ...]
    decode_context_length_buckets: tuple[int, ...]
    kv_segment_size: int | None
    block_size: int
    enable_prefix_caching: bool
    v2_model_runner: bool
    disable_warmup_compile: bool
    disable_nki_kernels: bool
    nki_simulator: bool = False
    attn_mask_torch: bool = False
    enable_prompt_embeds: bool = False
    fp8_kv_cache: bool = False
    cpu_compile: bool = False
    platform_target: str | None = None
    disable_compile_cache: bool = False
    compiled_artifacts: str | None = None
    remote_cache: str | None = None
    compile_workers: int | None = None
    compile_timeout: int | None = None
    tensor_parallel_size: int = 1
    on_device_sampling: OnDeviceSamplingConfig | None = None
    async_scheduling: bool = False
    gpu_memory_utilization: float = 0.9
    kv_cap_fraction: float = 0.30
    kv_headroom_gib: float | None = None
    kv_minimum_gib: float = 1.0
    num_gpu_blocks_override: int | None = None
    options: tuple[EffectiveOption, ...] = ()
    notices: tuple[Notice, ...] = ()
