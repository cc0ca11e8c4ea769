nohup python3 -m vllm.entrypoints.api_server --device neuron --model openlm-research/open_llama_3b --tensor-parallel-size 24 &
