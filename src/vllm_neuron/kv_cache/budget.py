"""How many bytes the KV cache may take: pure functions of memory totals and settings.

Two policies. By default memory utilisation and a fractional cap bound the budget. An explicit reserve (headroom), zero
included, replaces both. "Host available" is what /proc/meminfo calls MemAvailable: loaded weights are already missing
from it, so the CPU formulas do not subtract them again.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

UTILIZATION = "gpu_memory_utilization"
HEADROOM_VARIABLE = "VLLM_NEURON_RESERVED_HEADROOM_GIB"
CAP_VARIABLE = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
MINIMUM_VARIABLE = "VLLM_NEURON_MIN_KV_BUDGET_GIB"


class KVBudgetError(RuntimeError):
    """The memory that the settings leave for the KV cache is too small."""


@dataclass(frozen=True)
class BudgetPolicy:
    """The settings that decide the budget.

    Attributes:
        memory_utilization: vLLM's gpu_memory_utilization, in (0, 1]; unused when headroom is set.
        cap_fraction: VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION, in (0, 1]; unused when headroom is set.
        headroom_gib: VLLM_NEURON_RESERVED_HEADROOM_GIB, reserve per worker in GiB; None = the default policy. Zero is
            a reserve like any other.
        minimum_gib: VLLM_NEURON_MIN_KV_BUDGET_GIB.
    """

    memory_utilization: float
    cap_fraction: float = 0.30
    headroom_gib: float | None = None
    minimum_gib: float = 1.0

    @property
    def settings(self) -> str:
        """Name of the policy, and the settings that are in force under it."""
        if self.headroom_gib is None:
            return f"default policy: {UTILIZATION}={self.memory_utilization:g}, {CAP_VARIABLE}={self.cap_fraction:g}"
        return f"headroom policy: {HEADROOM_VARIABLE}={self.headroom_gib:g}"


@dataclass(frozen=True)
class KVBudget:
    """A budget and how it came about.

    Attributes:
        num_bytes: what the KV cache may take, per worker.
        memory: bytes of the worker: its share of what the host has available, or its device memory.
        weights: bytes of its weights, as far as they are to come out of ``memory`` still.
        policy: the settings it was computed from.
        formula: the computation with its numbers, for logs and errors.
    """

    num_bytes: int
    memory: int
    weights: int
    policy: BudgetPolicy
    formula: str

    @property
    def without_reserve(self) -> int:
        """What the KV cache could take if nothing were reserved and nothing capped."""
        return max(self.memory - self.weights, 0)


def cpu_budget(host_available: int, local_workers: int, policy: BudgetPolicy) -> KVBudget:
    """Budget of one worker in CPU mode.

    Default policy:  host_available / local_workers * memory_utilization * cap_fraction
    Headroom policy: max(host_available / local_workers - headroom, 0)

    Args:
        host_available: bytes available on the host after the weights are loaded.
        local_workers: workers on this host, which share its memory evenly.
        policy: the settings.
    """
    share = host_available // local_workers
    parts = f"{_gib(host_available)} of host memory available / {local_workers} local workers"
    if policy.headroom_gib is None:
        num_bytes = int(share * policy.memory_utilization * policy.cap_fraction)
        formula = f"{parts} * {policy.memory_utilization:g} gpu_memory_utilization * {policy.cap_fraction:g} cap"
    else:
        num_bytes = max(share - round(policy.headroom_gib * GIB), 0)
        formula = f"{parts} - {policy.headroom_gib:g} GiB headroom"
    return KVBudget(num_bytes, share, 0, policy, formula)


def neuron_budget(total_hbm: int, model_weight_bytes: int, policy: BudgetPolicy) -> KVBudget:
    """Budget of one worker on a Neuron device.

    Default policy:  min(max(total - weights, 0), total * cap_fraction), total = total_hbm * memory_utilization
    Headroom policy: max(total_hbm - weights - headroom, 0)

    Args:
        total_hbm: bytes of device memory of this worker.
        model_weight_bytes: bytes of its weights, from the weight table, so that every start computes the same.
        policy: the settings.
    """
    weights = f"{_gib(model_weight_bytes)} of weights"
    if policy.headroom_gib is None:
        total = int(total_hbm * policy.memory_utilization)
        num_bytes = min(max(total - model_weight_bytes, 0), int(total * policy.cap_fraction))
        formula = (
            f"{_gib(total_hbm)} of HBM * {policy.memory_utilization:g} gpu_memory_utilization = {_gib(total)}; the "
            f"smaller of that - {weights} and that * {policy.cap_fraction:g} cap"
        )
    else:
        num_bytes = max(total_hbm - model_weight_bytes - round(policy.headroom_gib * GIB), 0)
        formula = f"{_gib(total_hbm)} of HBM - {weights} - {policy.headroom_gib:g} GiB headroom"
    return KVBudget(num_bytes, total_hbm, model_weight_bytes, policy, formula)


def require_minimum(budget: KVBudget) -> None:
    """Check the budget against VLLM_NEURON_MIN_KV_BUDGET_GIB.

    Raises:
        KVBudgetError: below it; the text says how the budget was computed and which setting to move which way.
    """
    minimum = round(budget.policy.minimum_gib * GIB)
    if budget.num_bytes >= minimum:
        return
    raise KVBudgetError(
        f"KV cache budget below minimum threshold: {_gib(budget.num_bytes)} is less than "
        f"{MINIMUM_VARIABLE}={budget.policy.minimum_gib:g}. Budget per worker = {budget.formula}. "
        f"{_advice(budget, minimum)} Lower {MINIMUM_VARIABLE} only if a smaller KV cache is valid for the workload. "
        "See docs/troubleshooting.md#kv-cache-budget-below-minimum-threshold."
    )


def require_one_request(
    budget: KVBudget, bytes_per_block: int, blocks_of: Callable[[int], int], max_model_len: int
) -> None:
    """Check that a single request of full length fits, beside the null block.

    Args:
        budget: what there is.
        bytes_per_block: bytes of a block over all layers.
        blocks_of: how many blocks a request of so many tokens holds at most at a time.
        max_model_len: the full length.

    Raises:
        KVBudgetError: it does not; the text gives the memory needed, the memory there is, and the longest context that
            fits.
    """
    needed = (blocks_of(max_model_len) + 1) * bytes_per_block
    if budget.num_bytes >= needed:
        return
    blocks = max(budget.num_bytes // bytes_per_block - 1, 0)
    longest = bisect_right(range(1, max_model_len + 1), blocks, key=blocks_of)
    remedy = f"Set max_model_len to {longest} or less" if longest else "No context length fits"
    raise KVBudgetError(
        f"One request of max_model_len={max_model_len} tokens needs a KV cache of {_gib(needed)}, but the budget is "
        f"{_gib(budget.num_bytes)}. Budget per worker = {budget.formula}. The longest context that fits is {longest} "
        f"tokens. {remedy}, or: {_advice(budget, needed)}"
    )


def require_blocks_for_one_request(num_blocks: int, needed: int, block_size: int, max_model_len: int) -> None:
    """Check a number of blocks set by hand (num_gpu_blocks_override).

    Args:
        num_blocks: the number.
        needed: what a request of full length holds at most at a time.
        block_size: tokens of a block.
        max_model_len: the full length.

    Raises:
        KVBudgetError: a request of full length does not fit beside the null block.
    """
    if num_blocks <= needed:
        raise KVBudgetError(
            f"num_gpu_blocks_override={num_blocks} is too small: one request of max_model_len={max_model_len} tokens "
            f"takes {needed} blocks of block_size={block_size}, and block 0 is reserved for padding. Set "
            f"num_gpu_blocks_override to {needed + 1} or more, or lower max_model_len."
        )


def steady(num_bytes: int, at_least: int = 0) -> int:
    """``num_bytes`` rounded down to three significant bits, but not below ``at_least`` if it was not below before.

    The number of blocks is part of every graph's shape. Available host memory differs a little at every start; taken
    as it is, it would make every start compile everything again. The steps are a seventh to a quarter of the value.
    """
    step = 1 << max(num_bytes.bit_length() - 3, 0)
    return max(num_bytes // step * step, min(at_least, num_bytes))


def host_memory_available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that new allocations can take without swapping (MemAvailable).

    Raises:
        OSError: the file is not there or has no such line.
    """
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no line MemAvailable")


