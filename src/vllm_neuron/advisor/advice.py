"""Bucket lists for a traffic sample: the optimal ones of each length, and the usual ones to compare with."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from vllm_neuron.advisor.partition import Partition, best_partitions, padding
from vllm_neuron.config.buckets import SMALLEST_TOKEN_BUCKET, powers_of_two

TOKENS_OPTION, SEQS_OPTION = "num_batched_tokens_buckets", "num_seqs_buckets"
PERCENTILES = (25, 50, 75, 95)
"""Of the lengths: where the configuration guide puts buckets by hand."""


@dataclass(frozen=True)
class Choice:
    """A bucket list under consideration.

    Attributes:
        name: where it comes from.
        partition: the list and its padding.
        graphs: how many graphs it makes a server compile.
    """

    name: str
    partition: Partition
    graphs: int


@dataclass(frozen=True)
class Advice:
    """What is proposed for one option.

    Attributes:
        option: its name.
        steps: steps of the sample.
        choices: best lists of 1, 2, ... buckets, then the usual ones.
        proposed: one of them.
    """

    option: str
    steps: float
    choices: tuple[Choice, ...]
    proposed: Choice


def advise(
    option: str,
    sizes: Mapping[int, float],
    largest: int,
    most: int,
    gain: float,
    multiple: int = 1,
    contexts: int = 1,
) -> Advice:
    """Weigh lists for one option.

    Args:
        option: TOKENS_OPTION or SEQS_OPTION.
        sizes: how often each step size occurs; not empty.
        largest: last bucket of every list.
        most: buckets of the longest list.
        gain: a bucket more is proposed only if it saves at least this share of all rows.
        multiple: buckets other than the last are multiples of this.
        contexts: graphs per bucket (of decode batches: the number of context buckets).

    Raises:
        ValueError: a size is larger than `largest`.
    """
    best = [
        Choice(f"best of {len(partition.buckets)}", partition, contexts * len(partition.buckets))
        for partition in best_partitions(sizes, largest, most, multiple)
    ]
    proposed = best[0]
    for choice in best[1:]:
        # Compared per bucket that is added: the third may be worth it where the second alone is not.
        added = choice.graphs // contexts - proposed.graphs // contexts
        if proposed.partition.waste - choice.partition.waste >= gain * added:
            proposed = choice
    usual = {
        "default": powers_of_two(SMALLEST_TOKEN_BUCKET if option == TOKENS_OPTION else 1, largest),
        "percentiles": percentile_buckets(sizes, largest, multiple),
    }
    others = [Choice(name, padding(sizes, buckets), contexts * len(buckets)) for name, buckets in usual.items()]
    return Advice(option, sum(sizes.values()), (*best, *others), proposed)


def percentile_buckets(sizes: Mapping[int, float], largest: int, multiple: int) -> tuple[int, ...]:
    """Buckets at PERCENTILES of the sizes, rounded up, and the largest."""
    total, edges = sum(sizes.values()), {largest}
    for percent in PERCENTILES:
        below = 0.0
        for size in sorted(sizes):
            below += sizes[size]
            if below >= total * percent / 100:
                edges.add(min(largest, ceil(size / multiple) * multiple))
                break
    return tuple(sorted(edges))


def additional_config(advices: Sequence[Advice]) -> str:
    """The value of --additional-config that has the proposed lists."""
    lists = {advice.option: list(advice.proposed.partition.buckets) for advice in advices}
    return json.dumps({"neuron_config": lists})
