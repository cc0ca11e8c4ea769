"""The part of a graph's inputs that belongs to one KV group: block table, slots, and positions in the table."""

import numpy as np
import torch

from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.kv_cache.blocks import blocks_for, first_visible, table_blocks
from vllm_neuron.kv_cache.layout import NULL_BLOCK

PADDING_SLOT = 0
"""The first slot of the null block."""


class GroupTables:
    """Buffers of one KV group, filled in place.

    A block table spans the graph's context. That of a group with a sliding window spans only what the rows of a step
    reach, if that is less: it begins with the block in which the first row's window does, so that a decode step
    gathers a window and not the whole context.

    Args:
        graph: that reads them.
        block_size: BS, tokens per KV block; it divides the graph's context.
        window: tokens that the group's layers look back on; None is all.

    Attributes:
        block_table: [B, S / BS] int32.
        slot_mapping: [T] int32.
        positions: [T] int32, counted from the first block of a row's table; an empty tuple where every table begins
            with the request's first block.
    """

    def __init__(self, graph: GraphSpec, block_size: int, window: int | None) -> None:
        columns = table_blocks(graph.tokens // graph.requests, graph.context, window, block_size)
        self.block_table = torch.full((graph.requests, columns), NULL_BLOCK, dtype=torch.int32)
        self.slot_mapping = torch.full((graph.tokens,), PADDING_SLOT, dtype=torch.int32)
        trimmed = columns * block_size < graph.context
        self.positions: torch.Tensor | tuple[()] = torch.zeros(graph.tokens, dtype=torch.int32) if trimmed else ()
        self._window, self._block_size = window, block_size
        # The same memory seen by numpy, whose small assignments cost a fraction of torch's.
        self._table, self._slots = self.block_table.numpy(), self.slot_mapping.numpy()
        self._positions = self.positions.numpy() if isinstance(self.positions, torch.Tensor) else None

    def has_blocks(self, block_ids: np.ndarray, start: int, end: int) -> bool:
        """Whether a request has a block for every token from ``start`` to ``end`` - 1, and for what these see through a
        window. Whatever lies before a window is no longer the request's."""
        first = start // self._block_size if self._window is None else self._first_seen(start)
        last = blocks_for(end, self._block_size)
        return len(block_ids) >= last and NULL_BLOCK not in block_ids[first:last].tolist()

    def fill(self, request: int, row: int, block_ids: np.ndarray, start: int, end: int) -> None:
        """Table of one request, and its rows from ``row`` on: those at positions ``start`` to ``end`` - 1."""
        size, first = self._block_size, 0 if self._positions is None else self._first_seen(start)
        # Blocks reserved for later tokens hold another request's stale data.
        used = blocks_for(end, size) - first
        table = self._table[request]
        table[:used] = block_ids[first : first + used]
        table[used:] = NULL_BLOCK
        if end == start + 1:
            block, offset = divmod(start, size)
            self._slots[row] = block_ids[block] * size + offset
            if self._positions is not None:
                self._positions[row] = start - first * size
            return
        positions = np.arange(start, end, dtype=np.int32)
        blocks, offsets = np.divmod(positions, size)
        rows = slice(row, row + end - start)
        self._slots[rows] = np.asarray(block_ids)[blocks] * size + offsets
        if self._positions is not None:
            self._positions[rows] = positions - first * size

    def pad(self, requests: int, rows: int, repeat: bool) -> None:
        """Everything behind the first ``requests`` requests and ``rows`` rows writes to the null block and reads
        nothing, or, to ``repeat``, what the last row reads."""
        self._table[requests:] = NULL_BLOCK
        self._slots[rows:] = PADDING_SLOT
        if self._positions is not None:
            self._positions[rows:] = self._positions[rows - 1] if repeat else 0

    def _first_seen(self, position: int) -> int:
        """Logical block of the first position that a token sees."""
        return first_visible(position, self._window) // self._block_size
