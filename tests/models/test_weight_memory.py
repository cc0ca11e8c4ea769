"""Weights lie in one piece of memory, in the order of their table."""

from itertools import pairwise
from pathlib import Path

import torch

from vllm_neuron.weights.memory import allocate
from vllm_neuron.weights.table import WeightSpec, WeightTable

TABLE: WeightTable = {
    "odd": WeightSpec((3, 5), ("any", "any"), ("a",)),
    "float": WeightSpec((7,), ("any",), ("b",), dtype=torch.float32),
    "large": WeightSpec((2048, 2048), ("any", "any"), ("c",)),
    "last": WeightSpec((2, 3), ("any", "any"), ("d",)),
}


def test_forms_are_those_of_the_table() -> None:
    weights = allocate(TABLE, torch.bfloat16)
    assert list(weights) == list(TABLE)
    assert [tuple(weight.shape) for weight in weights.values()] == [spec.shape for spec in TABLE.values()]
    assert [weight.dtype for weight in weights.values()] == [spec.dtype or torch.bfloat16 for spec in TABLE.values()]
    assert all(weight.is_contiguous() and not weight.any() for weight in weights.values())


def test_weights_follow_each_other_on_cache_lines() -> None:
    weights = list(allocate(TABLE, torch.bfloat16).values())
    assert all(weight.data_ptr() % 64 == 0 for weight in weights)
    assert all(0 <= after.data_ptr() - before.data_ptr() - before.nbytes < 64 for before, after in pairwise(weights))


def test_writing_one_leaves_the_others() -> None:
    weights = allocate(TABLE, torch.bfloat16)
    for number, weight in enumerate(weights.values()):
        weight.fill_(number)
    assert [weight.unique().tolist() for weight in weights.values()] == [[0.0], [1.0], [2.0], [3.0]]


def test_one_weight_keeps_the_memory() -> None:
    kept = allocate(TABLE, torch.bfloat16)["large"]
    kept.fill_(1)
    assert kept.float().mean() == 1


def test_large_pages_are_asked_for() -> None:
    weight = allocate(TABLE, torch.bfloat16)["large"]
    flags = _flags_of(weight.data_ptr())
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_an_empty_table_has_no_weights() -> None:
    assert allocate({}, torch.float32) == {}


def _flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that has an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest.split()
    return []
