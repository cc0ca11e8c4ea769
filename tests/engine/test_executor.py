"""The executor on tiny models, with a stand-in for the compile route."""

import gc
import logging
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.fixtures import NUM_BLOCKS, SMALL, StandInRoute, config, random_weights, tiny_model
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.compiler import CompileForbiddenError, kernels_of
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.graphs import GraphSpec, NoBucketError, list_graphs
from vllm_neuron.engine.inputs import Row
from vllm_neuron.engine.progress import GraphReady, warm_up_progress
from vllm_neuron.kernels.dispatch import KernelSet
from vllm_neuron.kernels.nki_ops import NkiOptions
from vllm_neuron.kv_cache.layout import layer_shapes, num_groups
from vllm_neuron.models.model import Model, StepInputs

VOCAB = 96
PROMPT = [(i * 7) % 90 + 1 for i in range(70)]
BLOCKS = [9, 4, 31, 6, 17]


def executor(
    root: Path | None = None, route: StandInRoute | None = None, resolved: ResolvedConfig | None = None
) -> GraphExecutor:
    route = route or StandInRoute()
    model = tiny_model(num_hidden_layers=1)
    cache = CompileCache(CacheFolders(local=root), route.name)
    made = GraphExecutor(model, resolved or config(), route, cache, random_weights(model), torch.float32)
    made.allocate_kv_cache(NUM_BLOCKS)
    return made


def warm_executor(
    root: Path | None = None, route: StandInRoute | None = None, resolved: ResolvedConfig | None = None
) -> GraphExecutor:
    made = executor(root, route, resolved)
    made.warm_up(lambda ready: None)
    return made


@pytest.fixture(scope="module")
def warm() -> GraphExecutor:
    """For tests that need a warm executor and do not care who used it before."""
    return warm_executor()


def row(token_ids: list[int], start: int, blocks: list[int] = BLOCKS, wants_logits: bool = True) -> Row:
    return Row(np.array(token_ids, dtype=np.int32), start, (np.array(blocks, dtype=np.int32),), wants_logits)


def dense_logits(model: Model, token_ids: list[int]) -> torch.Tensor:
    """[n, V]: the whole sequence in one step, a block as long as the sequence for each KV group."""
    count, groups = len(token_ids), num_groups(model.kv_layers)
    shapes = layer_shapes(model.kv_layers, 1 + groups, count)
    cache = [(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]
    inputs = StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=torch.arange(count, dtype=torch.int32),
        block_tables=tuple(torch.tensor([[1 + group]], dtype=torch.int32) for group in range(groups)),
        slot_mappings=tuple(torch.arange(count, dtype=torch.int32) + (1 + group) * count for group in range(groups)),
        logits_rows=torch.tensor([count - 1], dtype=torch.int32),
    )
    weights = {**random_weights(model), **model.constants}
    return model.logits(weights, model.forward(weights, cache, inputs)[0])


def test_steps_give_what_one_dense_pass_gives(warm: GraphExecutor) -> None:
    expected = dense_logits(tiny_model(num_hidden_layers=1), PROMPT)
    close = {"rtol": 1e-4, "atol": 1e-4}

    # Prefill in chunks of every size, then token by token, beside a request of its own in other blocks.
    start = 0
    for count in (1, 15, 16, 17, 11):
        outputs = warm.run_prefill(row(PROMPT[start : start + count], start))
        assert outputs.hidden.shape == (count, 32)
        torch.testing.assert_close(outputs.logits[0], expected[start + count - 1], **close)
        torch.testing.assert_close(warm.prompt_logits(outputs.hidden), expected[start : start + count], **close)
        start += count
    other = [2, 8, 20, 21, 22]
    warm.run_prefill(row(PROMPT[:20], 0, other))
    for position in range(start, len(PROMPT)):
        other_position = 20 + position - start
        rows = [row([PROMPT[position]], position), row([PROMPT[other_position]], other_position, other)]
        outputs = warm.run_decode(rows)
        assert outputs.logits.shape == (2, VOCAB)
        assert outputs.hidden.shape == (2, 32)
        torch.testing.assert_close(outputs.logits, expected[[position, other_position]], **close)


