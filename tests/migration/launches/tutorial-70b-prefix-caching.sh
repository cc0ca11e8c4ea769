#!/bin/bash
rm -f ./vllm_server.log

MODEL_PATH="/srv/models/Llama-3.3-70B-Instruct/"
COMPILED_MODEL_PATH="/srv/traced_model/Llama-3.3-70B-Instruct/"

export VLLM_NEURON_FRAMEWORK="neuronx-distributed-inference"
export NEURON_COMPILED_ARTIFACTS=$COMPILED_MODEL_PATH
VLLM_RPC_TIMEOUT=100000
nohup vllm serve \
    --model $MODEL_PATH \
    --max-num-seqs 4 \
    --max-model-len 8192 \
    --tensor-parallel-size 64 \
    --num-gpu-blocks-override 2048 \
    --enable-prefix-caching \
    --block-size 32 \
    --additional-config '{"override_neuron_config": {"is_block_kv_layout": true, "is_prefix_caching": true}}' \
    --port 8000 > ./vllm_server.log 2>&1 &
SERVER_PID=$!

until grep -q "Server is ready" ./vllm_server.log 2>/dev/null || ! kill -0 $SERVER_PID 2>/dev/null; do sleep 0.5; done
