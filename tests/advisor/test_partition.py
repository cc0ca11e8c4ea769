"""The dynamic program against every list there is."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.advisor.partition import best_partitions, padding

SIZES = st.dictionaries(st.integers(1, 24), st.integers(1, 9), min_size=1, max_size=9)


@given(SIZES, st.integers(1, 5), st.sampled_from([1, 4]))
def test_no_list_of_as_many_buckets_pads_less(sizes: dict[int, int], most: int, multiple: int) -> None:
    largest = 24
    found = best_partitions(sizes, largest, most, multiple)
    allowed = range(multiple, largest, multiple)
    for partition in found:
        count = len(partition.buckets)
        least = min(padding(sizes, (*others, largest)).padded for others in combinations(allowed, count - 1))
        assert partition.padded == least
        assert partition.buckets[-1] == largest and list(partition.buckets) == sorted(set(partition.buckets))
        assert all(bucket % multiple == 0 for bucket in partition.buckets[:-1])


@given(SIZES)
def test_more_buckets_never_pad_more_and_enough_pad_nothing(sizes: dict[int, int]) -> None:
    found = best_partitions(sizes, max(sizes), 24)
    padded = [partition.padded for partition in found]
    assert padded == sorted(padded, reverse=True) and padded[-1] == 0
    assert found[-1].live == sum(size * count for size, count in sizes.items())


def test_waste_is_a_share_of_all_rows() -> None:
    found = padding({100: 3, 200: 1}, (200,))
    assert (found.live, found.padded, found.waste) == (500, 300, 0.375)


def test_a_size_beyond_the_largest_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="300 is larger than the largest bucket 200"):
        best_partitions({300: 1}, 200, 2)
    with pytest.raises(ValueError, match="300 is larger than the largest bucket 200"):
        padding({300: 1}, (100, 200))
