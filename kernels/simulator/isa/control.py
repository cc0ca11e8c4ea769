"""Registers, random numbers and the instructions by which two cores meet."""

from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator import rules
from vllm_neuron.kernels.simulator.errors import require
from vllm_neuron.kernels.simulator.isa.constants import dma_engine
from vllm_neuron.kernels.simulator.isa.constants import engine as Engine
from vllm_neuron.kernels.simulator.isa.instruction import chosen, instruction
from vllm_neuron.kernels.simulator.machine import Machine, current
from vllm_neuron.kernels.simulator.memory import issue, read, scalar, write
from vllm_neuron.kernels.simulator.registers import VirtualRegister
from vllm_neuron.kernels.simulator.targets import nc_version
from vllm_neuron.kernels.simulator.tensor import NkiTensor

_GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}
"""Bytes per partition that sendrecv moves by gpsimd_dma at most, by element size."""


def get_nc_version() -> nc_version:
    """Generation of the core that the kernel runs on."""
    return current().target.version


def get_nc_sub_version() -> int:
    """Revision of the core within its generation."""
    return 0


@instruction
def register_alloc(machine: Machine, x: Any = None) -> VirtualRegister:
    """A register, holding an integer or nothing. Older kernels pass a tensor of one element."""
    if isinstance(x, NkiTensor):
        machine.limit(False, "x is a tensor: load it with register_load")
        return VirtualRegister(scalar(machine, x, "x"))
    return VirtualRegister(None if x is None else scalar(machine, x, "x"))


@instruction
def register_move(machine: Machine, dst: VirtualRegister, src: Any) -> None:
    """dst = an integer or another register."""
    require(not isinstance(src, NkiTensor), "src is a tensor: use register_load")
    dst.write(scalar(machine, src, "src"))


@instruction
def register_load(machine: Machine, dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one element of a tensor in HBM or SBUF."""
    rules.tensor("src", src)
    machine.limit(src.buffer is not rules.PSUM, "src is in psum: registers load from hbm or sbuf")
    require(src.size == 1, f"src has {src.size} elements: it must have one")
    require(machine.values, "a register depends on a value, and this run computes none (values=False)")
    issue(machine, "sync", (), (src,))
    dst.write(int(read(machine, src, "src").reshape(()).astype(np.int64)))


@instruction
def register_store(machine: Machine, dst: NkiTensor, src: VirtualRegister) -> None:
    """The one element of a tensor in HBM or SBUF = a register."""
    rules.tensor("dst", dst)
    machine.limit(dst.buffer is not rules.PSUM, "dst is in psum: registers store to hbm or sbuf")
    require(dst.size == 1, f"dst has {dst.size} elements: it must have one")
    issue(machine, "sync", (dst,))
    write(machine, dst, np.asarray(scalar(machine, src, "src"), np.int64))


@instruction
def core_barrier(
    machine: Machine, data: Any, cores: Any, engine: Engine = Engine.gpsimd, name: str | None = None
) -> None:
    """Wait until all cores have come here; data is what they share in HBM."""
    members = (cores,) if isinstance(cores, int) else tuple(cores)
    if isinstance(data, NkiTensor):
        machine.limit(data.buffer.value == "shared_hbm", f"data is in {data.buffer.value}: it must be in shared_hbm")
    issue(machine, engine.name if engine is not Engine.unknown else "gpsimd", ())
    if machine.team.size == 1:
        machine.limit(False, "a kernel on one core has no other to wait for")
        return
    require(members == tuple(range(machine.team.size)), f"cores {members}: all cores of the kernel must take part")
    machine.team.meet("core_barrier")


@instruction
def sendrecv(
    machine: Machine,
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma,
    name: str | None = None,
) -> None:
    """Swap tiles in SBUF with the other core: its dst = our src, our dst = its src."""
    rules.since(machine, nc_version.gen3, "sendrecv")
    for role, operand in (("src", src), ("dst", dst)):
        rules.tensor(role, operand)
        machine.limit(operand.buffer is rules.SBUF, f"{role} is in {operand.buffer.value}: it must be in sbuf")
    require(src.dtype == dst.dtype, f"src is {src.dtype}, dst {dst.dtype}: they must be equal")
    require(src.size == dst.size and src.shape[0] == dst.shape[0], f"src has shape {src.shape}, dst {dst.shape}")
    size = machine.team.size
    require(size > 1, "a kernel on one core has no other to exchange with")
    for role, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        require(rank in range(size), f"{role} is {rank}: ranks are 0 to {size - 1}")
    if dma_engine.name == "gpsimd_dma":
        bytes_each, limit = src.free_elements * src.data_type.size, _GPSIMD_DMA_BYTES[src.data_type.size]
        machine.limit(bytes_each <= limit, f"src has {bytes_each} bytes per partition: gpsimd_dma moves up to {limit}")
    issue(machine, "dma", (dst,), (src,), dge="none")
    values = read(machine, src, "src").reshape(dst.shape).copy()
    received = machine.team.exchange(machine.rank, int(send_to_rank), int(recv_from_rank), pipe_id, values)
    require(received.shape == dst.shape, f"dst has shape {dst.shape}, what arrived {received.shape}")
    write(machine, dst, received)


@instruction
def rng(machine: Machine, dst: NkiTensor, engine: Engine = Engine.vector, name: str | None = None) -> None:
    """Random bits, cut to the integer type of dst. Which bits come is not the hardware's sequence."""
    rules.tile(machine, "dst", dst)
    rules.integers(machine, "dst", dst)
    picked = chosen(engine, Engine.vector, (Engine.vector, Engine.gpsimd))
    issue(machine, picked.name, (dst,))
    bits = machine.random.integers(0, 2**32, dst.shape, dtype=np.uint32)
    write(machine, dst, bits.astype(np.dtype(f"u{dst.numpy_type.itemsize}")).view(dst.numpy_type))


@instruction
def set_rng_seed(machine: Machine, src_seeds: NkiTensor, name: str | None = None) -> None:
    """Seed the random numbers of the Vector Engine by a (1, 1) tensor."""
    rules.tile(machine, "src_seeds", src_seeds)
    require(src_seeds.size == 1 and src_seeds.data_type.size == 4, f"src_seeds is {src_seeds!r}: one value of 32 bits")
    issue(machine, "vector", (), (src_seeds,))
    seed = int.from_bytes(read(machine, src_seeds, "src_seeds").tobytes(), "little")
    machine.random = np.random.default_rng(seed)


@instruction
def dropout(machine: Machine, dst: NkiTensor, data: NkiTensor, prob: Any, name: str | None = None) -> None:
    """dst = data with every element set to 0 with a probability (a number or one per partition)."""
    rules.tile(machine, "data", data)
    rules.tile(machine, "dst", dst)
    rules.same_layout("data", data, "dst", dst)
    require(dst.dtype == data.dtype, f"dst is {dst.dtype}, data {data.dtype}: they must be equal")
    chance = rules.column(machine, "prob", prob, data.shape[0], fp32=data.data_type.kind != "float")
    issue(machine, "vector", (dst,), (data, prob))
    values = read(machine, data, "data").reshape(data.shape[0], -1)
    keep = machine.random.random(values.shape, dtype=np.float32) >= chance
    write(machine, dst, np.where(keep, values, np.zeros((), values.dtype)))