def test_only_the_rows_that_want_logits_get_them(warm: GraphExecutor) -> None:
    assert warm.run_prefill(row(PROMPT[:5], 0, wants_logits=False)).logits.shape == (0, VOCAB)
    rows = [row([3], 5), row([4], 0, [20], wants_logits=False), row([5], 0, [21])]
    outputs = warm.run_decode(rows)
    assert outputs.logits.shape == (2, VOCAB)
    everything = warm.run_decode([r._replace(wants_logits=True) for r in rows])
    assert torch.equal(outputs.logits, everything.logits[[0, 2]])


def test_prompt_logits_of_any_length(warm: GraphExecutor) -> None:
    hidden = torch.randn(41, 32)
    model = tiny_model(num_hidden_layers=1)
    expected = model.logits(random_weights(model), hidden)
    for count in (0, 1, 15, 16, 17, 41):
        torch.testing.assert_close(warm.prompt_logits(hidden[:count]), expected[:count])


def test_warm_up_compiles_the_list_once_each_and_steps_compile_nothing() -> None:
    route = StandInRoute()
    made = executor(route=route)
    seen: list[GraphReady] = []
    made.warm_up(seen.append)
    names = [graph.name for graph in list_graphs(config())]
    assert route.compiled == names
    assert [ready.name for ready in seen] == names
    assert [(ready.index, ready.total) for ready in seen] == [(i + 1, len(names)) for i in range(len(names))]
    assert str(seen[0]).startswith("Graph 1 of 9: prefill_t32_ctx256 ready in ")
    assert str(seen[0]).endswith("(compiled)")
    assert made.statistics.compiled == len(names)
    assert made.statistics.executions.total() == 0
    assert set(made.statistics.seconds) == set(names)

    for count in range(1, 33):
        made.run_prefill(row(PROMPT[:count], 0))
    for position in (0, 126, 127, 128, 254, 255):
        blocks = [row([1], position, list(range(1 + 16 * i, 17 + 16 * i))) for i in range(2)]
        for requests in (1, 2):
            made.run_decode(blocks[:requests])
    made.prompt_logits(torch.zeros(3, 32))
    assert route.compiled == names
    assert made.statistics.compiles_after_warmup == 0
    assert made.statistics.executions == {
        "prefill_t16_ctx256": 16,
        "prefill_t32_ctx256": 16,
        "decode_b1_ctx128": 3,
        "decode_b1_ctx256": 3,
        "decode_b2_ctx128": 3,
        "decode_b2_ctx256": 3,
        "prompt_logits_t16": 1,
    }


def test_warm_start_compiles_and_traces_nothing(tmp_path: Path) -> None:
    cold, warm = StandInRoute(), StandInRoute()
    first = warm_executor(tmp_path, cold, SMALL)
    second = executor(tmp_path, warm, SMALL)
    seen: list[GraphReady] = []
    second.warm_up(seen.append)
    assert (first.statistics.compiled, first.statistics.cached) == (3, 0)
    assert (second.statistics.compiled, second.statistics.cached) == (0, 3)
    assert all(ready.source == "local" and str(ready).endswith("(local cache hit)") for ready in seen)
    assert (warm.traced, warm.compiled) == ([], [])
    tokens = row(PROMPT[:20], 0)
    assert torch.equal(first.run_prefill(tokens).logits, second.run_prefill(tokens).logits)


def test_warm_start_runs_the_smallest_graph_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = config(num_seqs_buckets=(1, 2))
    warm_executor(tmp_path, resolved=resolved)
    second, ran = executor(tmp_path, resolved=resolved), []
    submit = second._submit
    monkeypatch.setattr(second, "_submit", lambda graph, rows: ran.append(graph.name) or submit(graph, rows))
    second.warm_up(lambda ready: None)
    assert ran == ["prefill_t16_ctx256", "decode_b1_ctx128"]


def test_lost_index_costs_a_trace_and_no_compile(tmp_path: Path) -> None:
    warm_executor(tmp_path, resolved=SMALL)
    for note in (tmp_path / "neuron_native" / "index").iterdir():
        note.unlink()
    route = StandInRoute()
    made = warm_executor(tmp_path, route, SMALL)
    assert len(route.traced) == 3
    assert (made.statistics.compiled, made.statistics.cached) == (0, 3)


