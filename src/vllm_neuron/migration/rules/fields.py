"""Fields of NxD Inference's NeuronConfig, as its public documentation names them."""

from vllm_neuron.config.options import NeuronConfig
from vllm_neuron.migration.launch import Verdict
from vllm_neuron.migration.rules import transforms
from vllm_neuron.migration.rules.flags import EAGLE3_ONLY, SIZED_AUTOMATICALLY, block_size, number_of_blocks
from vllm_neuron.migration.rules.rule import Rule, dropped, table, undecided, unsupported

prompt_buckets, context_buckets = transforms.prompt_buckets, transforms.context_buckets

_LENGTH = "It says what --max-model-len says."
_REQUESTS = "It says what --max-num-seqs says."
_ONE_PROMPT = "A prefill step has one prompt; how many requests run together is --max-num-seqs."
_ALWAYS = "Always on."
_KERNELS = "Kernels are chosen automatically; VLLM_NEURON_DISABLE_NKI_KERNELS=1 turns them all off."
_SPEED = "How NxD Inference computed it, not what; compare the speed."
_LOADING = "Weights are sharded while they are read, and there is nothing to choose."
_MOE = "How NxD Inference computed experts, not what; compare the speed."
_MEMORY = "Memory is sized automatically."
_ATTENTION_PARALLEL = (
    "There is no counterpart. Spread requests over --data-parallel-size, or use fewer devices for each copy."
)

LENGTHS_AND_BATCHES = (
    *(Rule(name, Verdict.DROPPED, "--max-model-len", _LENGTH, 4096, transforms.repeats("max_model_len"), True)
      for name in ("seq_len", "max_length", "n_positions")),
    *(Rule(name, Verdict.DROPPED, "", "Prompts may be as long as --max-model-len allows.", 2048,
           transforms.longest_prompt) for name in ("max_context_length", "max_prompt_length")),
    *(Rule(name, Verdict.DROPPED, "--max-num-seqs", _REQUESTS, 8, transforms.repeats("max_num_seqs"), True)
      for name in ("batch_size", "max_batch_size", "tkg_batch_size")),
    *dropped(_ONE_PROMPT, ctx_batch_size=1, spec_batch_size=1),
    *dropped("Requests say so by max_tokens.", max_new_tokens=512),
    *dropped("Requests are laid out by vLLM.", padding_side="right", n_active_tokens=4096),
    *dropped(_ALWAYS, is_continuous_batching=True, continuous_batching=True),
    Rule("async_mode", Verdict.DROPPED, "", "Async scheduling is on wherever on-device sampling is; false becomes "
         "--no-async-scheduling.", True, transforms.async_mode),
    *dropped("Every graph is compiled or loaded before the server is ready.", skip_warmup=True),
)  # fmt: skip

NUMERICS = (
    Rule("torch_dtype", Verdict.RENAMED, "--dtype", "It says what --dtype says.", "bfloat16", transforms.dtype),
    Rule("cast_type", Verdict.DECIDE, "", "All parameters are cast to --dtype; compare the accuracy.", "as-declared",
         transforms.cast_type),
    *undecided("All of the model computes in --dtype; compare the accuracy.", rpl_reduce_dtype="float32",
               attention_dtype="float32"),
    *dropped("Only for debugging; logprobs of a request are the way now.", output_logits=True),
    Rule("quantized", Verdict.KEPT, "neuron_config.quantized", "It needs quantization_dtype, int8 before if not said.",
         True, transforms.quantized),
    Rule("quantization_dtype", Verdict.KEPT, "neuron_config.quantization_dtype", "The same names; f8e5m2 is not there.",
         "f8e4m3", transforms.quantization_dtype),
    *undecided("Quantized weights are no second folder: pass the quantized checkpoint as the model.",
               quantized_checkpoints_path="checkpoints/quantized"),
    *undecided("There is no option for it: a quantized checkpoint has to say so itself.",
               quantization_type="per_channel_symmetric", modules_to_not_convert=["lm_head"],
               draft_model_modules_to_not_convert=["lm_head"], quantize_clamp_bound=240),
    Rule("kv_cache_quant", Verdict.RENAMED, "--kv-cache-dtype fp8", "It wants calibrated scales in the checkpoint.",
         True, transforms.kv_cache_quant),
)  # fmt: skip

PARALLELISM = (
    Rule("tp_degree", Verdict.DROPPED, "--tensor-parallel-size", "It says what --tensor-parallel-size says.", 32,
         transforms.repeats("tensor_parallel_size"), True),
    Rule("pp_degree", Verdict.RENAMED, "--pipeline-parallel-size", "It says what --pipeline-parallel-size says.", 2,
         transforms.repeats("pipeline_parallel_size"), True),
    Rule("dp_degree", Verdict.RENAMED, "--data-parallel-size", "Data parallelism is vLLM's own now.", 2,
         transforms.repeats("data_parallel_size"), True),
    *(Rule(name, Verdict.RENAMED, "--enable-expert-parallel",
           "Expert parallelism is vLLM's own now; its degree is that of tensor times data parallelism.", 8,
           transforms.expert_parallel) for name in ("ep_degree", "moe_ep_degree")),
    *dropped("It follows from the other degrees.", world_size=32, moe_tp_degree=2, start_rank_id=0,
             local_ranks_size=32, num_cores_per_group=2),
    *(Rule(name, Verdict.DECIDE, "", _ATTENTION_PARALLEL, 8, transforms.unless_one)
      for name in ("attention_dp_degree", "cp_degree")),
    *dropped("On wherever it applies.", sequence_parallel_enabled=True),
    Rule("logical_nc_config", Verdict.DECIDE, "NEURON_LOGICAL_NC_CONFIG",
         "Set the variable to the same number where the server and the compiler run.", 1, transforms.logical_cores),
    Rule("logical_neuron_cores", Verdict.DROPPED, "NEURON_LOGICAL_NC_CONFIG",
         "Set the variable, if it is not the hardware's default.", 2, transforms.logical_cores),
)  # fmt: skip

