export NEURON_SEND_IP=$send_ip
export NEURON_RECV_IP=$recv_ip
export NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT=45645
export NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED=1

if [ "$SEND" = "1" ]; then
    PORT=8100
    TRANSFER_CONFIG='{"kv_connector":"NeuronConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2}'
else
    PORT=8200
    TRANSFER_CONFIG='{"kv_connector":"NeuronConnector","kv_role":"kv_consumer","kv_rank":1,"kv_parallel_size":2}'
fi

python3 -m vllm.entrypoints.openai.api_server \
    --model "$MODEL_PATH" \
    --max-num-seqs "$BATCH_SIZE" \
    --max-model-len 8192 \
    --tensor-parallel-size "$TP_DEGREE" \
    --device neuron \
    --use-v2-block-manager \
    --override-neuron-config "{}" \
    --kv-transfer-config "$TRANSFER_CONFIG" \
    --port "$PORT"
