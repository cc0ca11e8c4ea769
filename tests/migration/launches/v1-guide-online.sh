python3 -m vllm.entrypoints.openai.api_server \
--model "meta-llama/Llama-3.3-70B-Instruct" \
--tensor-parallel-size 64 \
--max-model-len 4096 \
--max-num-seqs 4 \
--no-enable-prefix-caching \
--additional-config '{
    "override_neuron_config": {
        "enable_bucketing": False,
    }
}' \
--port 8000
