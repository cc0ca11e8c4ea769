export NEURON_RT_INSPECT_ENABLE=0
export NEURON_RT_VIRTUAL_CORE_SIZE=2

MODEL_PATH="/srv/models/Llama-3.1-405B-Instruct-FP8-rescaled"
DRAFT_MODEL_PATH="/srv/models/Llama-3.2-1b-instruct"
COMPILED_MODEL_PATH="/srv/traced_models/Llama-3.1-405B-Instruct_fp8"

export VLLM_NEURON_FRAMEWORK="neuronx-distributed-inference"
export NEURON_COMPILED_ARTIFACTS=$COMPILED_MODEL_PATH
VLLM_RPC_TIMEOUT=100000 vllm serve \
    -—model $MODEL_PATH \
    -—max-num-seqs 1 \
    -—max-model-len 12800 \
    -—tensor-parallel-size 64 \
    -—device neuron \
    -—speculative-max-model-len 12800 \
    -—speculative-model $DRAFT_MODEL_PATH \
    -—num-speculative-tokens 7 \
    -—use-v2-block-manager \
    -—override-neuron-config "{"enable_fused_speculation":true, "quantized-mlp-kernel-enabled":true, "quantization-type":"per_channel_symmetric", "skip_warmup": true}" \
    -—port 8000 & PID=$!
echo "vLLM server started with PID $PID"