def _advice(budget: KVBudget, needed: int) -> str:
    """Which setting to move which way so that the budget reaches ``needed`` bytes."""
    policy = budget.policy
    if policy.headroom_gib is None:
        return _advice_by_default(budget, needed)
    largest = budget.without_reserve - needed
    if largest < 0:
        return (
            f"No headroom is small enough: even {HEADROOM_VARIABLE}=0 (now {policy.headroom_gib:g}) leaves "
            f"{_gib(budget.without_reserve)}, and {_gib(needed)} is needed."
        )
    # Rounded down to hundredths, so that the printed value does fit.
    return (
        f"Decrease {HEADROOM_VARIABLE}={policy.headroom_gib:g}: the largest headroom that fits is "
        f"{largest * 100 // GIB / 100:g}."
    )


def _advice_by_default(budget: KVBudget, needed: int) -> str:
    """Each setting whose increase alone is enough, with the smallest value that is; or else both together."""
    policy, memory = budget.policy, budget.memory
    utilization, cap = policy.memory_utilization, policy.cap_fraction
    if needed > budget.without_reserve:
        return (
            f"No {UTILIZATION} and no {CAP_VARIABLE} is large enough: all memory that there is leaves "
            f"{_gib(budget.without_reserve)}, and {_gib(needed)} is needed."
        )
    with_more_cap = needed / (memory * utilization)
    with_more_utilization = max((needed + budget.weights) / memory, needed / (memory * cap))
    choices = []
    # The cap is no remedy where utilisation leaves too little beside the weights, however large it is.
    if with_more_cap <= 1 and memory * utilization - budget.weights >= needed:
        choices.append(f"{CAP_VARIABLE}={cap:g} to {_least(with_more_cap):g} or more")
    if with_more_utilization <= 1:
        choices.append(f"{UTILIZATION}={utilization:g} to {_least(with_more_utilization):g} or more")
    if not choices:
        enough = _least(needed / memory)
        return f"Increase {UTILIZATION}={utilization:g} to 1 and {CAP_VARIABLE}={cap:g} to {enough:g} or more."
    return f"Increase {', or '.join(choices)} (each at most 1)."


def _least(fraction: float) -> float:
    """A fraction of at most 1 rounded up to hundredths, so that the printed value fits in spite of later rounding."""
    return min(math.ceil(fraction * 100 + 1e-6) / 100, 1)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} GiB"
