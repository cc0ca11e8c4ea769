"""Torch twin of `embedding`."""

import torch


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [V, H] at `ids` [T] (int32), as [T, H] in the table's dtype."""
    return table.index_select(0, ids)
