"""Whole models through the XLA route against transformers in float32."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.checkpoints import checkpoint, greedy_oracle, logits_oracle, prompt
from tests.models.paging import Weights, decode_inputs, load, new_cache, prefill_inputs, shuffled_table
from vllm_neuron.models.model import Model, StepInputs
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.xla import XlaExecutable, XlaRoute

ROUTE = XlaRoute(CPU)
NUM_BLOCKS, TOKENS, REQUESTS = 64, 16, 3


def compiled(name: str, model: Model, weights: Weights, inputs: StepInputs, dtype: torch.dtype) -> XlaExecutable:
    arguments = pytree.tree_map(
        lambda tensor: torch.empty_like(tensor, device="meta"),
        (weights, new_cache(model, NUM_BLOCKS, dtype=dtype), inputs),
    )
    return ROUTE.trace(name, model.step, *arguments).lower().compile()


def allocate(model: Model, dtype: torch.dtype) -> Any:
    return ROUTE.allocate_kv_cache([keys.shape for keys, _ in new_cache(model, NUM_BLOCKS)], dtype)


@pytest.mark.parametrize("kind", ["llama", "llama3"])
def test_greedy_decoding_matches_transformers(kind: str) -> None:
    """Three requests, one of them a prompt over two steps, in a padded batch; untied and tied embeddings."""
    model, weights = load(checkpoint(kind))
    blocks = shuffled_table(width=24)
    tables = [blocks[:8], blocks[8:16], blocks[16:]]
    prompts = [prompt(length, seed=length) for length in (1, 9, 24)]
    prefill = compiled("prefill", model, weights, prefill_inputs([1], 0, tables[0], TOKENS), torch.float32)
    decode = compiled("decode", model, weights, decode_inputs([1] * 3, [0] * 3, tables, bucket=4), torch.float32)
    placed, cache = ROUTE.place_weights(weights), allocate(model, torch.float32)

    produced: list[list[int]] = []
    for token_ids, table in zip(prompts, tables, strict=True):
        for start in range(0, len(token_ids), TOKENS):
            inputs = prefill_inputs(token_ids[start : start + TOKENS], start, table, TOKENS)
            outputs, cache = prefill(placed, cache, inputs)
        produced.append([int(outputs.logits[0].argmax())])
    for step in range(7):
        positions = [len(token_ids) + step for token_ids in prompts]
        inputs = decode_inputs([tokens[-1] for tokens in produced], positions, tables, bucket=4)
        outputs, cache = decode(placed, cache, inputs)
        for request, tokens in enumerate(produced):
            tokens.append(int(outputs.logits[request].argmax()))
    assert produced == [greedy_oracle(checkpoint(kind), token_ids, 8) for token_ids in prompts]


def test_half_precision_logits_are_near_transformers() -> None:
    model, weights = load(checkpoint("llama"), torch.bfloat16)
    table, token_ids = shuffled_table(), prompt(TOKENS)
    inputs = prefill_inputs(token_ids, 0, table, TOKENS)
    prefill = compiled("prefill", model, weights, inputs, torch.bfloat16)
    outputs, _ = prefill(ROUTE.place_weights(weights), allocate(model, torch.bfloat16), inputs)
    want = logits_oracle(checkpoint("llama"), token_ids)[-1:]
    eager, _ = model.step(weights, new_cache(model, NUM_BLOCKS, dtype=torch.bfloat16), inputs)
    error, eager_error = ((logits - want).abs().mean() for logits in (outputs.logits, eager.logits))
    assert error < 2 * eager_error
