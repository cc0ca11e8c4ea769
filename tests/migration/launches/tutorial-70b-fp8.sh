export XLA_HANDLE_SPECIAL_SCALAR=1
export UNSAFE_FP8FNCAST=1
export VLLM_RPC_TIMEOUT=100000
export VLLM_NEURON_FRAMEWORK=neuronx-distributed-inference

MODEL_PATH="checkpoints/llama-3.3-70b-fp8"
COMPILED_MODEL_PATH="traced/llama-3.3-70b-fp8"
export NEURON_COMPILED_ARTIFACTS=$COMPILED_MODEL_PATH

vllm serve \
    $MODEL_PATH \
    --tensor-parallel-size 64 \
    --max-num-seqs 4 \
    --max-model-len 5120 \
    --port 8000 \
    --disable-log-requests \
    --block_size 128 \
    --num-gpu-blocks-override 4 \
    --no-enable-prefix-caching \
    --additional-config '{
        "override_neuron_config": {
            "max_prompt_length": 4096
           }
    }' 2>&1 | tee vllm.log