def test_other_versions_compile_anew(tmp_path: Path) -> None:
    warm_executor(tmp_path, StandInRoute("1"), SMALL)
    assert warm_executor(tmp_path, StandInRoute("2"), SMALL).statistics.compiled == 3


def test_other_kv_cache_sizes_are_other_graphs(tmp_path: Path) -> None:
    warm_executor(tmp_path, resolved=SMALL)
    made = executor(tmp_path, resolved=SMALL)
    made.allocate_kv_cache(NUM_BLOCKS + 1)
    made.warm_up(lambda ready: None)
    # Only the graph without a KV cache is the same.
    assert (made.statistics.compiled, made.statistics.cached) == (2, 1)


def test_artifacts_of_another_configuration_are_added_to_and_say_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(requests: tuple[int, ...]) -> GraphExecutor:
        route, model = StandInRoute(), tiny_model(num_hidden_layers=1)
        cache = CompileCache(CacheFolders(artifacts=tmp_path), route.name)
        resolved = config(num_seqs_buckets=requests, decode_context_length_buckets=(256,))
        made = GraphExecutor(model, resolved, route, cache, random_weights(model), torch.float32)
        made.allocate_kv_cache(NUM_BLOCKS)
        made.warm_up(lambda ready: None)
        return made

    assert start((1, 2)).statistics.compiled == 5
    assert "NEURON_COMPILED_ARTIFACTS" not in caplog.text
    assert start((1, 2, 4)).statistics.compiled == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "has no graph decode_b4_ctx256 of this configuration" in record.getMessage()
    assert "nearest graph there is decode_b" in record.getMessage()
    assert start((1, 2, 4)).statistics.compiled == 0


def test_missing_graph_is_fatal_and_named_when_compiling_is_forbidden(tmp_path: Path) -> None:
    few = replace(SMALL, num_seqs_buckets=(1, 2))
    strict = replace(few, disable_warmup_compile=True)
    with pytest.raises(CompileForbiddenError, match=r"prefill_t32_ctx256.*VLLM_NEURON_DISABLE_WARMUP_COMPILE=1"):
        executor(tmp_path, resolved=strict).warm_up(lambda ready: None)
    warm_executor(tmp_path, resolved=few)
    filled = executor(tmp_path, resolved=strict)
    filled.warm_up(lambda ready: None)
    assert filled.statistics.cached == 4

    for manifest in (tmp_path / "neuron_native").glob("*/manifest.json"):
        if "decode_b2_ctx256" in manifest.read_text():
            (manifest.parent / "blob").unlink()
    route = StandInRoute()
    with pytest.raises(CompileForbiddenError, match="Graph decode_b2_ctx256 "):
        executor(tmp_path, route, strict).warm_up(lambda ready: None)
    assert route.compiled == []


def test_compile_while_serving_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = executor()
    with caplog.at_level(logging.WARNING):
        made.run_decode([row([1], 0)])
    assert made.statistics.compiles_after_warmup == 1
    assert "decode_b1_ctx128 (1 rows, 1 requests, context 128)" in caplog.text


def test_compile_while_serving_is_refused_in_strict_mode() -> None:
    made = executor(resolved=config(disable_warmup_compile=True))
    with pytest.raises(CompileForbiddenError, match=r"decode_b1_ctx128 \(1 rows, 1 requests, context 128\)"):
        made.run_decode([row([1], 0)])
    assert made.statistics.compiles_after_warmup == 1
    assert made.statistics.compiled == 0


def test_step_beyond_every_bucket_is_refused_and_the_next_step_works(warm: GraphExecutor) -> None:
    with pytest.raises(NoBucketError, match="exceeds largest bucket"):
        warm.run_prefill(row(PROMPT[:33], 0))
    with pytest.raises(NoBucketError, match="exceeds largest bucket"):
        warm.run_decode([row([1], 0, [20 + i]) for i in range(5)])
    assert warm.run_prefill(row(PROMPT[:5], 0)).logits.isfinite().all()


def test_failing_compile_keeps_its_cause(tmp_path: Path) -> None:
    route = StandInRoute()
    route.failure = RuntimeError("NCC_EOOM002 out of memory")
    with pytest.raises(RuntimeError, match="NCC_EOOM002"):
        executor(tmp_path, route).warm_up(lambda ready: None)
    assert not list((tmp_path / "neuron_native").glob("*/manifest.json"))


