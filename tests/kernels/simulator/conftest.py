"""The modules here import `nki`, which is the simulator."""

from vllm_neuron.kernels import simulator

assert simulator.install(), "the real nki package is installed: these tests are of the simulator"
