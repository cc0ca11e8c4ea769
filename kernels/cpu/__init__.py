"""C++ kernels for CPU mode, as operators `torch.ops.vllm_neuron_cpu.*`. Importing `ops` builds and registers them."""

NAMESPACE = "vllm_neuron_cpu"
"""Of the operators."""
