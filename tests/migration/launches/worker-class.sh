export NEURON_CC_FLAGS="--logical-nc-config=2 -O1"
VLLM_USE_V1=1 python vllm/entrypoints/openai/api_server.py \
    --model /srv/models/llama-3.1-8b-instruct \
    --max-num-seqs 8 \
    --max-model-len 4096 \
    --max-num-batched-tokens 128 \
    --enable-chunked-prefill \
    --block-size 128 \
    --device neuron \
    -tp 4 \
    --worker-cls="vllm.v1.worker.neuron_worker.NeuronWorker"
