"""`nki.isa`: the instructions, with the signatures of NKI 0.6."""

from vllm_neuron.kernels.simulator.errors import NkiValidationError
from vllm_neuron.kernels.simulator.isa.constants import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from vllm_neuron.kernels.simulator.isa.control import (
    core_barrier,
    dropout,
    get_nc_sub_version,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
    rng,
    sendrecv,
    set_rng_seed,
)
from vllm_neuron.kernels.simulator.isa.dma import dma_compute, dma_copy, dma_transpose
from vllm_neuron.kernels.simulator.isa.elementwise import (
    memset,
    nc_stream_shuffle,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from vllm_neuron.kernels.simulator.isa.mx import activate2, exponential, nc_matmul_mx, quantize_mx
from vllm_neuron.kernels.simulator.isa.reductions import (
    activation,
    activation_reduce,
    bn_aggr,
    bn_stats,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from vllm_neuron.kernels.simulator.isa.selection import (
    affine_select,
    iota,
    local_gather,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_n_gather,
    nonzero_with_count,
    range_select,
    select_reduce,
    sequence_bounds,
)
from vllm_neuron.kernels.simulator.isa.tensor_engine import nc_matmul, nc_transpose
from vllm_neuron.kernels.simulator.registers import VirtualRegister

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown

__all__ = [
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
]


def __getattr__(name: str) -> object:
    raise AttributeError(f"nki.isa.{name} is not simulated")
