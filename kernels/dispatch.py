"""The one place that decides, per op, between its kernels and its torch twin.

Each op has a twin in `<op>_torch.py` (its specification). Kernel sets replace some of them while a graph is traced:

    selection = select("neuron_native", cpu_mode=True, ...)   from the route, the device and the variables
    with using(*selection.sets, options=selection.options):
        traced = route.trace(...)                             from shapes and dtypes of each call

The first of the sets that has the op and takes the arguments computes it; the twins take all. `choices` tells what is
known before any graph is traced, and the log what became of each op in a graph, and why: at debug level, and as a
warning where an NKI kernel was left out.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vllm_neuron import envs
from vllm_neuron.kernels.argmax_torch import argmax
from vllm_neuron.kernels.embedding_torch import embedding
from vllm_neuron.kernels.kv_write_torch import kv_write
from vllm_neuron.kernels.linear_torch import linear
from vllm_neuron.kernels.log_sum_exp_torch import log_sum_exp
from vllm_neuron.kernels.logits_torch import logits
from vllm_neuron.kernels.mask_logits_torch import mask_logits
from vllm_neuron.kernels.nki_ops import NkiOps, NkiOptions
from vllm_neuron.kernels.paged_attention_torch import paged_attention
from vllm_neuron.kernels.refusal import RefusedError
from vllm_neuron.kernels.rms_norm_torch import add_rms_norm, rms_norm
from vllm_neuron.kernels.rope_torch import rope, rope_tables
from vllm_neuron.kernels.silu_mul_torch import silu_mul
from vllm_neuron.kernels.top_k_torch import top_k

logger = logging.getLogger(__name__)

Implementation = Callable[..., Any]

_TWINS: Mapping[str, Implementation] = {
    op.__name__: op
    for op in (
        embedding,
        linear,
        rms_norm,
        add_rms_norm,
        rope_tables,
        rope,
        silu_mul,
        logits,
        kv_write,
        paged_attention,
        mask_logits,
        top_k,
        argmax,
        log_sum_exp,
    )
}
OPS: tuple[str, ...] = tuple(_TWINS)
"""Names of all ops."""


class KernelSet(Enum):
    """Where the implementation of an op comes from."""

    TORCH = "torch"
    """The torch twins: every route can lower them."""
    CPU = "cpu"
    """C++ kernels for CPU mode."""
    NKI = "nki"
    """NKI kernels, on Neuron devices or in the simulator."""


COVERED: Mapping[KernelSet, frozenset[str]] = {
    KernelSet.TORCH: frozenset(OPS),
    KernelSet.CPU: frozenset(OPS) - {"rope_tables"},
    KernelSet.NKI: frozenset(op for op in OPS if hasattr(NkiOps, op)),
}
"""The ops of each set, known without building or importing any. A graph that must not write in place has no C++ one
of kv_write."""

ONLY_WIDE_CACHES = frozenset(("kv_write", "paged_attention"))
"""Ops whose NKI kernels do not take a KV cache of 8-bit floats."""

_MATRICES = "it takes weights as [in, out], and models hold them as [out, in]: graphs call {}"
UNCALLED: Mapping[str, str] = {
    "gated_mlp": _MATRICES.format("linear and silu_mul"),
    "norm_qkv_rope": _MATRICES.format("rms_norm, linear and rope"),
    "output_projection": _MATRICES.format("linear"),
    "kv_quantize": "FP8 KV caches are written and read by what computes kv_write and paged_attention",
    "kv_dequantize": "FP8 KV caches are written and read by what computes kv_write and paged_attention",
    "decode_mask": "decode attention makes its mask itself, or takes torch's with VLLM_NEURON_ATTN_MASK_TORCH=1",
}
"""NKI kernels that are in no graph, and why."""

_NAMES = {KernelSet.TORCH: "torch twin", KernelSet.CPU: "C++ kernel", KernelSet.NKI: "NKI kernel"}


@dataclass(frozen=True)
class Selection:
    """The kernel sets of a configuration.

    Attributes:
        sets: in order of preference; the twins, which take what is left, need not be among them.
        options: how NKI kernels are called.
        reasons: for each set but the twins, why it is in use or why not.
    """

    sets: tuple[KernelSet, ...]
    options: NkiOptions
    reasons: Mapping[KernelSet, str]


class Choice(NamedTuple):
    """What computes an op, and why."""

    op: str
    implementation: str
    why: str


def select(
    backend: str, cpu_mode: bool, disabled: bool, simulated: bool, torch_mask: bool, cores: int, nki_installed: bool
) -> Selection:
    """The kernel sets for a route and a device.

    Args:
        backend: name of the compile route.
        cpu_mode: graphs run on the CPU instead of Neuron devices.
        disabled: VLLM_NEURON_DISABLE_NKI_KERNELS.
        simulated: NKI_SIMULATOR.
        torch_mask: VLLM_NEURON_ATTN_MASK_TORCH.
        cores: physical cores of a logical core on the device, 1 or 2.
        nki_installed: the nki package of the Neuron SDK is there.
    """
    native = backend == envs.NATIVE
    if disabled:
        usable = dict.fromkeys((KernelSet.NKI, KernelSet.CPU), (False, "VLLM_NEURON_DISABLE_NKI_KERNELS=1"))
    elif cpu_mode:
        simulator = "in the nki package's own simulator" if nki_installed else "in the simulator"
        usable = {
            KernelSet.NKI: (simulated, f"NKI_SIMULATOR={int(simulated)}" + (f": {simulator}" if simulated else "")),
            KernelSet.CPU: (True, "CPU mode"),
        }
    else:
        why = "native route on Neuron devices" if nki_installed else "the nki package of the Neuron SDK is missing"
        why = why if native else "the XLA route cannot put NKI kernels into what it hands to neuronx-cc yet"
        usable = {
            KernelSet.NKI: (native and nki_installed, why),
            KernelSet.CPU: (False, "not on Neuron devices"),
        }
    options = NkiOptions(on_device=not cpu_mode, in_place=native, torch_mask=torch_mask, cores=1 if cpu_mode else cores)
    sets = tuple(kernels for kernels, (works, _) in usable.items() if works)
    return Selection(sets, options, {kernels: why for kernels, (_, why) in usable.items()})


def choices(selection: Selection) -> tuple[Choice, ...]:
    """What computes each op as long as it takes the arguments, which is known only when a graph is traced; then the
    kernels that no graph calls."""
    called = [_choice(selection, op) for op in OPS]
    return (*called, *(Choice(name, "in no graph", why) for name, why in UNCALLED.items()))


def fp8_cache_warning(selection: Selection) -> str | None:
    """What to tell who serves with an FP8 KV cache and expects NKI kernels; None if they are not in use anyway."""
    if KernelSet.NKI not in selection.sets:
        return None
    left = " and ".join(f"{op} ({_NAMES[_without_nki(selection, op)]})" for op in sorted(ONLY_WIDE_CACHES))
    return f"NKI kernels do not take an FP8 KV cache yet. What computes instead: {left}."


def prepare_weights(selection: Selection, weights: Sequence[torch.Tensor], room: int) -> object:
    """Make what the kernels of a selection want to have besides the weights themselves.

    Args:
        selection: the kernels that are going to read them.
        weights: in the order in which a step reads them. Nobody may write to them any more.
        room: bytes of host memory that it may take.

    Returns:
        what owns it: it is used as long as that lives.
    """
    return (
        import_module("vllm_neuron.kernels.cpu.packing").pack(weights, room)
        if KernelSet.CPU in selection.sets
        else None
    )


def _without_nki(selection: Selection, op: str) -> KernelSet:
    others = (kernels for kernels in selection.sets if kernels is not KernelSet.NKI)
    return next((kernels for kernels in others if _covers(kernels, op, selection.options)), KernelSet.TORCH)


def _choice(selection: Selection, op: str) -> Choice:
    whys = []
    for kernels, reason in selection.reasons.items():
        covered = _covers(kernels, op, selection.options)
        if covered and kernels in selection.sets:
            whys.append(reason)
            if (op, kernels) == ("paged_attention", KernelSet.NKI) and selection.options.torch_mask:
                whys.append("VLLM_NEURON_ATTN_MASK_TORCH=1: torch makes the mask of decode steps")
            if kernels is KernelSet.NKI and op in ONLY_WIDE_CACHES:
                whys.append(f"for an FP8 KV cache: {_NAMES[_without_nki(selection, op)]}")
            return Choice(op, _NAMES[kernels], "; ".join(whys))
        missing = "that does not write in place" if op in COVERED[kernels] else ""
        whys.append(f"{_NAMES[kernels]}: {reason}" if covered else f"there is no {_NAMES[kernels]} {missing}".rstrip())
    return Choice(op, _NAMES[KernelSet.TORCH], "; ".join(whys))


def _covers(kernels: KernelSet, op: str, options: NkiOptions) -> bool:
    return op in COVERED[kernels] and (options.in_place or (kernels, op) != (KernelSet.CPU, "kv_write"))


@dataclass(frozen=True)
class _Active:
    """What is in use inside of a block: per op the sets to try in turn, and what was logged already."""

    candidates: Mapping[str, tuple[tuple[KernelSet, Implementation], ...]]
    logged: set[Choice] = field(default_factory=set)


def _active_of(sets: tuple[KernelSet, ...], options: NkiOptions) -> _Active:
    modules = [(kernels, _load(kernels, options)) for kernels in dict.fromkeys((*sets, KernelSet.TORCH))]
    return _Active(
        {op: tuple((k, getattr(found, op)) for k, found in modules if _covers(k, op, options)) for op in OPS}
    )


def _load(kernels: KernelSet, options: NkiOptions) -> Any:
    """What has the implementations of a set under the ops' names; imported, and built, only now."""
    match kernels:
        case KernelSet.TORCH:
            return SimpleNamespace(**_TWINS)
        case KernelSet.CPU:
            return import_module("vllm_neuron.kernels.cpu.ops")
        case KernelSet.NKI:
            return NkiOps(options)


