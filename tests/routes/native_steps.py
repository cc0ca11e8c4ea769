"""Steps and arguments for the tests of the native route."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.engine.fixtures import tiny_model
from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kv_cache.layout import layer_shapes
from vllm_neuron.models.model import StepInputs
from vllm_neuron.routes.native import NativeLowered, NativeRoute
from vllm_neuron.routes.route import CPU

ROUTE = NativeRoute(CPU)
BLOCK_SIZE = 16
MODEL = tiny_model(num_key_value_heads=1)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Seeded weights of MODEL, constants included."""
    generator = torch.Generator().manual_seed(0)
    table = MODEL.weight_table.items()
    made = {name: (torch.randn(spec.shape, generator=generator) * 0.3).to(dtype) for name, spec in table}
    return {**made, **MODEL.constants}


def inputs(requests: int, rows: int, start: int = 3, columns: int = 8) -> StepInputs:
    """`rows` tokens of each request from position `start` on; request r has blocks 1 + r * columns and following."""
    tokens = requests * rows
    table = (1 + torch.arange(requests * columns)).view(requests, columns)
    positions = (start + torch.arange(rows)).expand(requests, rows)
    slots = table.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepInputs(
        token_ids=(torch.arange(tokens) * 7 % MODEL.vocab_size).int(),
        positions=positions.flatten().int(),
        block_tables=(table.int(),),
        slot_mappings=(slots.flatten().int(),),
        logits_rows=(torch.arange(requests) * rows + rows - 1).int(),
    )


def cache_shapes(num_blocks: int) -> tuple[tuple[int, ...], ...]:
    return layer_shapes(MODEL.kv_layers, num_blocks, BLOCK_SIZE)


def cache(num_blocks: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Any]:
    """A KV cache as a model takes it."""
    return [
        (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for shape in cache_shapes(num_blocks)
    ]


def to_meta(tree: Any) -> Any:
    return pytree.tree_map(lambda tensor: torch.empty_like(tensor, device="meta"), tree)


def lowered(
    step_inputs: StepInputs, num_blocks: int, kernels: KernelSet, dtype: torch.dtype = torch.float32
) -> NativeLowered:
    """MODEL's step on these inputs' shapes."""
    with using(kernels):
        arguments = to_meta(weights(dtype)), cache(num_blocks, dtype, "meta"), to_meta(step_inputs)
        return ROUTE.trace("step", MODEL.step, *arguments).lower()
