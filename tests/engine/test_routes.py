"""The executor on the real routes: steps, padding, and warm starts, with a tiny model."""

import logging
from pathlib import Path

import pytest
import torch

from tests.engine.fixtures import NUM_BLOCKS, config, random_weights, tiny_model
from tests.engine.test_executor import BLOCKS, PROMPT, dense_logits, row
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine import executor
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route

OTHERS = ([2, 8, 20, 21, 22], [1, 3, 5, 7, 10], [11, 12, 13, 14, 15])
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MODEL = tiny_model(num_hidden_layers=1)


def resolved_config(backend: str, twins: bool) -> ResolvedConfig:
    return config(
        backend=backend,
        disable_nki_kernels=twins,
        num_batched_tokens_buckets=(16,),
        num_seqs_buckets=(1, 4),
        decode_context_length_buckets=(256,),
    )


def start(resolved: ResolvedConfig, root: Path) -> GraphExecutor:
    route = select_route(resolved.backend, CPU)
    cache = CompileCache(CacheFolders(local=root), route.name)
    made = GraphExecutor(MODEL, resolved, route, cache, random_weights(MODEL), torch.float32)
    made.allocate_kv_cache(NUM_BLOCKS)
    made.warm_up(lambda ready: None)
    return made


@pytest.fixture(
    scope="module",
    params=[("neuron_native", False), ("neuron_native", True), ("vllm_neuron", True)],
    ids=["native-kernels", "native-twins", "xla"],
)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphExecutor, Path]:
    root = tmp_path_factory.mktemp("cache")
    return start(resolved_config(*request.param), root), root


@pytest.fixture
def made(started: tuple[GraphExecutor, Path]) -> GraphExecutor:
    return started[0]


def prefill(made: GraphExecutor, blocks: list[int], count: int) -> torch.Tensor:
    """Logits [V] after the first ``count`` tokens of the prompt, a bucket at a time."""
    for first in range(0, count, 16):
        outputs = made.run_prefill(row(PROMPT[first : min(first + 16, count)], first, blocks))
    return outputs.logits[0].clone()


def test_steps_give_what_one_dense_pass_gives(made: GraphExecutor) -> None:
    expected = dense_logits(MODEL, PROMPT)
    for count in (1, 15, 16, 17, 50):
        torch.testing.assert_close(prefill(made, BLOCKS, count), expected[count - 1], **CLOSE)
    for position in range(50, len(PROMPT)):
        outputs = made.run_decode([row([PROMPT[position]], position)])
        torch.testing.assert_close(outputs.logits[0], expected[position], **CLOSE)
    outputs = made.run_prefill(row(PROMPT[:16], 0, OTHERS[0]))
    torch.testing.assert_close(made.prompt_logits(outputs.hidden.clone()), expected[:16], **CLOSE)


def test_a_row_is_bitwise_the_same_beside_padding_and_beside_requests(made: GraphExecutor) -> None:
    for blocks in (BLOCKS, *OTHERS):
        prefill(made, blocks, 40)
    rows = [row([PROMPT[40 - i]], 40 - i, blocks) for i, blocks in enumerate((BLOCKS, *OTHERS))]
    full = made.run_decode(rows).logits.clone()
    for live in (2, 3):
        assert torch.equal(made.run_decode(rows[:live]).logits, full[:live])


def test_padding_of_other_steps_never_reaches_a_cached_token(made: GraphExecutor) -> None:
    prefill(made, BLOCKS, 40)
    alone = made.run_decode([row([PROMPT[40]], 40)]).logits[0].clone()
    # Steps full of padding: a prefill of one token, a decode of two rows of four.
    made.run_prefill(row(PROMPT[:1], 0, OTHERS[0]))
    made.run_decode([row([PROMPT[1]], 1, OTHERS[0]), row([PROMPT[0]], 0, OTHERS[1])])
    made.run_prefill(row(PROMPT[16:17], 16, OTHERS[0]))
    assert torch.equal(made.run_decode([row([PROMPT[40]], 40)]).logits[0], alone)
    # Its own padding rows neither: of a prefill that ends in the middle of a block, and of one that fills it.
    again = prefill(made, BLOCKS, 33)
    torch.testing.assert_close(again, dense_logits(MODEL, PROMPT[:33])[-1], **CLOSE)
    assert made.statistics.compiles_after_warmup == 0


def test_warm_start_compiles_nothing_and_gives_the_same(started: tuple[GraphExecutor, Path]) -> None:
    first, root = started
    second = start(first._config, root)
    assert (second.statistics.compiled, second.statistics.cached) == (0, len(second.graphs))
    assert torch.equal(prefill(second, BLOCKS, 40), prefill(first, BLOCKS, 40))


@pytest.mark.parametrize("backend", ["neuron_native", "vllm_neuron"])
@pytest.mark.parametrize("twins", [False, True], ids=["kernels", "twins"])
def test_weights_are_packed_at_warm_up_for_the_cpp_kernels_alone(
    backend: str, twins: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = resolved_config(backend, twins)
    route, cache = select_route(backend, CPU), CompileCache(CacheFolders(local=tmp_path), backend)
    weights = {name: weight.bfloat16() for name, weight in random_weights(MODEL).items()}
    with caplog.at_level(logging.INFO, "vllm_neuron"):
        made = GraphExecutor(MODEL, resolved, route, cache, weights, torch.bfloat16, graphs=())
        made.allocate_kv_cache(NUM_BLOCKS)
        assert "Packed" not in caplog.text  # The size of a KV cache follows from the memory that is free before.
        made.warm_up(lambda ready: None)
    assert ("Packed weights into" in caplog.text) is not twins


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_is_only_looked_up_is_not_packed(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[torch.Tensor] = []
    monkeypatch.setattr(executor, "prepare_weights", lambda _, weights, room: prepared.extend(weights))
    model = tiny_model(num_hidden_layers=1, tie_word_embeddings=tied)
    weights, resolved = random_weights(model), resolved_config("neuron_native", False)
    route, cache = select_route("neuron_native", CPU), CompileCache(CacheFolders(local=tmp_path), "neuron_native")
    made = GraphExecutor(model, resolved, route, cache, weights, torch.float32, graphs=())
    made.allocate_kv_cache(NUM_BLOCKS)
    made.warm_up(lambda ready: None)
    multiplied = [weight for name, weight in weights.items() if tied or name != "embed"]
    assert list(map(id, prepared)) == list(map(id, multiplied))