_DEFAULTS = NkiOptions()
_TWINS_ONLY = _active_of((), _DEFAULTS)
_active: ContextVar[_Active] = ContextVar("active", default=_TWINS_ONLY)


@contextmanager
def using(*sets: KernelSet, options: NkiOptions = _DEFAULTS) -> Iterator[None]:
    """Trace with these kernel sets inside the block, the first before the others.

    Args:
        sets: in order of preference; what they lack or do not take is left to the torch twins.
        options: how NKI kernels are called.
    """
    token = _active.set(_active_of(sets, options))
    try:
        yield
    finally:
        _active.reset(token)


def implementation(op: str) -> Implementation:
    """The function that computes `op` under the active kernel sets."""
    active = _active.get()
    candidates = active.candidates[op]
    if len(candidates) == 1:
        return candidates[0][1]

    @wraps(candidates[0][1])
    def first_that_takes(*args: Any, **kwargs: Any) -> Any:
        whys = []
        level = logging.DEBUG
        for kernels, function in candidates[:-1]:
            try:
                result = function(*args, **kwargs)
            except RefusedError as refused:
                whys.append(f"{_NAMES[kernels]}: {refused}")
                # Whoever has NKI kernels, or asks for their simulator, should know where they are not.
                level = logging.WARNING if kernels is KernelSet.NKI else level
            else:
                _log(active, level, Choice(op, _NAMES[kernels], "; ".join(whys) or "takes these arguments"))
                return result
        _log(active, level, Choice(op, _NAMES[KernelSet.TORCH], "; ".join(whys)))
        return candidates[-1][1](*args, **kwargs)

    return first_that_takes


def _log(active: _Active, level: int, choice: Choice) -> None:
    if choice not in active.logged:
        active.logged.add(choice)
        logger.log(level, "%s: %s (%s)", *choice)
