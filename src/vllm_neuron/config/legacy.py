"""Names that other releases of the Neuron integration used, and where each is set today."""

from collections.abc import Mapping

CONTAINERS: Mapping[str, str] = {
    "override_neuron_config": "additional_config.neuron_config",
    "vision_neuron_config": "additional_config.encoder_neuron_config",
}
"""Groups of options, and the group whose place they had."""

_TOKENS = "Use additional_config.neuron_config.num_batched_tokens_buckets (prefill token counts)"
_CONTEXTS = (
    "Use additional_config.neuron_config.decode_context_length_buckets (decode context lengths); decode batch sizes "
    "are num_seqs_buckets"
)
_LENGTH = "Use vLLM's --max-model-len"
_BATCH = "Use vLLM's --max-num-seqs"
_SEGMENTS = "Use additional_config.neuron_config.kv_segment_size_buckets; prompts are split over steps without it too"
_SPECULATION = "Use vLLM's --speculative-config"
_KERNELS = "Remove it: kernels are chosen automatically; VLLM_NEURON_DISABLE_NKI_KERNELS=1 turns them all off"
_PER_REQUEST = "Remove it: with on-device sampling every request brings its own sampling parameters"

OPTIONS: Mapping[str, str] = {
    "context_encoding_buckets": _TOKENS,
    "buckets": _TOKENS,
    "token_generation_buckets": _CONTEXTS,
    "enable_bucketing": "Remove it: buckets are always on; a list with a single value in "
    "additional_config.neuron_config.num_batched_tokens_buckets compiles a single size",
    "pa_num_blocks": "Use vLLM's --num-gpu-blocks-override, or leave it out: the KV cache is sized automatically",
    "pa_block_size": "Use vLLM's --block-size",
    "is_block_kv_layout": "Remove it: the KV cache is always paged",
    "is_prefix_caching": "Use vLLM's --enable-prefix-caching (the default) or --no-enable-prefix-caching",
    "is_continuous_batching": "Remove it: continuous batching is always on",
    "is_chunked_prefill": _SEGMENTS,
    "chunked_prefill_config": _SEGMENTS,
    "async_mode": "Use vLLM's --async-scheduling or --no-async-scheduling",
    "skip_warmup": "Remove it: every graph is compiled or loaded from the cache before the server is ready",
    "seq_len": _LENGTH,
    "max_length": _LENGTH,
    "max_context_length": _LENGTH,
    "n_positions": _LENGTH,
    "batch_size": _BATCH,
    "max_batch_size": _BATCH,
    "ctx_batch_size": "Remove it: a prefill step has one prompt",
    "tkg_batch_size": _BATCH,
    "tp_degree": "Use vLLM's --tensor-parallel-size",
    "pp_degree": "Use vLLM's --pipeline-parallel-size",
    "dp_degree": "Use vLLM's --data-parallel-size",
    "ep_degree": "Use vLLM's --enable-expert-parallel",
    "torch_dtype": "Use vLLM's --dtype",
    "kv_cache_quant": "Use vLLM's --kv-cache-dtype fp8",
    "sequence_parallel_enabled": "Remove it: sequence parallelism is on wherever it applies",
    "speculation_length": _SPECULATION,
    "enable_eagle_speculation": _SPECULATION,
    "enable_fused_speculation": _SPECULATION,
    "quantized_checkpoints_path": "Pass the quantized checkpoint as the model",
    "attn_kernel_enabled": _KERNELS,
    "qkv_kernel_enabled": _KERNELS,
    "mlp_kernel_enabled": _KERNELS,
    "num_vision_tokens_buckets": "Use additional_config.encoder_neuron_config.num_encoder_input_buckets",
    "vision_attention_block_size": "Use additional_config.encoder_neuron_config.encoder_attention_block_size",
    "max_vision_seq_len": "Use additional_config.encoder_neuron_config.max_encoder_seq_len",
}
"""Options, wherever they stand."""

SAMPLING: Mapping[str, str] = {
    "dynamic": _PER_REQUEST,
    "do_sample": f"{_PER_REQUEST}; all_greedy compiles an argmax-only graph",
    "global_topk": "Use top_k",
    "deterministic": _PER_REQUEST,
}
"""Options of on_device_sampling_config."""

VLLM_PARAMETERS: Mapping[str, str] = {
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "enable_prefix_caching": "--enable-prefix-caching",
    "num_gpu_blocks_override": "--num-gpu-blocks-override",
    "block_size": "--block-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "enable_prompt_embeds": "--enable-prompt-embeds",
    "async_scheduling": "--async-scheduling",
    "mm_encoder_only": "--mm-encoder-only",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "data_parallel_size": "--data-parallel-size",
    "enable_expert_parallel": "--enable-expert-parallel",
    "speculative_config": "--speculative-config",
    "kv_transfer_config": "--kv-transfer-config",
    "dtype": "--dtype",
}
"""vLLM parameters that are easily put into additional_config by mistake, and their flags."""
