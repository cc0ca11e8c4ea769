"""The plugin's metrics: names, labels, what is counted, and that the document and the code say the same."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, multiprocess, values
from prometheus_client.samples import Sample

from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.plugin.metrics import METRICS, PREFIX, EngineMetrics, padding_bounds

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
PREFILL = GraphSpec("prefill", 128, 1, 512)
LARGE_PREFILL = GraphSpec("prefill", 256, 1, 512)
DECODE = GraphSpec("decode", 4, 4, 512)
LOGITS = GraphSpec("prompt_logits", 128, 1, 0)
GRAPHS = (LARGE_PREFILL, PREFILL, DECODE, LOGITS)
Scrape = Callable[[], dict[str, float]]


def read(folder: Path) -> list[Sample]:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))
    return [sample for metric in registry.collect() for sample in metric.samples]


@pytest.fixture
def scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scrape:
    """Values in the files of a folder of its own: by "name" or "name bucket_name"."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue())

    def series() -> dict[str, float]:
        return {
            " ".join(
                filter(None, (s.name.removeprefix(PREFIX), s.labels.get("bucket_name"), s.labels.get("le")))
            ): s.value
            for s in read(tmp_path)
        }

    return series


def test_every_series_exists_before_any_step(scrape: Scrape, tmp_path: Path) -> None:
    metrics = EngineMetrics(GRAPHS, "served", rank=3)
    assert {sample.value for sample in read(tmp_path)} == {0}
    metrics.loaded(1, 1)
    metrics.warmed_up({graph.name: 1 for graph in GRAPHS}, 1)
    samples = read(tmp_path)
    for metric in METRICS:
        suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}[metric.kind]
        found = [sample.labels for sample in samples if sample.name == PREFIX + metric.name + suffix]
        assert found, metric.name
        for labels in found:
            assert set(labels) == {"model_name", "rank_id", *metric.labels}
            assert (labels["model_name"], labels["rank_id"]) == ("served", "3")
    buckets = {s.labels["bucket_name"] for s in samples if s.name == PREFIX + "neff_execution_count_total"}
    assert buckets == {graph.name for graph in GRAPHS}


def test_padding_is_what_a_step_leaves_of_its_graph(scrape: Scrape) -> None:
    metrics = EngineMetrics(GRAPHS, "served", rank=0)
    for graph, live in ((PREFILL, 1), (LARGE_PREFILL, 129), (PREFILL, 128), (DECODE, 3), (LOGITS, 7)):
        metrics.step(graph, live)
    found = scrape()
    assert found[f"num_batched_tokens_padding_sum {PREFILL.name}"] == 127
    assert found[f"num_batched_tokens_padding_bucket {PREFILL.name} 0.0"] == 1
    assert found[f"num_batched_tokens_padding_bucket {PREFILL.name} 64.0"] == 1
    assert found[f"num_batched_tokens_padding_bucket {PREFILL.name} 128.0"] == 2
    assert found[f"num_batched_tokens_padding_sum {LARGE_PREFILL.name}"] == 127
    assert found[f"num_seqs_padding_sum {DECODE.name}"] == 1
    executions = {graph: found[f"neff_execution_count_total {graph.name}"] for graph in GRAPHS}
    assert executions == {PREFILL: 2, LARGE_PREFILL: 1, DECODE: 1, LOGITS: 1}


def test_counters_follow_what_is_counted_elsewhere(scrape: Scrape) -> None:
    metrics = EngineMetrics(GRAPHS, "served", rank=0)
    for count in (2, 2, 5):
        metrics.follow({"async_steps": count, "sync_fallback_steps": 1, "unknown": 9})
    found = scrape()
    assert (found["async_steps_total"], found["sync_fallback_steps_total"]) == (5, 1)
    assert found["compiles_after_warmup_total"] == 0


def test_times_are_those_of_the_start(scrape: Scrape) -> None:
    metrics = EngineMetrics(GRAPHS, "served", rank=0)
    metrics.loaded(1.5, 1000)
    metrics.warmed_up({PREFILL.name: 2.5}, 30.0)
    found = scrape()
    assert (found["model_load_time_seconds"], found["model_load_size_bytes"]) == (1.5, 1000)
    assert (found[f"compilation_time_seconds {PREFILL.name}"], found["startup_time_seconds"]) == (2.5, 30)


def test_workers_that_run_the_same_steps_do_not_count_them_again(scrape: Scrape, tmp_path: Path) -> None:
    ranks = [EngineMetrics(GRAPHS, "served", rank, counts_steps=rank == 0) for rank in range(2)]
    for metrics in ranks:
        metrics.step(DECODE, 4)
        metrics.follow({"async_steps": 1})
        metrics.loaded(1.0, 10)
    steps = [s for s in read(tmp_path) if s.name == PREFIX + "neff_execution_count_total"]
    assert sum(sample.value for sample in steps) == 1
    assert sum(s.value for s in read(tmp_path) if s.name == PREFIX + "async_steps_total") == 1
    loaded = [s.labels["rank_id"] for s in read(tmp_path) if s.name == PREFIX + "model_load_size_bytes"]
    assert sorted(loaded) == ["0", "1"]


@pytest.mark.parametrize(
    ("rows", "bounds"), [(1, (0, 1)), (2, (0, 1, 2)), (4, (0, 1, 2, 4)), (100, (0, 1, 2, 4, 8, 16, 32, 64, 128))]
)
def test_padding_bounds_reach_the_most_there_can_be(rows: int, bounds: tuple[int, ...]) -> None:
    assert padding_bounds(rows) == bounds


def test_document_has_a_row_for_each_metric_and_no_other() -> None:
    rows = re.findall(r"^\| `vllm_neuron:(\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|", DOCUMENT.read_text(), re.MULTILINE)
    labels = {
        metric.name: ", ".join(f"`{name}`" for name in ("model_name", "rank_id", *metric.labels)) for metric in METRICS
    }
    assert rows == [(metric.name, metric.kind, labels[metric.name], metric.meaning) for metric in METRICS]
