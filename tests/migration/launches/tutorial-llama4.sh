export VLLM_USE_V1=1
export NEURON_COMPILED_ARTIFACTS="/srv/llama4/traced_models/Llama-4-Scout-17B-16E-Instruct/"
export VLLM_RPC_TIMEOUT=100000

# Start server with custom Neuron configuration
vllm serve \
    --model "meta-llama/Llama-4-Scout-17B-16E-Instruct" \
    --max-num-seqs 1 \
    --max-model-len 16384 \
    --tensor-parallel-size 64 \
    --port 8000 \
    --disable-log-requests \
    --limit-mm-per-prompt image=5 \
    --additional-config '{
        "override_neuron_config": {
            "text_config": {
                "batch_size": 1,
                "is_continuous_batching": true,
                "seq_len": 16384,
                "enable_bucketing": true,
                "context_encoding_buckets": [256, 512, 1024, 2048, 4096, 8192, 10240, 16384],
                "token_generation_buckets": [256, 512, 1024, 2048, 4096, 8192, 10240, 16384],
                "torch_dtype": "float16",
                "async_mode": true,
                "world_size": 64,
                "tp_degree": 64,
                "cp_degree": 16
            },
            "vision_config": {
                "batch_size": 1,
                "seq_len": 8192,
                "torch_dtype": "float16",
                "tp_degree": 16,
                "cp_degree": 1,
                "dp_degree": 4,
                "world_size": 64
            }
        }
    }'
