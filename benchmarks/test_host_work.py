"""What the host does for a step besides running its graph: choosing the graph and filling its inputs.

    python -m pytest benchmarks/test_host_work.py --benchmark-columns=min,median,rounds

Contexts of 500 tokens in blocks of 32. benchmarks/async_scheduling.py has what of it stays visible in a whole engine.
"""

from typing import Any

import numpy as np
import pytest
import torch

from vllm_neuron.engine.graphs import GraphSpec, decode_graph, prefill_graph
from vllm_neuron.engine.inputs import InputBuilder, Row

BLOCK_SIZE, CONTEXT, LIVE = 32, 2048, 500
BLOCKS = (np.arange(1, 1 + CONTEXT // BLOCK_SIZE),)
DECODES = tuple(GraphSpec("decode", b, b, c) for b in (1, 2, 4, 8, 16, 32) for c in (512, 1024, 2048))
PREFILLS = tuple(GraphSpec("prefill", t, 1, CONTEXT) for t in (128, 256, 512, 1024))


def builder(graph: GraphSpec) -> InputBuilder:
    return InputBuilder(graph, BLOCK_SIZE, (None,), 576, torch.bfloat16)


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_decode_inputs(benchmark: Any, requests: int) -> None:
    rows = [Row(np.array([7]), LIVE, BLOCKS)] * requests
    benchmark(builder(decode_graph(DECODES, requests, LIVE + 1)).build, rows)


@pytest.mark.parametrize("tokens", [100, 900])
def test_prefill_inputs(benchmark: Any, tokens: int) -> None:
    benchmark(builder(prefill_graph(PREFILLS, tokens)).build, [Row(np.arange(tokens), 0, BLOCKS)])


@pytest.mark.parametrize("requests", [1, 32])
def test_choice_of_a_graph(benchmark: Any, requests: int) -> None:
    benchmark(decode_graph, DECODES, requests, LIVE)