def test_no_old_kv_handle_is_kept() -> None:
    class Handle(list):
        """A list that can be referenced weakly."""

    class Route(StandInRoute):
        def allocate_kv_cache(self, shapes, dtype):  # type: ignore[no-untyped-def]
            return Handle(super().allocate_kv_cache(shapes, dtype))

    made = executor(route=Route(), resolved=SMALL)
    old = weakref.ref(made._kv_cache)
    assert old() is not None
    made.warm_up(lambda ready: None)
    gc.collect()
    assert old() is None


def test_step_that_fails_half_way_takes_the_kv_cache_along() -> None:
    made = executor(resolved=SMALL)
    assert made.has_kv_cache
    made.warm_up(lambda ready: None)

    def fail(*arguments: object) -> None:
        raise RuntimeError("device lost")

    graph = list_graphs(SMALL)[0]
    working, made._executables[graph] = made._executables[graph], fail  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="device lost"):
        made.run_prefill(row(PROMPT[:5], 0))
    made._executables[graph] = working
    assert not made.has_kv_cache
    with pytest.raises(RuntimeError, match="no KV cache"):
        made.run_prefill(row(PROMPT[:5], 0))


def test_refused_rows_leave_the_kv_cache_in_place(warm: GraphExecutor) -> None:
    with pytest.raises(ValueError, match="for a request of 20 tokens"):
        warm.run_prefill(row(PROMPT[:20], 0, [9]))
    assert warm.has_kv_cache


def test_warm_up_leaves_the_kv_cache_zero_but_for_the_null_block() -> None:
    made = warm_executor(resolved=SMALL)
    for keys, values in made._kv_cache:
        assert not keys[1:].any()
        assert not values[1:].any()


def test_progress_goes_to_the_log_when_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm_neuron"):
        executor(resolved=SMALL).warm_up()
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if line.startswith("Graph ")]) == 3
    assert lines[-1].startswith("Warm-up: 3 graphs ready in ")
    assert lines[-1].endswith("(0 from the cache, 3 compiled)")


def _all_output(terminal: int) -> str:
    """What is written to a terminal until its writers are gone, which reads as an error."""
    pieces = []
    with suppress(OSError):
        while piece := os.read(terminal, 1 << 12):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_progress_on_a_terminal_is_a_bar_and_a_line_per_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = os.openpty()
    # A terminal holds and gives out little at a time, and the bar is drawn more often on a slow machine.
    with ThreadPoolExecutor() as threads, os.fdopen(terminal, "w") as stderr:
        shown = threads.submit(_all_output, ours)
        monkeypatch.setattr(sys, "stderr", stderr)
        with warm_up_progress(2) as report:
            report(GraphReady("decode_b1_ctx128", 1, 2, 0.5, "remote"))
        stderr.close()
        text = shown.result()
    os.close(ours)
    assert "Graph 1 of 2: decode_b1_ctx128 ready in 0.50 s (remote cache hit)" in text
    assert "Warming up" in text
    assert "1/2" in text


@pytest.mark.parametrize(
    ("changes", "sets"),
    [
        ({}, (KernelSet.CPU,)),
        ({"nki_simulator": True}, (KernelSet.NKI, KernelSet.CPU)),
        ({"disable_nki_kernels": True}, ()),
        ({"backend": "vllm_neuron"}, (KernelSet.CPU,)),
        ({"cpu_mode": False}, ()),
    ],
)
def test_kernel_sets(changes: dict[str, object], sets: tuple[KernelSet, ...]) -> None:
    assert kernels_of(config(**{"disable_nki_kernels": False, **changes})).sets == sets


def test_options_of_kernels() -> None:
    options = kernels_of(config(attn_mask_torch=True, backend="vllm_neuron", cpu_mode=False)).options
    assert options == NkiOptions(on_device=True, in_place=False, torch_mask=True, cores=2)


def test_graph_names_are_unique() -> None:
    names = [graph.name for graph in list_graphs(config())]
    assert len(set(names)) == len(names)
    assert GraphSpec("decode", 8, 8, 4096).name == "decode_b8_ctx4096"
