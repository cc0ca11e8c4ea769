MODEL_PATH="/srv/model_hf/Llama-3.2-90B-Vision-Instruct-hf"
python3 -m vllm.entrypoints.openai.api_server \
    --model $MODEL_PATH \
    --tensor-parallel-size 32 \
    --max-model-len 2048 \
    --max-num-seqs 4 \
    --device neuron \
    --override-neuron-config '{
        "context_encoding_buckets": [1024, 2048],
        "token_generation_buckets": [1024, 2048],
        "sequence_parallel_enabled": false,
        "is_continuous_batching": true,
        "on_device_sampling_config": {
            "global_topk": 64,
            "dynamic": true,
            "deterministic": false
        }
    }'
