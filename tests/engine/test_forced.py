"""Sequences whose tokens are known, through the graphs that serve them, with a stand-in for the compile route."""

from typing import Any

import pytest
import torch

from tests.engine.fixtures import NUM_BLOCKS, StandInRoute, config, random_weights, tiny_model
from tests.engine.test_executor import dense_logits
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.config.options import OnDeviceSamplingConfig
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.forced import ForcedRun
from vllm_neuron.engine.graphs import NoBucketError, graphs_for_validation, layers_graph

SEQUENCES = [[(7 * i) % 90 + 1 for i in range(50)], [(11 * i) % 90 + 1 for i in range(20)]]
PROMPTS = [38, 8]
"""The rest of each is 12 tokens."""
CHUNKS = {32, 6, 8, 18, 20}


WINDOWS = {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    "changes", [{}, {"num_hidden_layers": 3, **WINDOWS}], ids=["full attention", "three KV groups"]
)
def test_every_position_has_the_logits_of_the_whole_sequence_and_layers_add_up(changes: dict[str, Any]) -> None:
    model, route = tiny_model(**changes), StandInRoute()
    resolved = config(num_batched_tokens_buckets=(32,), decode_context_length_buckets=(256,))
    graphs = graphs_for_validation(resolved, CHUNKS, {2})
    weights = random_weights(model)
    cache = CompileCache(CacheFolders(), route.name)
    executor = GraphExecutor(model, resolved, route, cache, weights, torch.float32, graphs=graphs)
    executor.allocate_kv_cache(NUM_BLOCKS)
    executor.warm_up(lambda ready: None)
    forced = ForcedRun(executor, model, resolved, SEQUENCES)
    layers, logits = forced.layers(), forced.logits(PROMPTS)
    assert executor.statistics.compiles_after_warmup == 0
    # 38 and 8 tokens of prompts, and 12 steps of both requests.
    assert executor.statistics.live_rows["prefill_t32_ctx256"] == 46
    assert executor.statistics.live_rows["decode_b2_ctx256"] == 24
    for sequence, ours, one in zip(SEQUENCES, logits, layers, strict=True):
        expected = dense_logits(model, sequence)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.logits, expected, rtol=1e-4, atol=1e-4)
        assert len(one.residuals) == 1 + len(model.kv_layers)
        assert all(residual.shape == (len(sequence), model.hidden_size) for residual in one.residuals)
        torch.testing.assert_close(one.residuals[0], weights["embed"][sequence])
        last = one.residuals[-1]
        normed = last / (last.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights["final_norm"]
        torch.testing.assert_close(one.hidden, normed, rtol=1e-4, atol=1e-4)


def test_graphs_for_validation_are_those_that_serve_and_layers_beside_them() -> None:
    names = {graph.name for graph in graphs_for_validation(config(), {9, 20}, {3})}
    served = {"prefill_t16_ctx256", "prefill_t32_ctx256", "decode_b4_ctx128", "decode_b4_ctx256", "prompt_logits_t16"}
    assert names == served | {"layers_t16_ctx256", "layers_t32_ctx256"}
    assert {graph.name for graph in graphs_for_validation(config(), {9, 20}, {3}, with_layers=False)} == served


def test_graphs_that_sample_return_logits_instead() -> None:
    sampling = config(on_device_sampling=OnDeviceSamplingConfig(), async_scheduling=True)
    assert graphs_for_validation(sampling, {9}, {1}) == graphs_for_validation(config(), {9}, {1})


def test_no_layers_graph_is_said() -> None:
    with pytest.raises(NoBucketError, match="a validating step of 17 tokens"):
        layers_graph(graphs_for_validation(config(), {9}, {1}), 17)
