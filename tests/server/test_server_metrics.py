"""/metrics of a real server whose worker has a process of its own, and the dashboard's queries against it."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from tests.checkpoints import oracle_model, prompt
from tests.server.completions import token_ids
from tests.server.harness import (
    MODEL_NAME,
    TINY_ARGS,
    TINY_CONFIG,
    Server,
    clean_environment,
    free_port,
    http,
    serving,
    start,
)
from vllm_neuron.advisor.traffic import from_metrics
from vllm_neuron.cli.main import app
from vllm_neuron.plugin.metrics import METRICS
from vllm_neuron.plugin.metrics import PREFIX as OURS
from vllm_neuron.plugin.metrics_folder import PREFIX as FOLDER

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana-dashboard.json").read_text())
SHOWN_WHOLE = (f"{OURS}compiles_after_warmup_total",)
"""Counters that the dashboard shows as they are."""
Labels = dict[str, str]
Scrape = dict[str, list[tuple[Labels, float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def server(tiny: Path, cache: Path, folder: Path) -> Iterator[Server]:
    """Worker, engine and API server are three processes, and nothing was asked yet."""
    args = ("--distributed-executor-backend", "mp")
    with serving(tiny, "neuron_native", folder, cache, (*TINY_ARGS, *args), env={"TMPDIR": str(folder)}) as running:
        yield running


@pytest.fixture(scope="module")
def before(server: Server) -> Scrape:
    return scrape(server)


@pytest.fixture(scope="module")
def after(server: Server, before: Scrape) -> Scrape:
    """Ten requests: prompts of 1, 129 and 511 tokens, one of them three times, and four that decode together."""
    for length in (1, 129, 511):
        token_ids(server, prompt(length, seed=length), 1)
    for _ in range(3):
        token_ids(server, prompt(200, seed=5), 3)
    for extra in ({}, {"seed": 1}, {"logprobs": 1}, {"n": 3, "temperature": 0.5}):
        token_ids(server, prompt(20, seed=9), 4, **extra)
    return scrape(server)


def scrape(server: Server) -> Scrape:
    """Every series by name; no series may be there twice."""
    status, text = http("GET", f"{server.url}/metrics")
    assert status == 200
    series: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            known = series.setdefault(sample.name, [])
            assert sample.labels not in [labels for labels, _ in known], sample
            known.append((sample.labels, sample.value))
    return series


def total(series: Scrape, name: str, **labels: str) -> float:
    found = [value for known, value in series[name] if labels.items() <= known.items()]
    assert found, (name, labels)
    return sum(found)


def test_server_shows_every_series_before_any_request(server: Server, before: Scrape, tiny: Path) -> None:
    graphs = server.rpc("graph_statistics")["seconds"]
    for metric in METRICS:
        series = before[OURS + metric.name + {"counter": "_total", "histogram": "_count", "gauge": ""}[metric.kind]]
        for labels, value in series:
            assert set(labels) == {"model_name", "rank_id", *metric.labels}
            assert (labels["model_name"], labels["rank_id"]) == (MODEL_NAME, "0")
            assert (value > 0) == (metric.kind == "gauge"), (metric, value)
    compiled = {labels["bucket_name"]: value for labels, value in before[f"{OURS}compilation_time_seconds"]}
    assert compiled == graphs
    executed = {labels["bucket_name"] for labels, _ in before[f"{OURS}neff_execution_count_total"]}
    assert executed == set(graphs)
    weights = sum(parameter.numel() for parameter in oracle_model(tiny).parameters())
    assert total(before, f"{OURS}model_load_size_bytes") == 4 * weights
    for name in (
        "vllm:prefix_cache_queries_total",
        "vllm:num_requests_running",
        "vllm:time_to_first_token_seconds_sum",
    ):
        assert total(before, name) == 0


def test_server_counts_steps_and_padding_once(server: Server, after: Scrape) -> None:
    statistics = server.rpc("graph_statistics")
    executed = {labels["bucket_name"]: value for labels, value in after[f"{OURS}neff_execution_count_total"] if value}
    assert executed == statistics["executions"]
    decode = sum(count for name, count in executed.items() if name.startswith("decode"))
    assert total(after, f"{OURS}num_seqs_padding_count") == decode
    # By hand: 1 of 128, 129 of 256 and 511 of 512 tokens; 200 of 256, then twice the 8 that are not in the prefix
    # cache; 20 of 128 for each of six answers, whose 20 tokens make no whole block.
    padding = [127, 127, 1, 56, 120, 120, *[108] * 6]
    assert total(after, f"{OURS}num_batched_tokens_padding_sum") == sum(padding)
    assert total(after, f"{OURS}num_batched_tokens_padding_count") == len(padding)
    assert total(after, f"{OURS}compiles_after_warmup_total") == 0
    assert total(after, "vllm:prefix_cache_hits_total") == 2 * 192
    assert total(after, "vllm:prefix_cache_queries_total") == 1 + 129 + 511 + 3 * 200 + 6 * 20


def test_server_metrics_give_bucket_lists(server: Server, after: Scrape, tmp_path: Path) -> None:
    """From the address or a copy of it. Paddings of 108, 120 and 127 rows are all more than 64 to the histogram."""
    _, text = http("GET", f"{server.url}/metrics")
    (tmp_path / "scrape").write_text(text)
    sample = from_metrics(text, "/metrics")
    assert sample.prefill_steps == {63: 9, 191: 1, 223: 1, 511: 1}
    assert sum(sample.decode_steps.values()) == total(after, f"{OURS}num_seqs_padding_count")
    for source in (f"{server.url}/metrics", tmp_path / "scrape"):
        result = CliRunner().invoke(app, ["advise", "--from-metrics", str(source), "--json"], catch_exceptions=False)
        lists = json.loads(result.stdout)["additional_config"]["neuron_config"]
        assert lists["num_batched_tokens_buckets"] == [128, 256, 512]
        assert lists["num_seqs_buckets"][-1] == max(sample.decode_steps)


def test_server_start_time_is_that_of_the_process(server: Server, before: Scrape) -> None:
    """Not less than from the first to the last line of the start, nor more than the process's age."""
    stamp = r"(\d\d):(\d\d):(\d\d)"
    first = re.search(rf"INFO \d\d-\d\d {stamp}", server.text())
    warm = re.search(rf"{stamp} \[vllm_neuron.engine.executor\] Warm-up: ", server.text())
    assert first and warm
    begin, end = (3600 * int(m[1]) + 60 * int(m[2]) + int(m[3]) for m in (first, warm))
    age = time.time() - psutil.Process(server.process.pid).create_time()
    assert (end - begin) % 86400 - 1 <= total(before, f"{OURS}startup_time_seconds") <= age


