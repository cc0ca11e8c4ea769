"""Layout of the paged KV cache.

One layer's cache is a pair (keys, values), each [NB, BS, K, D]: NB blocks of BS tokens, K KV heads, head size D.
Token-major blocks make a write one contiguous row and a block one contiguous piece of memory.
Slot s is row s of the cache viewed as [NB * BS, K, D]; block 0 is vLLM's null block: padding writes there and nothing
real ever reads it.

Layers that look back equally far are in one KV group and share its block tables. Where there are several groups, each
of their layers keeps its blocks in a pool with one layer of every other group: a block of a pool belongs to whichever
group has it, so that what the layers with a window give back serves those without. One group needs no sharing, and a
pool is then a layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

LayerCache = tuple[torch.Tensor, torch.Tensor]
KVCache = Sequence[LayerCache]
"""One (keys, values) pair per pool: of layer n it is that at `pool_indexes(layers)[n]`."""

NULL_BLOCK = 0


@dataclass(frozen=True)
class KVLayerSpec:
    """What one attention layer stores per token.

    Attributes:
        num_kv_heads: K, KV heads of this layer.
        head_dim: D, size of one head.
        window: sliding-window length in tokens, or None for full attention.
        group: index of the KV group whose block table and slot mapping the layer reads.
        dtype: what keys and values are stored in; None means the dtype the model is served in.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    group: int = 0
    dtype: torch.dtype | None = None

    def bytes_per_token(self, model_dtype: torch.dtype) -> int:
        """Bytes that keys and values of one token take in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * (self.dtype or model_dtype).itemsize


def with_groups(layers: Iterable[KVLayerSpec]) -> tuple[KVLayerSpec, ...]:
    """The layers in the KV groups that vLLM will make of them, from how far each looks back.

    All groups have the same number of layers, or some have fewer: that of the rarest kind of layer, or of the most
    frequent kind if that has less than 1.25 times as many. A kind with more layers than that has several groups, which
    its layers enter in turn.
    """
    layers = tuple(layers)
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer.window, []).append(index)
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups: dict[int, int] = {}
    first = 0
    for members in kinds.values():
        count = -(-len(members) // size)
        groups |= {index: first + turn % count for turn, index in enumerate(members)}
        first += count
    return tuple(replace(layer, group=groups[index]) for index, layer in enumerate(layers))


def num_groups(layers: Sequence[KVLayerSpec]) -> int:
    """G, how many KV groups (block tables) the layers read."""
    return 1 + max((layer.group for layer in layers), default=-1)


def group_windows(layers: Sequence[KVLayerSpec]) -> tuple[int | None, ...]:
    """Per KV group how many tokens its layers look back on, None for all.

    Raises:
        ValueError: layers of a group differ in that.
    """
    windows = [{layer.window for layer in layers if layer.group == group} for group in range(num_groups(layers))]
    if any(len(found) != 1 for found in windows):
        raise ValueError(f"each KV group needs layers of one sliding window, and has those of {windows}")
    return tuple(found.pop() for found in windows)


def pool_indexes(layers: Sequence[KVLayerSpec]) -> tuple[int, ...]:
    """Per layer the pool that its blocks are in: how many layers of its group come before it."""
    return tuple(sum(other.group == layer.group for other in layers[:index]) for index, layer in enumerate(layers))


def layer_shapes(layers: Sequence[KVLayerSpec], num_blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
    """The shape [NB, BS, K, D] of the keys of each pool of layers, which is the shape of its values too.

    Raises:
        ValueError: layers of a pool differ in K or D.
    """
    return tuple((num_blocks, block_size, layer.num_kv_heads, layer.head_dim) for layer in _pools(layers))


def block_bytes(layers: Sequence[KVLayerSpec], block_size: int, model_dtype: torch.dtype) -> int:
    """Bytes that one block takes over all pools."""
    return block_size * sum(layer.bytes_per_token(model_dtype) for layer in _pools(layers))


def _pools(layers: Sequence[KVLayerSpec]) -> list[KVLayerSpec]:
    """A layer of each pool."""
    pools: dict[int, KVLayerSpec] = {}
    for layer, pool in zip(layers, pool_indexes(layers), strict=True):
        first = pools.setdefault(pool, layer)
        if (first.num_kv_heads, first.head_dim) != (layer.num_kv_heads, layer.head_dim):
            raise ValueError(f"layers of different KV groups must have KV heads of one kind: {first}, {layer}")
    return [pools[pool] for pool in range(len(pools))]


def cache_dtype(layers: Sequence[KVLayerSpec], model_dtype: torch.dtype) -> torch.dtype:
    """What all layers store keys and values in.

    Raises:
        ValueError: they differ.
    """
    dtypes = {layer.dtype or model_dtype for layer in layers} or {model_dtype}
    if len(dtypes) > 1:
        raise ValueError(f"layers store their KV cache in different dtypes: {sorted(map(str, dtypes))}")
    return dtypes.pop()
