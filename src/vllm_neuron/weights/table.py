"""The weight table: each weight of a model declared once.

Loading, sharding, byte counts and dummy weights all derive from a mapping ``name -> WeightSpec``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

Weights = Mapping[str, torch.Tensor]
"""What a model function gets: every name of its table (and of its constants) to a tensor."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight as the model uses it.

    Several checkpoint tensors may fuse into one weight: they are concatenated along dimension 0 in the order given.

    Attributes:
        shape: shape of the fused weight. Matrices are [out_features, in_features], as checkpoints store them.
        axes: one logical axis name per dimension ("vocab", "hidden", "heads", "kv_heads", "qkv", "mlp", ...), from
            which sharding is derived.
        sources: checkpoint names, concatenated along dimension 0; empty for the scales of the KV cache, whose names
            depend on the tool that wrote them.
        dtype: None means the dtype the model is served in.
        looked_up: steps read single rows of it, and multiply by none.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    sources: tuple[str, ...]
    dtype: torch.dtype | None = None
    looked_up: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.sources}: {len(self.shape)} dimensions but {len(self.axes)} axes")

    def num_bytes(self, model_dtype: torch.dtype) -> int:
        """Bytes this weight takes when the model is served in ``model_dtype``."""
        return math.prod(self.shape) * (self.dtype or model_dtype).itemsize


WeightTable = Mapping[str, WeightSpec]
