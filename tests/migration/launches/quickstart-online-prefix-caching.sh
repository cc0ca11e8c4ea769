vllm serve \
  --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 \
  --tensor-parallel-size 32 \
  --max-model-len 1024 \
  --max-num-seqs 8 \
  --enable-prefix-caching \
  --block-size 32 \
  --num-gpu-blocks-override 256 \
  --additional-config '{
    "override_neuron_config": {
      "is_prefix_caching": true,
      "is_block_kv_layout": true,
      "pa_num_blocks": 256,
      "pa_block_size": 32
    }
  }' \
  --port 8000
