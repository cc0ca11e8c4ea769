#!/bin/bash
while getopts "p:c:t:b:" opt; do
    case $opt in
        p) port="$OPTARG" ;;
        c) cores="$OPTARG" ;;
        t) tp_degree="$OPTARG" ;;
        b) bs="$OPTARG" ;;
    esac
done

MODEL_PATH="/shared/models/llama-3.3-70b-instruct/"
COMPILED_MODEL_PATH="/shared/traced-models/dp_tutorial/"

export VLLM_NEURON_FRAMEWORK="neuronx-distributed-inference"
export NEURON_COMPILED_ARTIFACTS=$COMPILED_MODEL_PATH
export NEURON_RT_VISIBLE_CORES=${cores}

nohup vllm serve \
    --model "$MODEL_PATH" \
    --max-num-seqs "${bs}" \
    --max-model-len 8192 \
    --no-enable-prefix-caching \
    --tensor-parallel-size "${tp_degree}" \
    --additional-config '{
        "override_neuron_config": {
            "on_device_sampling_config": {
                "do_sample": true,
                "global_topk": 64
            }
        }
    }' \
    --port "${port}" > ./vllm_server.log 2>&1 &
