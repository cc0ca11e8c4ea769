"""Functions of `nki.language` for which NKI emits several instructions that it does not document."""

from collections.abc import Callable

import numpy as np

from vllm_neuron.kernels.simulator import rules
from vllm_neuron.kernels.simulator.isa.instruction import instruction
from vllm_neuron.kernels.simulator.machine import Machine
from vllm_neuron.kernels.simulator.memory import issue, write
from vllm_neuron.kernels.simulator.tensor import NkiTensor


@instruction
def compute(machine: Machine, dst: NkiTensor, data: NkiTensor, function: Callable[[np.ndarray], np.ndarray]) -> None:
    """dst = function(data) of float32 (partitions, elements); strict mode has instructions only."""
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    machine.limit(False, "this function of nki.language is no instruction: write it with nki.isa")
    issue(machine, "vector", (dst,), (data,))
    with np.errstate(all="ignore"):
        write(machine, dst, np.asarray(function(rules.rows_of(machine, "data", data)), np.float32))
