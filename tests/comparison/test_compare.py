"""Comparing rounds that are made up: where answers differ, what is slower, and what the exit code says."""

import json
import re
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_neuron.cli import compare as command
from vllm_neuron.cli.main import app
from vllm_neuron.comparison.compare import Comparison, Measured, Thresholds, compare
from vllm_neuron.comparison.divergence import Answer, divergences
from vllm_neuron.comparison.load import Timings, percentile
from vllm_neuron.comparison.measure import Bucket, Round, Side, difference
from vllm_neuron.comparison.workload import Workload, vocabulary_of

SAME = (Answer((5, 6, 7), ({5: 9.0, 6: 1.0}, {6: 8.0, 7: 2.0}, {7: 7.0, 6: 3.0})),)
OTHER = (Answer((5, 7, 7), ({5: 9.0, 6: 1.0}, {6: 7.9, 7: 8.1}, {7: 7.0, 6: 3.0})),)


def one_round(answers: Sequence[Answer] = SAME, itl: float = 10.0, memory: float = 2.0) -> Round:
    timings = Timings((0.1, 0.2), (itl / 1e3,) * 4, 1.0, 6, 20)
    figures = {"warm_start_seconds": 20.0, **timings.figures(), "peak_memory_gib": memory}
    return Round(figures, {"decode_b4_ctx512": Bucket(5, 15, 20)}, tuple(answers), timings)


def measured(name: str, *rounds: Round) -> Measured:
    return Measured(Side(name, "neuron_native", ("--max-num-seqs", "4")), rounds or (one_round(),))


def compared(candidate: Measured, thresholds: Thresholds = Thresholds()) -> Comparison:  # noqa: B008 - frozen
    return compare(measured("baseline"), candidate, (), thresholds)


def test_equal_sides_pass() -> None:
    found = compared(measured("candidate"))
    assert found.passed and not found.divergences and found.steady == (True, True)


def test_a_divergence_is_placed_and_has_both_logits_of_both_sides() -> None:
    found = compared(measured("candidate", one_round(OTHER)))
    assert not found.passed
    (one,) = found.divergences
    assert (one.prompt, one.position, one.tokens) == (0, 1, (6, 7))
    assert (one.baseline, one.candidate) == ((8.0, 2.0), (7.9, 8.1))
    assert one.gap == pytest.approx(6.0)
    (failure,) = found.failures
    assert "agree on 0% of 1 prompts" in failure and "at token 1: 6 and 7" in failure
    assert "8.0000 and 2.0000 by the baseline" in failure


def test_a_near_tie_passes_only_if_it_is_one_on_both_sides() -> None:
    near = (Answer((5, 6, 7), ({5: 9.0}, {6: 8.05, 7: 8.0}, {7: 7.0})),)
    tie = compare(measured("a", one_round(near)), measured("b", one_round(OTHER)), (), Thresholds(near_tie=0.25))
    assert tie.passed and tie.divergences
    assert not compared(measured("b", one_round(OTHER)), Thresholds(near_tie=0.25)).passed


def test_scores_that_are_not_told_are_no_near_tie() -> None:
    silent = (Answer((5, 7, 7), ()),)
    found = compared(measured("b", one_round(silent)), Thresholds(near_tie=1e9))
    assert not found.passed and isnan(found.divergences[0].gap) and "unknown and unknown" in found.failures[0]
    assert '"gap": null' in command.as_json(found)


def test_an_answer_that_ends_early_differs_there() -> None:
    (one,) = divergences(SAME, [Answer((5, 6), SAME[0].scores[:2])])
    assert (one.position, one.tokens) == (2, (7, -1))


def test_a_lower_required_agreement_passes() -> None:
    mixed = (*SAME, *OTHER)
    both = measured("a", one_round((*SAME, *SAME)))
    found = compare(both, measured("b", one_round(mixed)), (), Thresholds(agreement=0.5))
    assert found.passed and found.divergences[0].prompt == 1


def test_slowdown_and_memory_are_judged_by_medians() -> None:
    slow = measured("b", one_round(itl=30.0), one_round(itl=9.0), one_round(itl=28.0, memory=5.0))
    assert compared(slow).passed
    found = compared(slow, Thresholds(slowdown=2.0, memory=2.0))
    assert len(found.failures) == 1 and found.failures[0].startswith("itl_p50_ms: 28") and "2.80" in found.failures[0]


