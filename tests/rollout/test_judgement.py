"""What follows from measurements, without a server."""

from collections.abc import Mapping

import pytest

from vllm_neuron.rollout.judgement import STEPS, Finding, Thresholds, Verdict, agreement, judge, percentile
from vllm_neuron.rollout.measure import Measurement

SAME = {index: f"answer {index}" for index in range(8)}


def end(
    fault: str = "",
    model: str = "m",
    answers: Mapping[int, str] = SAME,
    failures: tuple[str, ...] = (),
    ttft: float = 0.1,
    itl: float = 0.01,
    samples: int = 24,
) -> Measurement:
    return Measurement("http://end", fault, model, dict(answers), list(failures), [ttft] * samples, [itl] * samples)


@pytest.mark.parametrize(("percent", "goal"), [(0, 1), (1, 5), (3, 5), (5, 25), (25, 50), (50, 100), (100, 100)])
def test_good_servers_are_raised_a_step_at_a_time(percent: int, goal: int) -> None:
    judgement = judge(end(), end(), percent, Thresholds())
    assert (judgement.verdict, judgement.percent) == (Verdict.RAISE, goal)


@pytest.mark.parametrize(
    ("old", "new", "verdict", "check"),
    [
        (end(fault="refused"), end(), Verdict.HOLD, "health of old"),
        (end(), end(fault="refused"), Verdict.ROLL_BACK, "health of new"),
        (end(), end(model="n"), Verdict.ROLL_BACK, "model name"),
        (end(failures=("HTTP 500",)), end(), Verdict.HOLD, "requests to old"),
        (end(), end(failures=("HTTP 500",)), Verdict.ROLL_BACK, "requests to new"),
        (end(), end(samples=7), Verdict.HOLD, "samples"),
        (end(), end(samples=0, answers={}), Verdict.HOLD, "time to first token"),
        (end(), end(answers={index: f"answer! {index}" for index in range(8)}), Verdict.ROLL_BACK, "accuracy"),
        (end(), end(ttft=0.121), Verdict.HOLD, "time to first token, p50"),
        (end(), end(ttft=0.201), Verdict.ROLL_BACK, "time to first token, p95"),
        (end(), end(itl=0.0121), Verdict.HOLD, "time between tokens, p95"),
        (end(), end(itl=0.0201), Verdict.ROLL_BACK, "time between tokens, p50"),
    ],
)
def test_what_is_wrong_holds_or_rolls_back(old: Measurement, new: Measurement, verdict: Verdict, check: str) -> None:
    judgement = judge(old, new, 25, Thresholds())
    assert judgement.verdict is verdict
    assert judgement.percent == {Verdict.HOLD: 25, Verdict.ROLL_BACK: 0}[verdict]
    assert next(finding.verdict for finding in judgement.findings if finding.check == check) is verdict


def test_limits_in_seconds_count_beside_ratios() -> None:
    same = end(ttft=0.5)
    assert judge(same, same, 5, Thresholds(ttft=0.6, itl=0.02)).verdict is Verdict.RAISE
    assert judge(same, same, 5, Thresholds(ttft=0.4)).verdict is Verdict.ROLL_BACK
    assert judge(same, same, 5, Thresholds(itl=0.005)).verdict is Verdict.ROLL_BACK


def test_findings_from_elsewhere_count() -> None:
    judgement = judge(end(), end(), 5, Thresholds(), [Finding("evaluation", Verdict.ROLL_BACK, "42 of 100")])
    assert judgement.verdict is Verdict.ROLL_BACK


def test_agreement_by_hand() -> None:
    old, new = end(answers={0: "abcd", 1: "abcd", 2: "only here"}), end(answers={0: "abcd", 1: "abxxyyzz"})
    assert agreement(old, new) == (1 + 2 / 8) / 2
    assert agreement(end(answers={}), end()) == 0


def test_percentiles_by_hand() -> None:
    values = [float(value) for value in range(101)]
    assert (percentile(values, 50), percentile(values, 95)) == (50, 95)


def test_steps_go_up_from_nothing_to_everything() -> None:
    assert (STEPS[0], STEPS[-1]) == (0, 100) and list(STEPS) == sorted(set(STEPS))
