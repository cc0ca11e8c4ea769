VLLM_NEURON_FRAMEWORK='neuronx-distributed-inference' python -m vllm.entrypoints.openai.api_server \
    --model="meta-llama/Llama-3.1-8B-Instruct" \
    --max-num-seqs=4 \
    --max-model-len=128 \
    --tensor-parallel-size=8 \
    --port=8080 \
    --device "neuron" \
    --override-neuron-config "{"enable_bucketing":false}"
