vllm serve \
  --model meta-llama/Llama-3.1-8B-Instruct \
  --tensor-parallel-size 32 \
  --max-model-len 2048 \
  --max-num-seqs 4 \
  --speculative-config '{"model": "./eagle_draft", "method": "eagle", "num_speculative_tokens": 5, "max_model_len": 2048}' \
  --port 8000
