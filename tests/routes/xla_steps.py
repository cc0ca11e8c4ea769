"""A small paged step for the tests of the XLA route, and its lowering in a process of its own."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from vllm_neuron.routes.route import CPU, Target
from vllm_neuron.routes.xla import XlaExecutable, XlaLowered, XlaRoute

BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 2, 8
WIDTH = KV_HEADS * HEAD_DIM

Tree = dict[str, torch.Tensor]
Cache = Sequence[tuple[torch.Tensor, torch.Tensor]]


def step(weights: Tree, kv_cache: Cache, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[dict[str, Any], Cache]:
    """Writes x W to `slots` of every cache, then sums what the blocks of the first slot hold.

    `weights["unused"]` is not read, `weights["first"]` and `weights["tied"]` may be one tensor.
    """
    x, slots = inputs
    rows = (x @ weights["first"].t()).view(-1, KV_HEADS, HEAD_DIM)
    new, total = [], x
    for keys, values in kv_cache:
        keys, values = (_write(cache, rows * factor, slots) for cache, factor in ((keys, 1), (values, 2)))
        block = slots[:1] // BLOCK_SIZE
        read = keys.index_select(0, block) - values.index_select(0, block)
        total = total + read.reshape(BLOCK_SIZE, WIDTH).sum(0)
        new.append((keys, values))
    return {"sum": total, "tied": (x @ weights["tied"].t()).float()}, new


def _write(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache.flatten(0, 1).index_copy(0, slots.long(), rows.to(cache.dtype)).view(cache.shape)


def weights(dtype: torch.dtype) -> Tree:
    """Weights of `step`: one tensor under two names, and one that is not used."""
    first = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    return {"unused": torch.zeros(3), "first": first, "tied": first}


def inputs(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, WIDTH] and distinct slots from the second block on."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, torch.arange(BLOCK_SIZE + 3, BLOCK_SIZE + 3 + rows, dtype=torch.int32)


def cache_shape(num_blocks: int) -> tuple[int, ...]:
    return (num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)


def lowered(rows: int, dtype: torch.dtype, num_blocks: int, layers: int = 2, target: Target = CPU) -> XlaLowered:
    """`step` lowered from meta tensors."""
    shape = cache_shape(num_blocks)
    kv_cache = [tuple(torch.empty(shape, dtype=dtype, device="meta") for _ in range(2)) for _ in range(layers)]
    return XlaRoute(target).trace("tiny", step, weights(dtype), kv_cache, inputs(rows, dtype)).lower()


def executable(rows: int, dtype: torch.dtype, num_blocks: int, layers: int = 2) -> XlaExecutable:
    return lowered(rows, dtype, num_blocks, layers).compile()


if __name__ == "__main__":
    print(lowered(int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])).text())
