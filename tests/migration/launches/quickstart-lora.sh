vllm serve \
  --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 \
  --tensor-parallel-size 32 \
  --max-model-len 1024 \
  --max-num-seqs 2 \
  --enable-lora \
  --max-loras 2 \
  --max-cpu-loras 4 \
  --lora-modules \
    first_adapter=/srv/lora/first \
    second_adapter=/srv/lora/second \
  --additional-config '{"override_neuron_config": {"lora_ckpt_json": "/srv/lora/adapters.json"}}' \
  --port 8000
