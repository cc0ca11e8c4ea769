"""Every architecture against transformers in float32, through a shuffled paged cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import KINDS, checkpoint, greedy_oracle, logits_oracle, prompt, write_checkpoint
from tests.models.paging import decode_inputs, load, new_cache, prefill, prefill_inputs, shuffled_table

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    "chunks", [[45], [16, 16, 13], [1] * 45, [7, 1, 8, 29]], ids=["one", "chunks", "single", "uneven"]
)
def test_logits_of_every_row_match_transformers(kind: str, chunks: list[int]) -> None:
    model, weights = load(checkpoint(kind))
    token_ids = prompt(45)
    logits, _ = prefill(model, weights, new_cache(model), token_ids, shuffled_table(), chunks)
    torch.testing.assert_close(logits, logits_oracle(checkpoint(kind), token_ids), **TOLERANCE)


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
    torch.testing.assert_close(logits, logits_oracle(folder, token_ids), **TOLERANCE)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_batched_greedy_decoding_matches_transformers(kind: str) -> None:
    """Three requests of different lengths in a padded batch of four."""
    model, weights = load(checkpoint(kind))
    cache = new_cache(model)
    blocks = shuffled_table(width=24)
    tables = [blocks[:8], blocks[8:16], blocks[16:]]
    prompts = [prompt(length, seed=length) for length in (1, 9, 24)]
    produced: list[list[int]] = [[], [], []]
    for request, token_ids in enumerate(prompts):
        outputs, cache = model.step(weights, cache, prefill_inputs(token_ids, 0, tables[request], bucket=32))
        produced[request].append(int(outputs.logits[0].argmax()))
    for step in range(11):
        positions = [len(token_ids) + step for token_ids in prompts]
        inputs = decode_inputs([tokens[-1] for tokens in produced], positions, tables, bucket=4)
        outputs, cache = model.step(weights, cache, inputs)
        for request, tokens in enumerate(produced):
            tokens.append(int(outputs.logits[request].argmax()))
    assert produced == [greedy_oracle(checkpoint(kind), token_ids, 12) for token_ids in prompts]
