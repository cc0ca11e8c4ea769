"""Time of single steps on the native route's CPU kernels, without vLLM around them.

    python -m pytest benchmarks/test_native_step.py --benchmark-columns=min,median,rounds

The model has the sizes of SmolLM2-135M in bfloat16 and random weights. Decode at a context of 200 tokens; prefill of
900 tokens in a bucket of 1024. Look at the minimum: on a machine that does something else the median tells little.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kv_cache.layout import layer_shapes
from vllm_neuron.models.model import StepInputs
from vllm_neuron.models.registry import build_model
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU

BLOCK_SIZE, CONTEXT = 32, 1024
SIZES = SimpleNamespace(
    architectures=["LlamaForCausalLM"],
    hidden_act="silu",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    rope_theta=100000.0,
)


def step_inputs(requests: int, rows: int, live: int, start: int) -> StepInputs:
    """`live` rows of each request from position `start` on, padded to `rows`."""
    columns = CONTEXT // BLOCK_SIZE
    table = (1 + torch.randperm(requests * columns)).view(requests, columns)
    positions = (start + torch.arange(rows).clamp(max=live - 1)).expand(requests, rows)
    slots = table.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    slots[:, live:] = torch.arange(rows - live) % BLOCK_SIZE
    return StepInputs(
        token_ids=torch.randint(SIZES.vocab_size, (requests * rows,)).int(),
        positions=positions.flatten().int(),
        block_tables=(table.int(),),
        slot_mappings=(slots.flatten().int(),),
        logits_rows=(torch.arange(requests) * rows + live - 1).int(),
    )


def compiled_step(inputs: StepInputs, requests: int) -> tuple[Any, tuple[Any, ...]]:
    """The step for inputs of up to `requests` requests with random weights, compiled, and what to call it with."""
    route, model, dtype = NativeRoute(CPU), build_model(SIZES), torch.bfloat16
    weights: dict[str, torch.Tensor] = {
        name: (torch.randn(spec.shape) * 0.05).to(dtype) for name, spec in model.weight_table.items()
    }
    weights |= model.constants
    shapes = layer_shapes(model.kv_layers, 1 + requests * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    cache = [(torch.empty(s, dtype=dtype, device="meta"), torch.empty(s, dtype=dtype, device="meta")) for s in shapes]
    with using(KernelSet.CPU):
        meta = [pytree.tree_map(lambda t: torch.empty_like(t, device="meta"), tree) for tree in (weights, inputs)]
        executable = route.trace("step", model.step, meta[0], cache, meta[1]).lower().compile()
    return executable, (route.place_weights(weights), route.allocate_kv_cache(shapes, dtype), inputs)


@pytest.mark.parametrize(
    ("requests", "rows", "live", "start"),
    [(1, 1, 1, 200), (8, 1, 1, 200), (1, 1024, 900, 0)],
    ids=["decode-1", "decode-8", "prefill-900"],
)
def test_step(benchmark: Any, requests: int, rows: int, live: int, start: int) -> None:
    torch.manual_seed(0)
    executable, arguments = compiled_step(step_inputs(requests, rows, live, start), requests)
    benchmark.pedantic(executable, args=arguments, rounds=4 if rows > 1 else 100, warmup_rounds=2)
