"""`vllm-neuron rollout` against stand-in servers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.rollout.servers import StandIn, serving
from vllm_neuron.cli.main import app
from vllm_neuron.rollout.proxy import read_split

Ends = tuple[StandIn, StandIn, Path]
LATENCY_DOES_NOT_COUNT = ("--latency-ratio", "1000", "--rollback-ratio", "1000")
"""On a busy machine two equal servers differ."""


def rollout(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["rollout", *map(str, arguments)])


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    """Two servers, and a configuration that gives the new one 5%."""
    old, new = StandIn(), StandIn()
    with serving(old) as old_url, serving(new) as new_url:
        done = rollout("write", old_url, new_url, "--percent", 5, "--output", tmp_path / "haproxy.cfg")
        assert done.exit_code == 0, done.output
        yield old, new, tmp_path / "haproxy.cfg"


def check(file: Path, *arguments: Any) -> tuple[int, dict[str, Any]]:
    done = rollout("check", file, "--json", "--rounds", 1, *LATENCY_DOES_NOT_COUNT, *arguments)
    return done.exit_code, json.loads(done.stdout)


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["verdict"] for finding in result["findings"]}


def test_equal_servers_are_raised_and_the_file_follows_if_told(ends: Ends) -> None:
    old, new, file = ends
    code, result = check(file)
    assert (code, result["recommendation"], result["from_percent"], result["to_percent"]) == (0, "raise", 5, 25)
    assert read_split(file.read_text()).percent == 5
    assert old.requests == new.requests == 9  # of each prompt one, after one that is not timed
    assert check(file, "--apply")[0] == 0
    assert read_split(file.read_text()).percent == 25 and "weight 75" in file.read_text()


def test_another_answer_rolls_back(ends: Ends) -> None:
    _, new, file = ends
    new.words = (" eins", " zwei", " drei")
    code, result = check(file, "--apply")
    assert code == 4 and verdicts(result)["accuracy"] == "roll back"
    assert read_split(file.read_text()).percent == 0


@pytest.mark.parametrize(
    ("change", "code", "finding"),
    [
        ({"healthy": False}, 4, "health of new"),
        ({"model": "other"}, 4, "model name"),
        ({"status": 500}, 4, "requests to new"),
        ({"broken": True}, 4, "requests to new"),
        ({"words": ()}, 4, "requests to new"),
    ],
)
def test_a_new_server_that_fails_rolls_back(ends: Ends, change: dict[str, Any], code: int, finding: str) -> None:
    _, new, file = ends
    for name, value in change.items():
        setattr(new, name, value)
    found, result = check(file)
    assert found == code and verdicts(result)[finding] == "roll back"


def test_an_old_server_that_fails_holds(ends: Ends) -> None:
    old, _, file = ends
    old.healthy = False
    code, result = check(file)
    assert code == 3 and verdicts(result)["health of old"] == "hold" and result["to_percent"] == 5


def test_a_slow_server_is_seen(ends: Ends) -> None:
    _, new, file = ends
    new.delay = 0.05
    code, result = check(file, "--ttft", 0.04)
    assert code == 4
    found = verdicts(result)
    assert found["time to first token, limit"] == "roll back"
    gaps = result["new"]["ttft"] + result["new"]["itl"]
    assert sum(gaps) >= 0.05 * len(gaps)  # one alone can be shorter: a word that is read late is near to the next


@pytest.mark.parametrize(("command", "code", "verdict"), [("test -n", 0, "raise"), ("test -z", 4, "roll back")])
def test_a_command_of_the_users_counts_by_its_exit_code(ends: Ends, command: str, code: int, verdict: str) -> None:
    found, result = check(ends[2], "--validate", command)
    assert found == code and verdicts(result)[f"{command} (exit code {code and 1})"] == verdict


def test_a_command_that_is_not_there_is_an_error(ends: Ends) -> None:
    done = rollout("check", ends[2], "--rounds", 1, "--validate", "no-such-command-at-all")
    assert done.exit_code == 1 and "--validate='no-such-command-at-all' cannot be run" in done.stderr


def test_prompts_and_a_key_of_the_users(ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, new, file = ends
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    code, result = check(file, "--prompts", prompts)
    assert new.requests == 3 and new.keys == {"Bearer secret"}
    assert code == 3 and verdicts(result)["samples"] == "hold"
    prompts.write_text("\n")
    done = rollout("check", file, "--prompts", prompts)
    assert done.exit_code == 1 and "has no prompt" in done.stderr


def test_the_table_for_people(ends: Ends) -> None:
    done = rollout("check", ends[2], "--rounds", 1, *LATENCY_DOES_NOT_COUNT)
    assert "recommendation: raise, from 5% to 25%" in done.stdout
    assert "accuracy" in done.stdout and "100.0% of the greedy answers are the same" in done.stdout


def test_the_last_step_says_that_the_old_server_can_go(ends: Ends) -> None:
    split = read_split(ends[2].read_text())
    rollout("write", split.old, split.new, "--percent", 100, "--output", ends[2])
    done = rollout("check", ends[2], "--rounds", 1, *LATENCY_DOES_NOT_COUNT)
    assert "recommendation: raise, at 100%: the old server can be retired" in done.stdout


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text("global\n")
    for arguments in (("write", "http://a", "http://b", "--output", file), ("check", file)):
        done = rollout(*arguments)
        assert done.exit_code == 1 and "not a configuration that" in done.stderr
    assert file.read_text() == "global\n"
    done = rollout("check", tmp_path / "absent.cfg")
    assert done.exit_code == 1 and "absent.cfg" in done.stderr


def test_a_split_that_makes_no_sense_is_an_error(tmp_path: Path) -> None:
    done = rollout("write", "http://a", "http://a", "--output", tmp_path / "haproxy.cfg")
    assert done.exit_code == 1 and "name two" in done.stderr and not list(tmp_path.iterdir())
