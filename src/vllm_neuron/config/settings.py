"""The vLLM parameters that the configuration depends on, free of vLLM's types."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServingSettings:
    """What vLLM's front end decided. The plugin fills this from VllmConfig; nothing here names a vLLM class.

    Attributes:
        max_model_len: longest sequence, in tokens.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of a step.
        max_num_seqs_set: the user chose max_num_seqs; otherwise it is a default that may be changed.
        max_num_batched_tokens_set: the same of max_num_batched_tokens.
        block_size: tokens per KV block, or None when the user left it open.
        enable_prefix_caching: reuse KV blocks of shared prefixes.
        enable_chunked_prefill: prompts may be split over steps.
        gpu_memory_utilization: fraction of memory that may be used, in (0, 1].
        num_gpu_blocks_override: number of KV blocks, or None for a budget from memory.
        kv_windows: per KV group of the model how many tokens its layers look back on; None is all.
        kv_cache_dtype: "auto", a torch dtype's name or an fp8 form.
        dtype: the model's dtype, e.g. "bfloat16".
        quantization: vLLM's --quantization, or the method that the checkpoint's quantization_config names.
        enable_prompt_embeds: requests may carry embeddings instead of token ids.
        async_scheduling: vLLM's choice, which is True by default.
        scheduling_policy: "fcfs" or another policy of vLLM.
        architectures: Hugging Face's names from the model's configuration.
        is_multimodal: the model takes images, audio or video.
        is_pooling: the model returns embeddings, classes or scores instead of tokens.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size: degrees of parallelism.
        context_parallel_size: the larger of the prefill and the decode context parallel size.
        enable_expert_parallel: experts are spread over devices.
        speculative_method: method of the speculative config, or None when there is none.
        kv_connector: connector of the KV transfer config, or None when there is none.
        ec_connector: connector of the encoder cache transfer config, or None when there is none.
        enable_lora: adapters may be loaded.
        mm_encoder_only: build only the encoder of a multimodal model.
        enforce_eager: the user asked for steps that are not compiled.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_seqs_set: bool = True
    max_num_batched_tokens_set: bool = True
    block_size: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    kv_windows: tuple[int | None, ...] = (None,)
    kv_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    quantization: str | None = None
    enable_prompt_embeds: bool = False
    async_scheduling: bool = False
    scheduling_policy: str = "fcfs"
    architectures: tuple[str, ...] = ()
    is_multimodal: bool = False
    is_pooling: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    speculative_method: str | None = None
    kv_connector: str | None = None
    ec_connector: str | None = None
    enable_lora: bool = False
    mm_encoder_only: bool = False
    enforce_eager: bool = False
