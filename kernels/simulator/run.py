"""Running a kernel: arrays become tensors in HBM, one thread per core runs the function, tensors become arrays."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_neuron import envs
from vllm_neuron.kernels.simulator import dtypes
from vllm_neuron.kernels.simulator.capacity import check_capacity
from vllm_neuron.kernels.simulator.errors import HERE, Broken, Violation
from vllm_neuron.kernels.simulator.machine import Machine, enter
from vllm_neuron.kernels.simulator.objects import NKIObject
from vllm_neuron.kernels.simulator.storage import Lifetime, MemoryRegion, Storage
from vllm_neuron.kernels.simulator.subset import check_language
from vllm_neuron.kernels.simulator.targets import TARGETS, Target
from vllm_neuron.kernels.simulator.team import Team
from vllm_neuron.kernels.simulator.tensor import NkiTensor
from vllm_neuron.kernels.simulator.trace import Instruction
from vllm_neuron.kernels.simulator.views import View, row_major


@dataclass
class Run:
    """What a simulated kernel did.

    Attributes:
        outputs: what it returned, tensors as arrays.
        target: the core it ran on.
        instructions: executed by all cores.
        traces: what each core executed, when asked for.
        notes: rules it broke that compatible mode let pass, with how often; results outside of a function's range.
        peak: bytes per partition in use at the same time, by memory.
    """

    outputs: Any
    target: Target
    instructions: int
    traces: list[list[Instruction]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    peak: dict[str, int] = field(default_factory=dict)


def target_of(name: str | None) -> Target:
    """The target of a name, of NEURON_PLATFORM_TARGET_OVERRIDE, or trn2.

    Raises:
        EnvironmentVariableError: the variable holds something else.
    """
    return TARGETS[name or envs.NEURON_PLATFORM_TARGET_OVERRIDE or "trn2"]


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lnc: int = 1,
    strict: bool = True,
    target: str | None = None,
    precise: bool | None = None,
    trace: bool = False,
    values: bool = True,
) -> Run:
    """Run a kernel on `lnc` simulated cores.

    Args:
        function: the undecorated kernel.
        args, kwargs: its arguments; arrays are NumPy's or torch's (on the CPU), and updated if the kernel writes them.
        lnc: cores, 1 or 2.
        strict: enforce every documented rule; otherwise only what a result needs, and count the rest in `notes`.
        target: "trn2" or "trn3"; None reads NEURON_PLATFORM_TARGET_OVERRIDE and falls back to trn2.
        precise: float types keep their precision in memory; None reads NKI_PRECISE_FP.
        trace: keep what was executed, for the cost model.
        values: compute. False only checks and traces, for estimates of large shapes: there are no outputs, reads of
            uninitialised memory are not noticed, and neither loops nor branches may depend on data.

    Raises:
        Violation: the kernel breaks a rule.
        ValueError: `lnc` is neither 1 nor 2.
    """
    if lnc not in (1, 2):
        raise ValueError(f"kernel[{lnc}]: a kernel runs on 1 or 2 cores (LNC)")
    notes: Counter[str] = Counter()
    if strict:
        _check_arguments(args, kwargs)
        if not check_language(function):
            notes["language: not checked, because the kernel's source cannot be read"] += 1
    chosen, team = target_of(target), Team(lnc)
    precise = envs.NKI_PRECISE_FP if precise is None else precise
    machines = [Machine(chosen, strict, precise, rank, team, [] if trace else None, values) for rank in range(lnc)]
    bound = Arguments(precise)
    arguments = bound.tensors(list(args)), bound.tensors(dict(kwargs))
    results = _threads(function, arguments, machines)
    outputs = bound.arrays(results[0], strict) if values else None
    bound.write_back()
    lifetimes = [machine.lifetimes for machine in machines]
    peak = check_capacity(lifetimes[0], chosen, strict)
    for other in lifetimes[1:]:
        check_capacity(other, chosen, strict)
    return Run(
        outputs,
        chosen,
        sum(machine.clock for machine in machines),
        [machine.trace for machine in machines if machine.trace is not None],
        sum((machine.notes for machine in machines), notes),
        peak,
    )


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Kernels take tuples, not lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, list):
            raise Violation(
                "language", "an argument of the kernel is a list: the compiler takes tuples", "", "the call"
            )


def _threads(function: Callable[..., Any], arguments: tuple[Any, Any], machines: list[Machine]) -> list[Any]:
    results: list[Any] = [None] * len(machines)
    failures: list[BaseException] = []

    def work(machine: Machine) -> None:
        enter(machine)
        try:
            results[machine.rank] = function(*arguments[0], **arguments[1])
        except Broken as broken:
            failures.append(Violation("kernel", str(broken), "", _line_of(broken)))
        except BaseException as failure:
            failures.append(failure)
        finally:
            machine.team.leave()
            enter(None)

    if len(machines) == 1:
        work(machines[0])
    else:
        threads = [threading.Thread(target=work, args=(machine,)) for machine in machines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return results


def _line_of(broken: Broken) -> str:
    """The kernel's line in a traceback: the last one outside of the simulator."""
    place, step = "unknown", broken.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        place = place if file.startswith(HERE) else f"{file}:{step.tb_lineno}"
        step = step.tb_next
    return place


