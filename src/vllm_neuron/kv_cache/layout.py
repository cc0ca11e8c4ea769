"""Layout of the paged KV cache.

One layer's cache is a pair (keys, values), each [NB, BS, K, D]: NB blocks of BS tokens, K KV heads, head size D.
Token-major blocks make a write one contiguous row and a block one contiguous piece of memory.
Slot s is row s of the cache viewed as [NB * BS, K, D]; block 0 is vLLM's null block: padding writes there and nothing
real ever reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LayerCache = tuple[torch.Tensor, torch.Tensor]
KVCache = Sequence[LayerCache]
"""One (keys, values) pair per layer, in layer order."""

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


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def round_up_to_blocks(tokens: int, block_size: int) -> int:
    """``tokens`` rounded up to whole blocks."""
    return blocks_for(tokens, block_size) * block_size


def layer_shapes(layers: Sequence[KVLayerSpec], num_blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
    """Per layer the shape [NB, BS, K, D] of its keys, which is the shape of its values too."""
    return tuple((num_blocks, block_size, layer.num_kv_heads, layer.head_dim) for layer in layers)


def block_bytes(layers: Sequence[KVLayerSpec], block_size: int, model_dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers of the model."""
    return block_size * sum(layer.bytes_per_token(model_dtype) for layer in layers)


def cache_dtype(layers: Sequence[KVLayerSpec], model_dtype: torch.dtype) -> torch.dtype:
    """What all layers store keys and values in.

    Raises:
        ValueError: they differ.
    """
    dtypes = {layer.dtype or model_dtype for layer in layers} or {model_dtype}
    if len(dtypes) > 1:
        raise ValueError(f"layers store their KV cache in different dtypes: {sorted(map(str, dtypes))}")
    return dtypes.pop()


def num_groups(layers: Sequence[KVLayerSpec]) -> int:
    """G, how many KV groups (block tables) the layers read."""
    return 1 + max((layer.group for layer in layers), default=-1)
