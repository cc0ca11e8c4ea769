"""The one resolved configuration: computed once at start, frozen, and read by everything else."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ResolvedConfig:
    """All decisions taken from vLLM's parameters, `additional_config` and the environment.

    Attributes:
        backend: "neuron_native" or "vllm_neuron".
        cpu_mode: run on the CPU instead of Neuron devices.
        max_model_len: longest sequence in tokens.
        max_num_seqs: most requests that run at once; the largest batch bucket.
        max_num_batched_tokens: most tokens of a prefill step; the largest token bucket.
        num_batched_tokens_buckets: prefill token counts, ascending.
        num_seqs_buckets: decode batch sizes, ascending.
        decode_context_length_buckets: decode context lengths in tokens, ascending; the last is max_model_len.
        kv_segment_size: tokens per prefill segment, or None when segmented prefill is off.
        block_size: tokens per KV block.
        enable_prefix_caching: reuse KV blocks of shared prefixes.
        v2_model_runner: which scheduler protocol the model runner speaks.
        disable_warmup_compile: a graph that is not in the cache is a fatal error.
        disable_nki_kernels: trace torch twins instead of kernels.
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
