"""The KV budget against tables worked out by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.kv_cache.budget import (
    GIB,
    BudgetPolicy,
    KVBudgetError,
    cpu_budget,
    host_memory_available,
    neuron_budget,
    require_blocks_for_one_request,
    require_minimum,
    require_one_request,
    steady,
)


@pytest.mark.parametrize(
    ("available", "workers", "policy", "expected"),
    [
        # 20 * 0.9 * 0.3
        (20, 1, BudgetPolicy(0.9), 5.4),
        # 20 / 4 * 0.9 * 0.3
        (20, 4, BudgetPolicy(0.9), 1.35),
        # 20 / 2 * 0.5 * 0.5
        (20, 2, BudgetPolicy(0.5, 0.5), 2.5),
        # The whole share: utilisation and cap no longer count.
        (20, 1, BudgetPolicy(0.9, headroom_gib=0.0), 20),
        (20, 2, BudgetPolicy(0.1, 0.01, headroom_gib=0.0), 10),
        # 20 / 2 - 4
        (20, 2, BudgetPolicy(0.9, headroom_gib=4.0), 6),
        (20, 2, BudgetPolicy(0.9, headroom_gib=4.5), 5.5),
        # More reserved than there is.
        (20, 2, BudgetPolicy(0.9, headroom_gib=100.0), 0),
    ],
)
def test_cpu_by_hand(available: float, workers: int, policy: BudgetPolicy, expected: float) -> None:
    assert cpu_budget(available * GIB, workers, policy).num_bytes == pytest.approx(expected * GIB, abs=1)


@pytest.mark.parametrize(
    ("hbm", "weights", "policy", "expected"),
    [
        # min(24 * 0.9 - 4, 24 * 0.9 * 0.3) = min(17.6, 6.48)
        (24, 4, BudgetPolicy(0.9), 6.48),
        # min(21.6 - 18, 6.48)
        (24, 18, BudgetPolicy(0.9), 3.6),
        # The weights alone exceed the utilisation.
        (24, 23, BudgetPolicy(0.9), 0),
        # 24 - 4 - 0, 24 - 4 - 5
        (24, 4, BudgetPolicy(0.9, headroom_gib=0.0), 20),
        (24, 4, BudgetPolicy(0.9, 0.3, headroom_gib=5.0), 15),
        (24, 20, BudgetPolicy(0.9, headroom_gib=5.0), 0),
    ],
)
def test_neuron_by_hand(hbm: int, weights: int, policy: BudgetPolicy, expected: float) -> None:
    assert neuron_budget(hbm * GIB, weights * GIB, policy).num_bytes == pytest.approx(expected * GIB, abs=1)


@given(headroom=st.integers(0, 30))
def test_a_gib_more_headroom_is_a_gib_less_budget(headroom: int) -> None:
    for budget_of in (lambda p: cpu_budget(40 * GIB, 1, p), lambda p: neuron_budget(44 * GIB, 4 * GIB, p)):
        less = budget_of(BudgetPolicy(0.9, headroom_gib=float(headroom))).num_bytes
        more = budget_of(BudgetPolicy(0.9, headroom_gib=float(headroom + 1))).num_bytes
        assert less - more == GIB


def test_enough_is_enough() -> None:
    require_minimum(cpu_budget(20 * GIB, 1, BudgetPolicy(0.9, headroom_gib=19.0)))
    require_minimum(cpu_budget(1 * GIB, 1, BudgetPolicy(0.9, minimum_gib=0.01)))


def test_below_minimum_in_the_default_policy() -> None:
    with pytest.raises(KVBudgetError) as caught:
        require_minimum(cpu_budget(3 * GIB, 1, BudgetPolicy(0.9)))
    text = str(caught.value)
    assert text.startswith("KV cache budget below minimum threshold: 0.810 GiB is less than")
    assert "VLLM_NEURON_MIN_KV_BUDGET_GIB=1" in text
    # 1 / (3 * 0.9) = 0.3704; by utilisation alone it would take 1 / (3 * 0.3) = 1.11.
    assert "Increase VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION=0.3 to 0.38 or more (each at most 1)." in text
    assert "HEADROOM" not in text and "Increase gpu_memory_utilization" not in text and "Decrease" not in text


@pytest.mark.parametrize(
    ("memory", "weights", "policy", "advice"),
    [
        # 1 / (10 * 0.2) = 0.5; 1 / (10 * 0.3) = 0.334.
        (10, 0, BudgetPolicy(0.2),
         "Increase VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION=0.3 to 0.51 or more, or gpu_memory_utilization=0.2 to 0.34"),
        # The weights leave 24 * 0.8 - 18.5 = 0.7: no cap helps, (1 + 18.5) / 24 = 0.8125 of utilisation does.
        (24, 18.5, BudgetPolicy(0.8), "Increase gpu_memory_utilization=0.8 to 0.82 or more (each at most 1)"),
        # 2 * 0.5 is just the minimum, but neither 2 * 0.3 nor 1.9 * 0.5 reaches it.
        (1.9, 0, BudgetPolicy(0.5),
         "Increase gpu_memory_utilization=0.5 to 1 and VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION=0.3 to 0.53 or more."),
        # All of the memory is just enough, and the cap leaves it already.
        (24, 23, BudgetPolicy(0.9, 1.0), "Increase gpu_memory_utilization=0.9 to 1 or more (each at most 1)."),
        (24, 23.5, BudgetPolicy(0.9),
         "No gpu_memory_utilization and no VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION is large enough: all memory that "
         "there is leaves 0.500 GiB, and 1.000 GiB is needed."),
    ],
)  # fmt: skip
def test_the_default_policy_names_what_would_fit(
    memory: float, weights: float, policy: BudgetPolicy, advice: str
) -> None:
    with pytest.raises(KVBudgetError) as caught:
        require_minimum(neuron_budget(round(memory * GIB), round(weights * GIB), policy))
    assert advice in str(caught.value)


@given(
    memory=st.floats(0.5, 96),
    share=st.floats(0, 0.99),
    utilization=st.floats(0.01, 1),
    cap=st.floats(0.01, 1),
    minimum=st.floats(0.1, 8),
)
def test_every_value_that_the_default_policy_names_does_fit(
    memory: float, share: float, utilization: float, cap: float, minimum: float
) -> None:
    hbm, weights = round(memory * GIB), round(memory * share * GIB)
    policy = BudgetPolicy(utilization, cap, minimum_gib=minimum)
    try:
        require_minimum(neuron_budget(hbm, weights, policy))
        return
    except KVBudgetError as error:
        text = str(error)
    named = {
        "cap_fraction": re.search(r"CAP_FRACTION=\S+ to ([\d.]+\d|\d)", text),
        "memory_utilization": re.search(r"utilization=\S+ to ([\d.]+\d|\d)", text),
    }
    values = {field: float(found[1]) for field, found in named.items() if found}
    if not values:
        assert "is large enough" in text and hbm - weights < minimum * GIB
    for changes in [values] if " and VLLM" in text else [{field: value} for field, value in values.items()]:
        assert all(value > getattr(policy, field) or value == 1 for field, value in changes.items())
        require_minimum(neuron_budget(hbm, weights, replace(policy, **changes)))


def test_below_minimum_under_headroom_names_the_largest_that_fits() -> None:
    with pytest.raises(KVBudgetError) as caught:
        require_minimum(cpu_budget(20 * GIB, 2, BudgetPolicy(0.9, headroom_gib=9.5)))
    text = str(caught.value)
    assert "KV cache budget below minimum threshold: 0.500 GiB" in text
    assert "Decrease VLLM_NEURON_RESERVED_HEADROOM_GIB=9.5: the largest headroom that fits is 9." in text
    assert "CAP_FRACTION" not in text
    assert "Increase" not in text


@given(available=st.integers(1 * GIB, 400 * GIB), minimum=st.floats(0.01, 3))
def test_the_largest_headroom_that_the_error_names_does_fit(available: int, minimum: float) -> None:
    policy = BudgetPolicy(0.9, headroom_gib=1000.0, minimum_gib=minimum)
    with pytest.raises(KVBudgetError) as caught:
        require_minimum(cpu_budget(available, 1, policy))
    text = str(caught.value)
    if "No headroom is small enough" in text:
        assert available < minimum * GIB
        return
    largest = float(text.split("largest headroom that fits is ")[1].split(". Lower")[0])
    require_minimum(cpu_budget(available, 1, BudgetPolicy(0.9, headroom_gib=largest, minimum_gib=minimum)))
    with pytest.raises(KVBudgetError):
        require_minimum(cpu_budget(available, 1, BudgetPolicy(0.9, headroom_gib=largest + 0.011, minimum_gib=minimum)))


def test_no_headroom_can_help_when_the_memory_is_not_there() -> None:
    with pytest.raises(KVBudgetError, match=r"No headroom is small enough: even VLLM_NEURON_RESERVED_HEADROOM_GIB=0"):
        require_minimum(neuron_budget(16 * GIB, 15 * GIB + 1, BudgetPolicy(0.9, headroom_gib=2.0)))


def test_one_full_request_must_fit() -> None:
    # 4 MiB a block: 40960 tokens of 32 are 1280 blocks, and the null block: 5.004 GiB.
    budget = cpu_budget(8 * GIB, 1, BudgetPolicy(0.9))

    def blocks(tokens: int) -> int:
        return -(-tokens // 32)

    with pytest.raises(KVBudgetError) as caught:
        require_one_request(budget, 4 << 20, blocks, 40960)
    text = str(caught.value)
    assert "needs a KV cache of 5.004 GiB, but the budget is 2.160 GiB" in text
    # 2.16 GiB are 552 whole blocks, one of which is the null block.
    assert "The longest context that fits is 17632 tokens. Set max_model_len to 17632 or less" in text
    require_one_request(budget, 4 << 20, blocks, 17632)
    with pytest.raises(KVBudgetError):
        require_one_request(budget, 4 << 20, blocks, 17633)


def test_blocks_set_by_hand_must_hold_one_request_and_the_null_block() -> None:
    require_blocks_for_one_request(17, 16, 32, 512)
    for blocks in (15, 16):
        with pytest.raises(KVBudgetError, match=rf"num_gpu_blocks_override={blocks} is too small.*to 17 or more"):
            require_blocks_for_one_request(blocks, 16, 32, 512)


@given(value=st.integers(0, 1 << 45), wobble=st.integers(0, 1 << 20))
def test_steady_is_below_by_a_quarter_at_most(value: int, wobble: int) -> None:
    assert value * 3 / 4 < steady(value) <= value or value == 0
    assert steady(steady(value)) == steady(value)


def test_steady_ignores_small_changes_and_keeps_what_is_needed() -> None:
    assert steady(int(5.4 * GIB)) == steady(int(5.3 * GIB)) == 5 * GIB
    assert steady(int(5.4 * GIB), at_least=int(5.2 * GIB)) == int(5.2 * GIB)
    assert steady(int(5.4 * GIB), at_least=6 * GIB) == int(5.4 * GIB)


def test_host_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemFree:   5 kB\nMemAvailable:      42 kB\n")
    assert host_memory_available(meminfo) == 42 * 1024
    meminfo.write_text("MemTotal: 100 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        host_memory_available(meminfo)
    assert host_memory_available() > 0