CACHE_AND_BUCKETS = (
    Rule("enable_bucketing", Verdict.DROPPED, "", "Buckets are always on; false becomes lists of one bucket.", True,
         transforms.bucketing),
    Rule("context_encoding_buckets", Verdict.RENAMED, "neuron_config.num_batched_tokens_buckets",
         "Prefill is bucketed by the number of tokens.", [128, 4096], prompt_buckets),
    Rule("buckets", Verdict.RENAMED, "neuron_config.num_batched_tokens_buckets",
         "Prefill is bucketed by the number of tokens.", [128, 4096], prompt_buckets),
    Rule("token_generation_buckets", Verdict.RENAMED, "neuron_config.decode_context_length_buckets",
         "Decode is bucketed by the number of requests; context lengths are a second dimension.", [1024, 2048],
         context_buckets),
    *dropped("A prefill graph always reads what is cached before it.", prefix_buckets=[512]),
    Rule("is_prefix_caching", Verdict.DROPPED, "", "On by default; false becomes --no-enable-prefix-caching.", True,
         transforms.prefix_caching),
    *dropped("The KV cache is always paged.", is_block_kv_layout=True),
    Rule("pa_num_blocks", Verdict.DROPPED, "", SIZED_AUTOMATICALLY, 2048, number_of_blocks),
    Rule("pa_block_size", Verdict.DROPPED, "", SIZED_AUTOMATICALLY, 128, block_size),
    *dropped("Prompts that are longer than a step are split over steps; kv_segment_size_buckets sets the size of each.",
             is_chunked_prefill=True, chunked_prefill_config={"max_num_seqs": 8}),
    *dropped(_LOADING, save_sharded_checkpoint=True, skip_sharding=False, weights_to_skip_layout_optimization=["w"]),
    *dropped(_MEMORY, scratchpad_page_size=1024, scratch_pad_size=1024, cc_pipeline_tiling_factor=1),
)  # fmt: skip

SPECULATION = (
    *dropped("It belongs to a draft model, which goes into --speculative-config with everything that concerns it.",
             speculation_length=7, enable_fused_speculation=True, enable_eagle_draft_input_norm=True,
             trace_tokengen_model=False, medusa_speculation_length=64, num_medusa_heads=4, medusa_tree=[[0]],
             token_tree_config={}),
    *unsupported(EAGLE3_ONLY, enable_eagle_speculation=True, is_medusa=True),
)  # fmt: skip

LORA = (
    *undecided("Adapters are listed by --lora-modules NAME=FOLDER, and their limits are --max-loras and "
               "--max-cpu-loras.", lora_config={"max_loras": 2}, lora_ckpt_json="adapters.json"),
)  # fmt: skip

COMPUTATION = (
    *dropped(_KERNELS, attn_kernel_enabled=True, qkv_kernel_enabled=True, mlp_kernel_enabled=True,
             quantized_mlp_kernel_enabled=True, rmsnorm_quantize_kernel_enabled=True, attn_tkg_nki_kernel_enabled=True,
             attn_tkg_builtin_kernel_enabled=True, attn_block_tkg_nki_kernel_enabled=True,
             attn_block_tkg_nki_kernel_cache_update=True, attn_block_tkg_nki_kernel_cascaded_attention=True,
             attn_block_cte_nki_kernel_enabled=True, mlp_tkg_nki_kernel_enabled=True, mlp_kernel_fuse_residual_add=True,
             qkv_nki_kernel_enabled=True, qkv_kernel_fuse_residual_add=True, qkv_kernel_nbsd_layout=True,
             qkv_cte_nki_kernel_fuse_rope=True, strided_context_parallel_kernel_enabled=True,
             moe_fused_nki_kernel_enabled=True, out_proj_kernel_enabled=True, use_index_calc_kernel=True,
             attn_cls="NeuronLlamaAttention"),
    *dropped(_SPEED, fused_qkv=True, flash_decoding_enabled=True, k_cache_transposed=True, kv_cache_tiling=False,
             qk_layernorm=False, layer_boundary_markers=True, vocab_parallel=True,
             on_device_embedding=True, shard_over_sequence=True),
    *dropped(_MOE, blockwise_matmul_config={"block_size": 512}, router_config={"dtype": "float32"}, glu_mlp=True,
             glu_type="glu", early_expert_affinity_modulation=False, disable_normalize_top_k_affinities=False,
             mode_mask_padded_tokens=True, moe_mask_padded_tokens=True, transpose_shared_experts_weights=True,
             fused_shared_experts=True, return_expert_index=False),
)  # fmt: skip

TODAYS = tuple(
    Rule(
        name,
        Verdict.KEPT,
        f"neuron_config.{name}",
        "An option of this plugin.",
        example,
        transforms.keep_field(name),
        True,
    )
    for name, example in {
        "num_batched_tokens_buckets": [512, 4096],
        "num_seqs_buckets": [1, 8],
        "kv_segment_size_buckets": [2048],
        "decode_context_length_buckets": [1024],
        "quantization": "mxfp4",
    }.items()
)
assert {rule.old for rule in TODAYS} <= set(NeuronConfig.model_fields)

FIELDS = table(
    *LENGTHS_AND_BATCHES,
    *NUMERICS,
    *PARALLELISM,
    *CACHE_AND_BUCKETS,
    *SPECULATION,
    *LORA,
    *COMPUTATION,
    *TODAYS,
)
"""By name. Groups of fields are taken apart: see nested.py."""
