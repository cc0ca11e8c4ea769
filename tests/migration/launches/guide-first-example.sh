# NxDI (legacy vLLM Neuron integration)
VLLM_NEURON_FRAMEWORK='neuronx-distributed-inference' \
python3 -m vllm.entrypoints.openai.api_server \
    --model meta-llama/Llama-3.3-70B-Instruct \
    --device neuron \
    --tensor-parallel-size 32 \
    --max-num-seqs 8 \
    --max-model-len 4096 \
    --override-neuron-config '{"on_device_sampling_config": {"dynamic": true}}'
