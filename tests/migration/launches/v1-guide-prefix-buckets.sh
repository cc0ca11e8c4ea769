--additional-config '{
    "override-neuron-config": {
        "is_prefix_caching": true,
        "is_block_kv_layout": true,
        "pa_num_blocks": 4096,
        "pa_block_size": 32,
        "context_encoding_buckets": [512, 1024, 2048],
        "prefix_buckets": [512, 1024],
        "token_generation_buckets": [2048]
        }
    }'