class Arguments:
    """Arrays as tensors in HBM and back.

    Attributes:
        precise: float types keep their precision in memory.
    """

    def __init__(self, precise: bool) -> None:
        self.precise = precise
        self._inputs: list[tuple[NkiTensor, np.ndarray]] = []
        self._torch = False

    def tensors(self, value: Any) -> Any:
        """The value with every array in it, at any depth, as a tensor."""
        if type(value).__module__.startswith("torch") and hasattr(value, "data_ptr"):
            self._torch = True
            return self._tensor(_from_torch(value))
        if isinstance(value, np.ndarray):
            return self._tensor(value)
        if isinstance(value, dict):
            return {key: self.tensors(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self.tensors(entry) for entry in value)
        if dataclasses.is_dataclass(value) and isinstance(value, NKIObject) and not isinstance(value, type):
            return self._object(value)
        return value

    def _object(self, value: Any) -> Any:
        changed = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        converted = {name: self.tensors(entry) for name, entry in changed.items()}
        if all(converted[name] is entry for name, entry in changed.items()):
            return value
        return dataclasses.replace(value, **converted)

    def _tensor(self, array: np.ndarray) -> NkiTensor:
        try:
            dtype = dtypes.of("bool" if array.dtype == np.bool_ else array.dtype)
        except KeyError:
            raise TypeError(f"{array.dtype} is no data type of NKI; there are {', '.join(dtypes.DTYPES)}") from None
        storage_type = dtypes.stored(dtype, self.precise)
        shared = array.dtype == storage_type and array.flags.c_contiguous and array.flags.writeable
        values = array if shared else np.ascontiguousarray(array).astype(storage_type, copy=True)
        flat = values.reshape(-1).view(np.uint8)
        lifetime = Lifetime(MemoryRegion.shared_hbm, flat.nbytes, f"input {dtype.name} {array.shape}", "the call")
        storage = Storage(MemoryRegion.shared_hbm, 1, flat.nbytes, lifetime, self.precise, data=flat)
        shape = tuple(array.shape) or (1,)
        tensor = NkiTensor(storage, dtype, View(shape, row_major(shape), 0))
        if not shared:
            self._inputs.append((tensor, array))
        return tensor

    def write_back(self) -> None:
        """Copy what a kernel wrote to inputs that it could not share memory with."""
        for tensor, array in self._inputs:
            with suppress(ValueError):  # a read-only array cannot have been meant as an output
                array[...] = np.asarray(tensor).reshape(array.shape).astype(array.dtype)

    def arrays(self, value: Any, strict: bool) -> Any:
        """The value with every tensor in it as an array, of torch where the inputs were.

        Raises:
            Violation: an output is not in shared HBM, or parts of it were never written (strict).
        """
        if isinstance(value, NkiTensor):
            if strict:
                _check_output(value)
            array = np.array(value.elements())
            array = array if array.dtype == value.data_type.numpy else array.astype(value.data_type.numpy)
            return _to_torch(array, value.dtype) if self._torch else array
        if isinstance(value, list | tuple):
            return type(value)(self.arrays(entry, strict) for entry in value)
        if isinstance(value, dict):
            return {key: self.arrays(entry, strict) for key, entry in value.items()}
        return value


def _check_output(tensor: NkiTensor) -> None:
    line = tensor.storage.lifetime.line
    if tensor.buffer is not MemoryRegion.shared_hbm:
        raise Violation("kernel", f"it returns {tensor!r}: outputs must be in shared_hbm", "", line)
    written = tensor.storage.written
    if written is not None and not (tensor.elements(written) != 0).all():
        raise Violation("kernel", f"it returns {tensor!r}, parts of which were never written", "", line)


_BITS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Types that torch and NumPy only share by their bits, with the integer type to go through."""


def _from_torch(tensor: Any) -> np.ndarray:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().contiguous()
    if name in _BITS:
        return plain.view(getattr(torch, _BITS[name])).numpy().view(dtypes.named(name).numpy)
    return plain.numpy()


def _to_torch(array: np.ndarray, name: str) -> Any:
    import torch

    if name in _BITS:
        return torch.from_numpy(array.view(_BITS[name])).view(getattr(torch, name))
    return torch.from_numpy(array if array.dtype.kind in "iufb" else array.astype(np.float32))
