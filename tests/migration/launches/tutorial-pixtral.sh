export NEURON_RT_VIRTUAL_CORE_SIZE=2
export VLLM_NEURON_FRAMEWORK="neuronx-distributed-inference"

nohup vllm serve \
    --model "/srv/model_hf/" \
    --limit-mm-per-prompt 'image=6' \
    --tensor-parallel-size 64 \
    --max-model-len 10240 \
    --max-num-seqs 4 \
    --device neuron \
    --override-neuron-config "{\"text_neuron_config\": { \"tp_degree\": 64, \"world_size\": 64, \"batch_size\": 4, \"seq_len\": 10240, \"ctx_batch_size\": 1, \"flash_decoding_enabled\": true, \"enable_bucketing\": true, \"skip_warmup\": true, \"context_encoding_buckets\": [2048, 4096, 10240], \"token_generation_buckets\": [2048, 4096, 10240], \"torch_dtype\": \"float16\", \"sequence_parallel_enabled\": true, \"fused_qkv\": true }, \"vision_neuron_config\": { \"batch_size\": 1, \"seq_len\": 10240, \"tp_degree\": 16, \"world_size\": 64, \"torch_dtype\": \"float16\", \"buckets\": [2048, 4096, 6144, 8192, 10240] }}" > ./vllm_server.log 2>&1 &
SERVER_PID=$!
