MODEL_PATH="/srv/models/llama-3.1-8b-instruct/"
LORA_ADAPTER_DIR="/srv/lora_adapters"
LORA_MODULES="lora_id_1=${LORA_ADAPTER_DIR}/topic-control "
LORA_MODULES+="lora_id_2=${LORA_ADAPTER_DIR}/short-prompt "

export NEURON_COMPILED_ARTIFACTS="/srv/traced_model/llama-3.1-8B-Lora/"
nohup vllm serve $MODEL_PATH \
    --max-num-seqs 2 \
    --max-model-len 64 \
    --tensor-parallel-size 32 \
    --disable-log-requests \
    --no-enable-chunked-prefill \
    --no-enable-prefix-caching \
    --enable-lora \
    --max-loras 2 \
    --max-cpu-loras 8 \
    --override-neuron-config "{\"sequence_parallel_enabled\": false}" \
    --lora-modules ${LORA_MODULES} \
    --port 8000 >./vllm_server.log 2>&1 &