def test_failed_validation_fails_the_comparison() -> None:
    outcomes = [{"passed": True}, {"passed": False}]
    found = compare(measured("a"), measured("b"), outcomes, Thresholds())
    assert found.failures == ("b: vllm-neuron validate found more error than rounding explains",)


def test_a_side_without_numbers_is_shown_as_such() -> None:
    errors = dict.fromkeys(("rms", "p99", "max", "top1", "topk", "kl_mean"))
    model = {"dtype": "float32", "errors": errors, "noise": errors, "error_by_position": [None, 0.1]}
    outcome = {"passed": False, "model": model | {"noise_by_position": [1e-6, 1e-6]}}
    found = compare(measured("a"), measured("b"), [outcome, outcome], Thresholds())
    report = command.as_html(found, "org/model")
    assert "Logit error by position" in report and "<td>a</td>" in report


def test_answers_that_change_between_rounds_are_told() -> None:
    found = compared(measured("b", one_round(), one_round(OTHER)))
    assert found.steady == (True, False)


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (100, 4.0), (95, 3.85)])
def test_percentiles_lie_between_neighbours(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_padding_counts_what_ran_between_two_readings() -> None:
    before = {"a": Bucket(2, 3, 8), "b": Bucket(1, 1, 1)}
    found = difference({"a": Bucket(4, 9, 16), "b": Bucket(1, 1, 1), "c": Bucket(1, 2, 4)}, before)
    assert found == {"a": Bucket(2, 6, 8), "c": Bucket(1, 2, 4)}
    assert (found["a"].waste, found["c"].waste) == (0.25, 0.5)


def test_prompts_are_the_same_each_time_and_stay_in_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    workload = Workload(4, 2, 50, 5, vocabulary_of(str(tmp_path)), (), 5)
    prompts = workload.timed_prompts()
    assert prompts == workload.timed_prompts() and [len(p) for p in prompts] == [50, 25, 50, 25]
    assert all(0 < token < 300 for p in prompts for token in p) and len({tuple(p[:8]) for p in prompts}) == 4
    assert vocabulary_of("org/name") == 1000


@pytest.mark.parametrize(
    ("flags", "own", "asks"),
    [
        ((), (), True),
        (("--additional-config", '{"neuron_config": {"on_device_sampling_config": {}}}'), (), False),
        ((), ("--logprobs-mode", "processed_logprobs"), False),
    ],
)
def test_logits_are_asked_for_where_the_host_samples(flags: tuple[str, ...], own: tuple[str, ...], asks: bool) -> None:
    first, second = command.sides_of(("vllm_neuron", "neuron_native"), flags, (own, ()))
    assert (first.flags[-2:] == command.LOGITS) == asks
    assert (first.name, second.name) == ("vllm_neuron", "neuron_native")
    again = command.sides_of(("vllm_neuron", "vllm_neuron"), flags, (own, ()))
    assert again[0].name != again[1].name


@pytest.mark.parametrize(("answers", "code"), [(SAME, 0), (OTHER, 3)])
def test_the_exit_code_the_json_and_the_report_tell(
    answers: tuple[Answer, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds(sides: tuple[Side, Side], *_: Any) -> tuple[Measured, Measured]:
        return Measured(sides[0], (one_round(), one_round())), Measured(sides[1], (one_round(answers),) * 2)

    monkeypatch.setattr(command, "run_rounds", rounds)
    arguments = ["compare", "org/model", "--dtype", "float32", "--no-accuracy", "--html", str(tmp_path / "report.html")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    shown = CliRunner().invoke(app, arguments)
    assert result.exit_code == shown.exit_code == code, result.output
    document = json.loads(result.stdout)
    assert document["passed"] == (code == 0) and len(document["divergences"]) == (code != 0)
    assert document["sides"][0]["figures"]["itl_p50_ms"]["median"] == pytest.approx(10.0)
    assert document["sides"][0]["buckets"]["decode_b4_ctx512"]["waste"] == 0.25
    assert shown.stdout.splitlines()[-1] == ("passed" if code == 0 else "failed")
    report = (tmp_path / "report.html").read_text()
    assert report.count("<svg") == 7 and "decode_b4_ctx512" in report and "--dtype float32" in report
    assert not re.search(r"(?:src|href)=|@import", report)


def test_a_model_after_flags_is_refused() -> None:
    result = CliRunner().invoke(app, ["compare", "--dtype", "float32", "folder"])
    assert result.exit_code == 1 and "MODEL is missing" in result.output
