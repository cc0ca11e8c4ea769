export MODEL_ID="Qwen/Qwen3-32B"
export DRAFT_MODEL_ID="Qwen/Qwen3-0.6B"
VLLM_USE_V1=0 vllm serve $MODEL_ID \
    --tensor-parallel-size 64 \
    --max-num-seqs 1 \
    --max-model-len 6400 \
    --override-neuron-config '{"save_sharded_checkpoint": true, "enable_fused_speculation": true}' \
    --speculative-config '{"model": "'"$DRAFT_MODEL_ID"'", "num_speculative_tokens": 7, "max_model_len": 2048, "method": "eagle"}'
