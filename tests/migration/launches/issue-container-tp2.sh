vllm serve /mnt/models \
   --device neuron \
   --tensor-parallel-size 2 \
   --max-model-len 64 \
   --max-num-seqs 32