def queries() -> list[str]:
    """Every query of the dashboard, with Grafana's variables filled in."""
    texts = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert len(texts) > 15
    return [text.replace("$model", ".*").replace("$__rate_interval", "5m") for text in texts]


def selectors(expression: Any, kept: frozenset[str] = frozenset()) -> Iterator[tuple[Any, frozenset[str], bool]]:
    """(vector selector, labels that it is grouped by, whether a rate is taken of it) of an expression."""
    match expression:
        case promql.VectorSelector():
            yield expression, kept, False
        case promql.AggregateExpr():
            labels = expression.modifier.labels if expression.modifier else []
            yield from selectors(expression.expr, kept | set(labels))
        case promql.BinaryExpr():
            yield from selectors(expression.lhs, kept)
            yield from selectors(expression.rhs, kept)
        case promql.ParenExpr():
            yield from selectors(expression.expr, kept)
        case promql.Call():
            for argument in expression.args:
                if isinstance(argument, promql.MatrixSelector):
                    yield argument.vector_selector, kept, expression.func.name == "rate"
                else:
                    yield from selectors(argument, kept)


@pytest.mark.parametrize("query", queries())
def test_server_has_what_a_query_of_the_dashboard_asks_for(query: str, after: Scrape) -> None:
    found = list(selectors(promql.parse(query)))
    assert found
    for selector, grouped_by, rated in found:
        matchers = selector.matchers.matchers
        series = [
            labels
            for labels, _ in after.get(selector.name, [])
            if all(re.fullmatch(m.value, labels.get(m.name, "")) for m in matchers)
        ]
        assert series, f"nothing matches {selector}"
        assert {matcher.name for matcher in matchers} | grouped_by <= series[0].keys(), selector
        only_grows = selector.name.endswith(("_total", "_bucket", "_sum", "_count"))
        assert rated == (only_grows and selector.name not in SHOWN_WHOLE), selector


def test_server_has_the_models_that_the_dashboard_lets_choose(after: Scrape) -> None:
    (variable,) = [v for v in DASHBOARD["templating"]["list"] if v["name"] == "model"]
    name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
    assert {labels[label] for labels, _ in after[name]} == {MODEL_NAME}


def test_server_beside_another_counts_its_own_steps_alone(
    server: Server, after: Scrape, tiny: Path, cache: Path, folder: Path
) -> None:
    """The other is started as a module and spawns its processes; the folder for temporary files is the same."""
    port = free_port()
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny)]
    names = ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    config = ["--distributed-executor-backend", "mp", "--additional-config", json.dumps(TINY_CONFIG)]
    env = {"TMPDIR": str(folder), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    other = start([*module, *names, *TINY_ARGS, *config], port, folder, cache, env)
    try:
        other.wait_ready()
        assert len(list(folder.glob(f"{FOLDER}*"))) == 2
        before = scrape(other)
        assert {name for name in after if name.startswith(OURS)} <= set(before)
        token_ids(other, prompt(40, seed=11), 3)
        found = scrape(other)
        other.stop()
    finally:
        other.kill_all()
    steps, prompts = f"{OURS}neff_execution_count_total", "vllm:prompt_tokens_total"
    assert (total(before, steps), total(found, steps)) == (0, 1 + 2)
    assert total(found, prompts) == 40
    unchanged = scrape(server)
    assert [total(unchanged, name) for name in (steps, prompts)] == [total(after, name) for name in (steps, prompts)]
    assert len(list(folder.glob(f"{FOLDER}*"))) == 1


def test_server_leaves_no_folder_of_metrics(server: Server, folder: Path, after: Scrape) -> None:
    """The last test of the file: it ends the server by force."""
    assert len(list(folder.glob(f"{FOLDER}*"))) == 1
    server.process.kill()
    server.assert_gone(10)
    assert list(folder.glob(f"{FOLDER}*")) == []


def test_real_program_that_imports_prometheus_client_first(tiny: Path, cache: Path, short_path: Path) -> None:
    """The document's own example, with a tiny model."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "metrics.md").read_text(), re.MULTILINE | re.DOTALL)
    (short_path / "demo").symlink_to(tiny)
    env = clean_environment() | {"VLLM_NEURON_CPU_MODE": "1", "VLLM_CACHE_ROOT": str(cache), "TMPDIR": str(short_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=short_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    for metric in METRICS:
        assert any(line.startswith(OURS + metric.name) for line in lines), metric
    assert any(re.match(r"vllm_neuron:neff_execution_count_total\{.*prefill.* 1\.0$", line) for line in lines)
    assert any(re.match(r"vllm:prompt_tokens_total\{.* [1-9]", line) for line in lines)
    assert list(short_path.glob(f"{FOLDER}*")) == []
