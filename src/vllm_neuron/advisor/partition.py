"""The bucket list of a given length that pads a sample of sizes least, by dynamic programming.

Sizes are sorted, so an optimal list cuts them into intervals, each padded to its largest member. With P[j][k] the least
padding of the first j distinct sizes in k buckets,

    P[j][k] = min over i < j of P[i][k - 1] + padding of sizes i .. j - 1 in one bucket

which is the one-dimensional segmentation problem (Bellman, 1961). Exact; m^2 k for m distinct sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Partition:
    """A bucket list, and what it costs.

    Attributes:
        buckets: ascending.
        live: weight times size, summed over the sample: rows that compute something.
        padded: rows that are padding.
    """

    buckets: tuple[int, ...]
    live: float
    padded: float

    @property
    def waste(self) -> float:
        """Padding, as a share of all rows that are computed."""
        return self.padded / (self.live + self.padded) if self.live + self.padded else 0.0


def padding(sizes: Mapping[int, float], buckets: Sequence[int]) -> Partition:
    """What a given list costs. Each size goes into the smallest bucket that holds it.

    Args:
        sizes: how often each size occurs.
        buckets: ascending.

    Raises:
        ValueError: a size is larger than the largest bucket.
    """
    values = np.array(sorted(sizes), dtype=np.float64)
    weights = np.array([sizes[int(value)] for value in values])
    if len(values) and values[-1] > buckets[-1]:
        raise ValueError(f"size {int(values[-1])} is larger than the largest bucket {buckets[-1]}")
    chosen = np.asarray(buckets)[np.searchsorted(buckets, values)] if len(values) else values
    return Partition(tuple(buckets), float(weights @ values), float(weights @ (chosen - values)))


def best_partitions(sizes: Mapping[int, float], largest: int, most: int, multiple: int = 1) -> list[Partition]:
    """The best lists of 1, 2, ... `most` buckets; fewer where more would not help.

    Args:
        sizes: how often each size occurs.
        largest: the last bucket of every list; at least the largest size.
        most: buckets of the longest list.
        multiple: buckets other than the last are multiples of this.

    Raises:
        ValueError: a size is larger than `largest`.
    """
    edges = sorted({min(largest, -(-size // multiple) * multiple) for size in sizes} | {largest})
    # Sizes and weight that fall to each edge if it is a bucket.
    live, weight = np.zeros(len(edges)), np.zeros(len(edges))
    for size, count in sizes.items():
        if size > largest:
            raise ValueError(f"size {size} is larger than the largest bucket {largest}")
        index = int(np.searchsorted(edges, size))
        live[index] += size * count
        weight[index] += count
    lives, weights = np.concatenate([[0], live.cumsum()]), np.concatenate([[0], weight.cumsum()])
    tops = np.asarray(edges, dtype=np.float64)
    # cost[i, j]: padding of edges i .. j - 1 in a bucket of size edges[j - 1].
    cost = np.full((len(edges), len(edges) + 1), np.inf)
    for j in range(1, len(edges) + 1):
        cost[:j, j] = tops[j - 1] * (weights[j] - weights[:j]) - (lives[j] - lives[:j])
    least = np.concatenate([[0.0], np.full(len(edges), np.inf)])
    cuts: list[np.ndarray] = []
    found = []
    for _ in range(min(most, len(edges))):
        totals = least[:-1, None] + cost
        cuts.append(totals.argmin(0))
        least = np.concatenate([[np.inf], totals.min(0)[1:]])
        found.append(padding(sizes, _follow(cuts, edges)))
    return found


def _follow(cuts: Sequence[np.ndarray], edges: Sequence[int]) -> tuple[int, ...]:
    """The buckets that the last row of cuts leads to."""
    end, buckets = len(edges), []
    for cut in reversed(cuts):
        buckets.append(edges[end - 1])
        end = int(cut[end])
    return tuple(reversed(buckets))
