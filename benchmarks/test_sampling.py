"""Time of the sampler alone, compiled as the end of a graph is.

    python -m pytest benchmarks/test_sampling.py --benchmark-columns=min,median,rounds

Vocabularies of 32k and 152k tokens, batches of 1, 8 and 64, on both routes, and argmax-only. Every second row is
greedy; logits are bfloat16 numbers, as a model's are. Look at the minimum on a machine that does something else.
"""

from typing import Any

import pytest
import torch
from steps import ROUTES, compiled

from vllm_neuron.sampling import ALLOW_ALL, GreedyInputs, SamplingInputs, mask_words, pick_greedily, sample


@pytest.mark.parametrize("greedy", [False, True], ids=["sampler", "argmax"])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("vocab", [32_000, 151_936])
@pytest.mark.parametrize("route", ROUTES)
def test_sampler(benchmark: Any, route: str, vocab: int, rows: int, greedy: bool) -> None:
    torch.manual_seed(0)
    compiler = ROUTES[route]
    mask = torch.full((rows, mask_words(vocab)), ALLOW_ALL, dtype=torch.int32)
    temperature = (torch.arange(rows) + 1) % 2 * 0.8
    top_k, top_p = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 0.9)
    inputs = GreedyInputs(mask) if greedy else SamplingInputs(temperature, top_k, top_p, torch.rand(rows), mask)
    arguments = (torch.randn(rows, vocab).mul(3).bfloat16().float(), inputs)

    def step(weights: Any, kv_cache: Any, given: Any) -> Any:
        return (pick_greedily if greedy else sample)(*given, vocab), kv_cache

    executable = compiled(compiler, "sampler", step, {}, [], arguments)
    weights, kv_cache = compiler.place_weights({}), compiler.allocate_kv_cache((), torch.float32)
    benchmark.pedantic(executable, args=(weights, kv_cache, arguments), rounds=30, warmup_rounds=3)
