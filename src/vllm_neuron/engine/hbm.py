"""What to do when device memory (HBM) is too small to load or compile: the advice for the budget policy in force."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_neuron.compilation.hbm_signatures import hbm_signature
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.kv_cache.budget import CAP_VARIABLE, HEADROOM_VARIABLE

HEADROOM_STEP_GIB = 1
GUIDE = "docs/troubleshooting.md#hbm-allocation-errors-during-load-or-compilation"


class HBMAllocationError(RuntimeError):
    """HBM is too small for what is loaded or compiled beside the KV cache. The text has the cause, then the advice."""


@contextmanager
def hbm_failures_explained(config: ResolvedConfig) -> Iterator[None]:
    """Add advice to exceptions of the block that are HBM allocation failures, or whose compiler log tells of one.

    Raises:
        HBMAllocationError: in their place; its cause is the exception itself.
    """
    try:
        yield
    except HBMAllocationError:
        raise
    except Exception as error:
        signature = _signature(error)
        if signature is None:
            raise
        raise HBMAllocationError(f"{error}\n{advice(signature, config)} See {GUIDE}.") from error


def advice(signature: str, config: ResolvedConfig) -> str:
    """What was recognised, what gave the KV cache its size, and the next value to try."""
    start = (
        f"HBM allocation failure ({signature}): the KV cache can leave too little device memory for code, scratch, "
        "internal tensors or communication buffers."
    )
    blocks, headroom, cap = config.num_gpu_blocks_override, config.kv_headroom_gib, config.kv_cap_fraction
    if blocks is not None:
        return f"{start} Its size was set by hand: lower num_gpu_blocks_override={blocks}, or leave it out."
    if headroom is not None:
        return (
            f"{start} {HEADROOM_VARIABLE}={headroom:g} is the reserve in force. Increase it in steps of "
            f"{HEADROOM_STEP_GIB} GiB until the same configuration starts, next: "
            f"export {HEADROOM_VARIABLE}={headroom + HEADROOM_STEP_GIB:g}. Each GiB is one GiB less of KV cache. If "
            "that leaves too little of it, reduce max_model_len or max_num_seqs."
        )
    return (
        f"{start} The default policy is in force: {CAP_VARIABLE}={cap:g} and "
        f"gpu_memory_utilization={config.gpu_memory_utilization:g}. Reduce the fraction until the same configuration "
        f"starts, next: export {CAP_VARIABLE}={_less(cap):g}. If that leaves too little KV cache, reduce max_model_len "
        "or max_num_seqs."
    )


def _less(cap: float) -> float:
    """0.05 less, or two thirds where that is little left."""
    return round(max(cap - 0.05, cap * 2 / 3), 3)


def _signature(error: BaseException) -> str | None:
    """Of an exception, of what it was raised from, and of the compiler log that it names."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found = hbm_signature(str(current)) or _in_log(getattr(current, "log", None))
        if found is not None:
            return found
        current = current.__cause__ or current.__context__
    return None


def _in_log(log: object) -> str | None:
    if not isinstance(log, Path):
        return None
    with suppress(OSError), log.open(errors="replace") as lines:
        return next((found for line in lines if (found := hbm_signature(line))), None)
    return None
