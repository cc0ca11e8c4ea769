"""Launches from public documentation and issue threads, each judged by hand in judged.yaml."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.migration.published import JUDGED, NAMES, migrated, verdicts
from tests.server.harness import clean_environment
from vllm_neuron.migration import Launch, Verdict, migrate
from vllm_neuron.migration.check import faults_of
from vllm_neuron.migration.rules import FIELDS, FLAGS, VARIABLES
from vllm_neuron.migration.rules.flags import GONE as NO_SUCH_FLAG

GONE = ("device", "override_neuron_config", "use_v2_block_manager", "speculative_model", "num_speculative_tokens")


def test_there_are_thirty_and_each_is_judged() -> None:
    assert set(JUDGED) == set(NAMES)
    retold = [name for name, judged in JUDGED.items() if "put together" not in str(judged["source"])]
    assert len(retold) - len([name for name in retold if name.startswith("guide-")]) >= 30


@pytest.mark.parametrize("name", NAMES)
def test_each_setting_becomes_what_was_judged(name: str) -> None:
    expected = {verdict: names for verdict, names in JUDGED[name].items() if verdict != "source"}
    assert verdicts(migrated(name)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_old_integration_is_left(name: str) -> None:
    for launch in migrated(name).launches:
        assert not set(GONE) & set(launch.new.options)
        assert "VLLM_NEURON_FRAMEWORK" not in launch.new.environment
        config = launch.new.options.get("additional_config")
        assert config is None or set(config.value) <= {"neuron_config", "encoder_neuron_config"}
    assert "VLLM_NEURON_FRAMEWORK" not in migrated(name).new


@pytest.mark.parametrize("name", NAMES)
def test_the_validator_finds_nothing_but_what_is_not_supported_yet(name: str) -> None:
    """Settings that it finds wrong would be mistakes of the mapping; every one of these launches ran."""
    for launch in migrated(name).launches:
        assert [str(fault) for fault in faults_of(launch.new) if not fault.later] == []
        rows = [row for row in launch.rows if row.place == "check"]
        assert {row.old for row in rows} == {fault.option for fault in faults_of(launch.new)}
        assert all(row.verdict is Verdict.UNSUPPORTED for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_only_supported_settings_are_accepted(name: str) -> None:
    for launch in migrated(name, only_supported=True).launches:
        assert faults_of(launch.new) == ()


@pytest.mark.parametrize("name", NAMES)
def test_the_new_launch_is_read_again_and_stays_as_it_is(name: str) -> None:
    first = migrated(name)
    again = migrate(first.new, "" if name.endswith(".json") else name)
    assert again.new == first.new
    assert [plain(found.new) for found in again.launches] == [plain(found.new) for found in first.launches]


def plain(launch: Launch) -> dict[str, object]:
    """Options as text, since a value that was a number may come back as its digits."""
    return {name: json.dumps(option.value) if isinstance(option.value, dict) else str(option.value)
            for name, option in launch.options.items()}  # fmt: skip


PARSE_ALL = """
import json
from tests.migration.published import NAMES, migrated
from vllm_neuron.cli.migrate import flag_faults
from vllm_neuron.migration import migrate
from vllm_neuron.plugin.arguments import known_flags
faults = {name: [text for found in migrated(name).launches for text in flag_faults(found.new)] for name in NAMES}
wrong = flag_faults(migrate("vllm serve m --no-such-flag 1").launches[0].new)
print(json.dumps({"faults": faults, "wrong": wrong, "known": sorted(known_flags())}))
"""


@pytest.fixture(scope="module")
def real_parser() -> dict[str, Any]:
    """What vLLM's parser says, in a process of its own, on a machine without devices and without CPU mode."""
    command = [sys.executable, "-c", PARSE_ALL]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_real_vllm_parser_takes_every_new_launch(real_parser: dict[str, Any]) -> None:
    assert {name: texts for name, texts in real_parser["faults"].items() if texts} == {}


def test_real_vllm_parser_refuses_what_it_does_not_know(real_parser: dict[str, Any]) -> None:
    assert "--no-such-flag" in real_parser["wrong"][0]


def test_real_vllm_parser_has_the_new_flags_and_not_those_that_are_gone(real_parser: dict[str, Any]) -> None:
    known = set(real_parser["known"])
    every = [rule for rules in (FLAGS, VARIABLES, FIELDS) for rule in rules.values()]
    new = {rule.new.split()[0] for rule in every if rule.new.startswith("--")}
    assert new <= known
    gone = {f"--{name.replace('_', '-')}" for name, rule in FLAGS.items() if rule.reason == NO_SUCH_FLAG}
    assert len(gone) > 10 and not gone & known
