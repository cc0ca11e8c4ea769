"""Prompts far longer than a step: segments of 2048 tokens, no graph of the full length, and memory that stays flat."""

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils import _pytree as pytree

from tests.caches import new_cache
from tests.checkpoints import prompt, write_checkpoint
from tests.engine.fixtures import config
from tests.models.paging import load
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.inputs import InputBuilder, Row
from vllm_neuron.kernels import paged_attention_torch
from vllm_neuron.kv_cache.layout import layer_shapes
from vllm_neuron.models.model import Model, StepInputs
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.xla import XlaRoute
from vllm_neuron.weights.table import Weights

SEGMENT, TOKENS, BLOCK_SIZE = 2048, 65536, 32
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2 * TOKENS,
}


def last_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """transformers' logits [V] after the last token: with one layer, its row alone attends."""
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    layer = model.model.layers[0]
    with torch.no_grad():
        residual = model.model.embed_tokens(torch.tensor([ids]))
        normed = layer.input_layernorm(residual)
        cos, sin = model.model.rotary_emb(normed, torch.arange(len(ids))[None])
        attention = layer.self_attn
        q, k, v = (
            part(normed).view(1, len(ids), -1, attention.head_dim).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        weights = (q[:, :, -1:] @ k.transpose(2, 3) * attention.scaling).softmax(-1)
        hidden = residual[:, -1] + attention.o_proj((weights @ v).flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return model.lm_head(model.model.norm(hidden))[0]


def test_64k_tokens_in_segments_are_exact_and_take_no_more_memory(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", **SIZES)
    ids = prompt(TOKENS)
    model, weights = load(folder)
    settings = config(
        max_model_len=TOKENS + BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=SEGMENT,
        num_batched_tokens_buckets=(SEGMENT,),
        kv_segment_size=SEGMENT,
        num_seqs_buckets=(1,),
        decode_context_length_buckets=(TOKENS + BLOCK_SIZE,),
        block_size=BLOCK_SIZE,
        disable_nki_kernels=False,
    )
    cache = CompileCache(CacheFolders(new_cache(tmp_path)), "neuron_native")
    executor = GraphExecutor(model, settings, NativeRoute(CPU), cache, weights, torch.float32)
    assert max(graph.tokens for graph in executor.graphs) == SEGMENT
    executor.allocate_kv_cache(TOKENS // BLOCK_SIZE + 2)
    blocks = (np.arange(1, TOKENS // BLOCK_SIZE + 2),)
    memory = []
    for start in range(0, TOKENS, SEGMENT):
        row = Row(np.array(ids[start : start + SEGMENT]), start, blocks, wants_logits=start + SEGMENT == TOKENS)
        logits = executor.run_prefill(row).logits
        memory.append(psutil.Process().memory_info().rss)
    torch.testing.assert_close(logits[0].double(), last_logits(folder, ids), rtol=0, atol=1e-3)
    # Cache and packed context of 64k tokens are 8 MiB; the scores of the last segment would be 512 MiB.
    assert max(memory[4:]) - memory[3] < 64 << 20, memory
    assert executor.statistics.executions == {f"prefill_t{SEGMENT}_ctx{TOKENS + BLOCK_SIZE}": TOKENS // SEGMENT}


def arguments(model: Model, context: int) -> tuple[Weights, list[tuple[torch.Tensor, torch.Tensor]], StepInputs]:
    """Of a prefill step of a segment, without memory."""
    builder = InputBuilder(GraphSpec("prefill", SEGMENT, 1, context), BLOCK_SIZE, (None,))
    inputs = pytree.tree_map(lambda tensor: torch.empty_like(tensor, device="meta"), builder.inputs)
    shapes = layer_shapes(model.kv_layers, context // BLOCK_SIZE + 1, BLOCK_SIZE)
    weights = {name: torch.empty(s.shape, device="meta") for name, s in model.weight_table.items()}
    weights |= {name: torch.empty_like(t, device="meta") for name, t in model.constants.items()}
    return weights, [(torch.empty(s, device="meta"), torch.empty(s, device="meta")) for s in shapes], inputs


def test_a_segment_takes_the_same_memory_whatever_the_context_on_the_xla_route(tmp_path: Path) -> None:
    model, _ = load(write_checkpoint(tmp_path / "model", **SIZES))
    route = XlaRoute(CPU)
    taken = []
    for context in (16384, TOKENS):
        executable = route.trace("prefill", model.step, *arguments(model, context)).lower().compile()
        taken.append(executable.program.temporary_bytes())
    # The scores of a head over the whole context would be 128 MiB and 512 MiB.
    assert taken[1] < 1.3 * taken[0], taken


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_spans_of_a_context_make_no_difference(
    window: int | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(40, 4, 16, generator=generator)
    caches = [torch.randn(21, 8, 2, 16, generator=generator) for _ in range(2)]
    caches[1][20] = torch.nan
    table, positions = torch.randperm(20, generator=generator)[None].int(), torch.arange(100, 140).int()
    table[0, -2:] = 20
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    whole = paged_attention_torch.paged_attention(q, *caches, table, positions, 0.25, window, sinks)
    monkeypatch.setattr(paged_attention_torch, "MOST_SCORES", 40 * 8 * 3)
    spanned = paged_attention_torch.paged_attention(q, *caches, table, positions, 0.25, window, sinks)
    assert whole.isfinite().all()
    torch.testing.assert_close(spanned, whole, rtol=0, atol=2e-6)
