"""`vllm-neuron advise`, from a file to a table, JSON and a report."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.advisor.test_traffic import METRICS
from vllm_neuron.advisor.advice import TOKENS_OPTION, advise, percentile_buckets
from vllm_neuron.cli.main import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["advise", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """Prompts of about 200 and 900 tokens."""
    path = tmp_path / "lengths"
    path.write_text("".join(f"{180 + i % 20} 40\n" for i in range(90)) + "".join(f"{880 + i} 10\n" for i in range(10)))
    return path


def test_the_proposal_has_a_bucket_for_each_cluster(lengths: Path) -> None:
    result = run("--lengths", lengths, "--max-num-seqs", 8, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["additional_config"]["neuron_config"]["num_batched_tokens_buckets"] == [256, 896]
    options = document["options"]["num_batched_tokens_buckets"]
    by_name = {choice["name"]: choice for choice in options["choices"]}
    assert by_name["best of 2"]["waste"] == by_name["default"]["waste"] < by_name["best of 1"]["waste"]
    assert (by_name["best of 2"]["graphs"], by_name["default"]["graphs"]) == (2, 4)
    assert document["options"]["num_seqs_buckets"]["proposed"][-1] == 8


def test_the_table_ends_with_what_to_paste(lengths: Path) -> None:
    result = run("--lengths", lengths)
    assert "best of 2 (proposed)" in result.stdout and "█" in result.stdout
    assert result.stdout.splitlines()[-1] == (
        '--additional-config \'{"neuron_config": {"num_batched_tokens_buckets": [256, 896]}}\''
    )


def test_the_report_is_one_file_with_a_chart_per_option(lengths: Path, tmp_path: Path) -> None:
    run("--lengths", lengths, "--max-num-seqs", 8, "--html", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<svg") == 2 and "[256, 896]" in text
    for chart in text.split("<svg")[1:]:
        ET.fromstring("<svg" + chart.split("</svg>")[0] + "</svg>")


def test_metrics_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(METRICS)
    document = json.loads(run("--from-metrics", tmp_path / "metrics", "--json").stdout)
    lists = document["additional_config"]["neuron_config"]
    assert lists == {"num_batched_tokens_buckets": [384, 512], "num_seqs_buckets": [8]}


@pytest.mark.parametrize("arguments", [(), ("--lengths", "a", "--from-log", "b")])
def test_exactly_one_source_is_named(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1 and "in one way" in result.output


def test_a_limit_below_a_batch_of_the_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(METRICS)
    result = run("--from-metrics", tmp_path / "metrics", "--max-num-seqs", 4)
    assert result.exit_code == 1 and "larger than the largest bucket 4" in result.output


def test_a_bucket_is_proposed_only_where_it_saves_enough() -> None:
    sizes = {128: 1.0, 1024: 99.0}
    assert advise(TOKENS_OPTION, sizes, 1024, 4, 0.5, 128).proposed.partition.buckets == (1024,)
    assert advise(TOKENS_OPTION, sizes, 1024, 4, 0.001, 128).proposed.partition.buckets == (128, 1024)


def test_percentiles_are_those_of_the_guide() -> None:
    sizes = dict.fromkeys(range(1, 101), 1.0)
    assert percentile_buckets(sizes, 100, 1) == (25, 50, 75, 95, 100)
