"""Every architecture against transformers in float32, through a shuffled paged cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM

from tests.checkpoints import KINDS, checkpoint, greedy_oracle, logits_oracle, prompt, write_checkpoint
from tests.models.paging import decode_inputs, load, new_cache, prefill, prefill_inputs, shuffled_table
from vllm_neuron.kv_cache.layout import num_groups

TOLERANCE = 1e-4


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    "chunks", [[45], [16, 16, 13], [1] * 45, [7, 1, 8, 29]], ids=["one", "chunks", "single", "uneven"]
)
def test_logits_of_every_row_match_transformers(kind: str, chunks: list[int]) -> None:
    model, weights = load(checkpoint(kind))
    token_ids = prompt(45)
    logits, _ = prefill(model, weights, new_cache(model), token_ids, shuffled_table(), chunks)
    torch.testing.assert_close(logits, logits_oracle(checkpoint(kind), token_ids), atol=TOLERANCE, rtol=TOLERANCE)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama mlp bias": ("llama", {"mlp_bias": True}),
    "llama head size apart from hidden size": ("llama", {"head_dim": 20}),
    "llama one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama without grouped queries": ("llama", {"num_key_value_heads": 4}),
    "llama linear scaling": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama legacy spelling": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama dynamic scaling": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama untied 3.x": ("llama3", {"tie_word_embeddings": False}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    ),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}),
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_variants_match_transformers(variant: str, tmp_path: Path) -> None:
    kind, overrides = VARIANTS[variant]
    folder = write_checkpoint(tmp_path, kind, **overrides)
    model, weights = load(folder)
    token_ids = prompt(90, seed=3)
    logits, _ = prefill(model, weights, new_cache(model), token_ids, shuffled_table(), [64, 26])
    torch.testing.assert_close(logits, logits_oracle(folder, token_ids), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_batched_greedy_decoding_matches_transformers(kind: str) -> None:
    """Three requests of different lengths in a padded batch of four."""
    model, weights = load(checkpoint(kind))
    cache, groups = new_cache(model), num_groups(model.kv_layers)
    blocks = shuffled_table(width=24)
    tables = [blocks[:8], blocks[8:16], blocks[16:]]
    prompts = [prompt(length, seed=length) for length in (1, 9, 24)]
    produced: list[list[int]] = [[], [], []]
    for request, token_ids in enumerate(prompts):
        outputs, cache = model.step(weights, cache, prefill_inputs(token_ids, 0, tables[request], 32, groups))
        produced[request].append(int(outputs.logits[0].argmax()))
    for step in range(11):
        positions = [len(token_ids) + step for token_ids in prompts]
        inputs = decode_inputs([tokens[-1] for tokens in produced], positions, tables, 4, groups)
        outputs, cache = model.step(weights, cache, inputs)
        for request, tokens in enumerate(produced):
            tokens.append(int(outputs.logits[request].argmax()))
    assert produced == [greedy_oracle(checkpoint(kind), token_ids, 12) for token_ids in prompts]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_and_stale_blocks_change_nothing(poison: float) -> None:
    """Rows of a padded step over a cache full of garbage are those of an exact step over a clean one."""
    model, weights = load(checkpoint("llama"))
    token_ids, table = prompt(21), shuffled_table(width=6)
    dirty = new_cache(model, fill=poison)
    exact, _ = model.step(weights, new_cache(model), prefill_inputs(token_ids, 0, table, bucket=21))
    padded, dirty = model.step(weights, dirty, prefill_inputs(token_ids, 0, table, bucket=32))
    torch.testing.assert_close(padded.hidden[:21], exact.hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded.logits, exact.logits, atol=1e-5, rtol=1e-5)
    assert padded.hidden.isfinite().all()

    written = {table[position // 8] * 8 + position % 8 for position in range(21)} | set(range(8))
    for keys, values in dirty:
        for cache in (keys, values):
            untouched = [slot for slot in range(64 * 8) if slot not in written]
            assert not cache.flatten(0, 1)[untouched].isfinite().any(), "padding wrote to a live slot"

    other = shuffled_table(width=6, seed=1)
    step = decode_inputs([7], [21], [table], bucket=1)
    alone, _ = model.step(weights, dirty, step)
    batch, _ = model.step(weights, dirty, decode_inputs([7, 9], [21, 0], [table, other], bucket=4))
    torch.testing.assert_close(batch.logits[:1], alone.logits, atol=1e-5, rtol=1e-5)
    assert batch.logits.isfinite().all()


def test_a_step_leaves_its_arguments_alone() -> None:
    model, weights = load(checkpoint("qwen3"))
    cache = new_cache(model)
    inputs = prefill_inputs(prompt(9), 0, shuffled_table(), bucket=16)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    _, after = model.step(weights, cache, inputs)
    assert all(not keys.any() and not values.any() for keys, values in cache)
    assert all(keys.any() and values.any() for keys, values in after)
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bfloat16_is_as_close_to_float32_as_transformers_in_bfloat16(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, kind, dtype=torch.bfloat16)
    model, weights = load(folder, torch.bfloat16)
    token_ids = prompt(64, seed=5)
    cache = new_cache(model, dtype=torch.bfloat16)
    logits, cache = prefill(model, weights, cache, token_ids, shuffled_table(), [40, 24])
    truth = logits_oracle(folder, token_ids)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        noise = (peer(torch.tensor([token_ids])).logits[0].float() - truth).square().mean().sqrt()
    error = (logits - truth).square().mean().sqrt()
    assert error <= 1.1 * noise, f"ours {error:.4f}, transformers {noise:.4f}"
    assert logits.dtype == torch.float32
    assert all(keys.dtype == values.dtype == torch.bfloat16 for keys, values in cache)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_step_traces_without_values_or_literals(kind: str) -> None:
    """Fake tensors go through, nothing is mutated in place, and no tensor is baked into the graph."""
    model, weights = load(checkpoint(kind))
    inputs = decode_inputs([1, 2], [0, 0], [shuffled_table()] * 2, 2, num_groups(model.kv_layers))
    step = model.step

    def function(weights: Any, cache: Any, inputs: Any) -> Any:
        return step(weights, cache, inputs)

    graph = make_fx(function, tracing_mode="fake")(weights, new_cache(model), inputs).graph
    assert not [node for node in graph.nodes if node.op == "get_attr"]
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert calls
    assert not [node for node in calls if node.target._schema.is_mutable]
