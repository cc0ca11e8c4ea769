export MODEL="meta-llama/Llama-3.3-70B-Instruct"
export VLLM_BATCH=8
export MAX_LEN=8192
export ETCD="10.0.0.7:8989"
export PORT=8000

docker run -d \
  --name prefill-vllm-server1 \
  --privileged \
  --device /dev/infiniband/uverbs0 \
  --shm-size=10g \
  -p ${PORT}:${PORT} \
  -e MODEL \
  -e VLLM_BATCH \
  -e MAX_LEN \
  -e ETCD \
  -e PORT \
  public.ecr.aws/neuron/pytorch-inference-vllm-neuronx:0.9.1-neuronx-py310-sdk2.25.1-ubuntu22.04 \
  bash -c "exec python3 -m vllm.entrypoints.openai.api_server \
    --model \$MODEL \
    --max-num-seqs \$VLLM_BATCH \
    --max-model-len \$MAX_LEN \
    --tensor-parallel-size 64 \
    --device neuron \
    --speculative-max-model-len \$MAX_LEN \
    --override-neuron-config '{}' \
    --kv-transfer-config '{\"kv_connector\":\"NeuronConnector\",\"kv_role\":\"kv_producer\",\"kv_buffer_size\":2e11,\"etcd\":\"\$ETCD\"}' \
    --port \$PORT"
