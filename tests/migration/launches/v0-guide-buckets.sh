export VLLM_NEURON_FRAMEWORK="neuronx-distributed-inference"

python -m vllm.entrypoints.openai.api_server \
  --model "meta-llama/Llama-3.1-8B-Instruct" \
  --device "neuron" \
  --tensor-parallel-size 16 \
  --max-num-seqs 1 \
  --max-model-len 1024 \
  --port 8080 \
  --override-neuron-config "{"enable_bucketing": true, \
    "context_encoding_buckets": [256, 512, 1024], \
    "token_generation_buckets": [32, 64, 128, 256, 512, 768], \
    "max_context_length": 1024, \
    "seq_len": 1024, \
    "batch_size": 1, \
    "ctx_batch_size": 1, \
    "tkg_batch_size": 1, \
    "is_continuous_batching": true}"
