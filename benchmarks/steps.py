"""Single steps of a model with the sizes of SmolLM2-135M and random weights, on both routes in CPU mode."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_neuron.kernels.cpu.packing import pack
from vllm_neuron.kernels.dispatch import select, using
from vllm_neuron.kv_cache.layout import cache_dtype, layer_shapes
from vllm_neuron.models.model import Model, StepInputs
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU, Executable, Route, Step
from vllm_neuron.routes.xla import XlaRoute
from vllm_neuron.weights.loading import dummy_weights

ROUTES: dict[str, Route] = {"native": NativeRoute(CPU), "xla": XlaRoute(CPU)}

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


def compiled(route: Route, name: str, step: Step, *forms: Any) -> Executable:
    """A step compiled with the kernels that a server in CPU mode has on this route; `forms` as `Route.trace` takes."""
    chosen = select(route.name, True, disabled=False, simulated=False, torch_mask=False, cores=1, nki_installed=False)
    with using(*chosen.sets, options=chosen.options):
        return route.trace(name, step, *forms).lower().compile()


def compiled_step(route: str, model: Model, inputs: StepInputs, num_blocks: int) -> Callable[[], None]:
    """What runs a model's step once on one of ROUTES, in bfloat16, with a KV cache of `num_blocks` blocks."""
    compiler, dtype = ROUTES[route], torch.bfloat16
    weights = dummy_weights(model.weight_table, dtype) | model.constants
    held_as = cache_dtype(model.kv_layers, dtype)
    shapes = layer_shapes(model.kv_layers, num_blocks, BLOCK_SIZE)
    cache = [tuple(torch.empty(s, dtype=held_as, device="meta") for _ in "kv") for s in shapes]
    meta = [pytree.tree_map(lambda t: torch.empty_like(t, device="meta"), tree) for tree in (weights, inputs)]
    executable = compiled(compiler, "step", model.step, meta[0], cache, meta[1])
    placed, held = compiler.place_weights(weights), compiler.allocate_kv_cache(shapes, held_as)
    copies = pack(tuple(weights.values()), 2**30)

    def run(_copies: object = copies) -> None:  # which are used as long as they live
        nonlocal held
        _, held = executable(placed, held, inputs)

    return run
