"""Inputs of paged attention, with NaN wherever no row may look."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """Sizes of a call; see `paged_attention` for the letters."""

    requests: int
    rows: int
    kv_heads: int
    group: int
    dim: int
    block_size: int
    context: int
    window: int | None
    dtype: torch.dtype
    lnc: int
    seed: int = 0
    sinks: bool = False

    def arguments(self, positions: torch.Tensor | None = None) -> tuple[Any, ...]:
        """q, k_cache, v_cache, block_table, positions, scale, window, sinks.

        Args:
            positions: first position of each request; drawn at random by default.
        """
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(self.dtype)

        columns = self.context // self.block_size
        # Block 0 is the null block, which tables of freed blocks point to.
        table = 1 + torch.randperm(self.requests * columns, generator=random).view(self.requests, columns).int()
        if positions is None:
            positions = torch.randint(0, self.context - self.rows + 1, (self.requests,), generator=random)
        seen = positions[:, None] + torch.arange(self.rows)
        cache = (1 + self.requests * columns, self.block_size, self.kv_heads, self.dim)
        k_cache, v_cache = normal(*cache), normal(*cache)
        for request in range(self.requests):
            token = torch.arange(self.context)
            unseen = token > seen[request].max()
            if self.window is not None:
                unseen |= token <= seen[request].min() - self.window
            slots = table[request, token // self.block_size], token % self.block_size
            for kept in (k_cache, v_cache):
                kept[slots[0][unseen], slots[1][unseen]] = torch.nan
                kept[0] = torch.nan
        q = normal(self.requests * self.rows, self.kv_heads * self.group, self.dim)
        sinks = 3 * torch.randn(self.kv_heads * self.group, generator=random) if self.sinks else None
        return q, k_cache, v_cache, table, seen.flatten().int(), self.dim**-0.5, self.window, sinks


def check_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the tolerance of the type, relative to the largest element."""
    assert got.dtype is expected.dtype and got.shape == expected.shape
    largest = expected.double().abs().max().item()
    atol = TOLERANCES[expected.dtype] * largest
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=atol)


@st.composite
def decode_cases(draw: st.DrawFn) -> Case:
    """What the decode kernel takes, small."""
    kv_heads, rows = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, 3))
    return Case(
        requests=draw(st.integers(1, 3)),
        rows=rows,
        kv_heads=kv_heads,
        group=draw(st.integers(1, 128 // (kv_heads * rows) if kv_heads > 2 else 6)),
        dim=draw(st.sampled_from([2, 16, 64, 80, 128])),
        block_size=(block_size := draw(st.sampled_from([1, 4, 16, 32, 128, 256]))),
        context=max(128, block_size) * draw(st.integers(1, 3)),
        window=draw(st.none() | st.integers(1, 300)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        lnc=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 999)),
        sinks=draw(st.booleans()),
    )


@st.composite
def prefill_cases(draw: st.DrawFn) -> Case:
    """What the prefill kernel takes, small: also segments after earlier KV, as positions start anywhere."""
    block_size = draw(st.sampled_from([1, 8, 32, 128]))
    context = 128 * draw(st.integers(1, 10))
    return Case(
        requests=draw(st.integers(1, 2)),
        rows=draw(st.integers(1, min(context, 300))),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([2, 16, 64, 80, 128])),
        block_size=block_size,
        context=context,
        window=draw(st.none() | st.integers(1, 300)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        lnc=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 999)),
        sinks=draw(st.booleans()),
    )
