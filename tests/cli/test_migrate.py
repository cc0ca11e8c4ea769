"""`vllm-neuron migrate` as it is typed. vLLM's parser is asked in tests/migration/test_launches.py."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from vllm_neuron.cli import migrate as command
from vllm_neuron.cli.main import app

CLEAN = "vllm serve m --device neuron --max-num-seqs 4\n"
UNDECIDED = "NEURON_COMPILED_ARTIFACTS=old vllm serve m --device neuron\n"


@pytest.fixture(autouse=True)
def parser_without_vllm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What vLLM's parser is made to say; nothing unless a test adds to it."""
    says: list[str] = []
    monkeypatch.setattr(command, "flag_faults", lambda launch: list(says))
    return says


def migrate(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["migrate", *map(str, arguments)], input=text, catch_exceptions=False)


def test_a_file(tmp_path: Path) -> None:
    old = tmp_path / "old.sh"
    old.write_text(CLEAN)
    done = migrate(old)
    assert done.exit_code == 0
    assert done.stdout == "vllm serve m --max-num-seqs 4\n"
    assert "dropped" in done.stderr and "finds Neuron hardware" in done.stderr
    assert done.stderr.splitlines()[-1] == "Nothing needs a person."


def test_standard_input_and_the_text_itself() -> None:
    assert migrate("-", text=CLEAN).stdout == migrate(CLEAN).stdout == "vllm serve m --max-num-seqs 4\n"
    assert migrate("--override-neuron-config '{\"quantized\": false}'").stdout == "\n"


def test_a_long_command_is_no_file_name() -> None:
    command_line = f"vllm serve m --served-model-name {'x' * 5000}"
    assert migrate(command_line).stdout == f"{command_line}\n"


def test_what_needs_a_person_is_said_and_has_an_exit_code_of_its_own(parser_without_vllm: list[str]) -> None:
    done = migrate(UNDECIDED)
    assert done.exit_code == command.NEEDS_A_PERSON
    assert "needs a decision" in done.stderr and done.stderr.splitlines()[-1] == "1 row needs a person."
    parser_without_vllm.append("unrecognized arguments: --nonsense")
    done = migrate(CLEAN)
    assert done.exit_code == command.NEEDS_A_PERSON and "--nonsense" in done.stderr


def test_what_is_not_supported_yet_needs_a_person_even_if_it_is_left_out() -> None:
    text = "vllm serve m --tensor-parallel-size 2"
    assert migrate(text).stdout == f"{text}\n"
    done = migrate(text, "--only-supported")
    assert done.stdout == "vllm serve m\n" and done.exit_code == command.NEEDS_A_PERSON
    assert "left out" in done.stderr and "tensor parallelism" in done.stderr


def test_tuning() -> None:
    text = "vllm serve m --block-size 64"
    assert migrate(text).stdout == "vllm serve m\n"
    assert migrate(text, "--keep-tuning").stdout == f"{text}\n"


def test_json() -> None:
    document = json.loads(migrate(UNDECIDED, "--json").stdout)
    assert document["form"] == "shell" and document["needs_a_person"] == 1
    assert document["new"] == "NEURON_COMPILED_ARTIFACTS=old vllm serve m\n"
    (launch,) = document["launches"]
    assert launch["program"] == "vllm serve" and launch["options"] == {"model": "m"}
    assert launch["environment"] == {"NEURON_COMPILED_ARTIFACTS": "old"}
    assert {row["verdict"] for row in launch["rows"]} == {"needs a decision", "kept", "dropped"}
    assert set(launch["rows"][0]) == {"place", "old", "verdict", "new", "reason"}


def test_diff() -> None:
    done = migrate(CLEAN, "--diff")
    assert done.stdout.splitlines() == [
        "--- old",
        "+++ new",
        "@@ -1 +1 @@",
        "-vllm serve m --device neuron --max-num-seqs 4",
        "+vllm serve m --max-num-seqs 4",
    ]


def test_write(tmp_path: Path) -> None:
    new = tmp_path / "new.sh"
    assert migrate(CLEAN, "--write", new).exit_code == 0
    assert new.read_text() == "vllm serve m --max-num-seqs 4\n"


def test_values_that_are_only_known_later_are_named() -> None:
    assert "Not checked, because only known when the launch runs: --port" in migrate("vllm serve m --port $P").stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "Nothing here starts vLLM"),
        ("missing.sh", "missing.sh: no such file"),
        ("{nonsense", "not a JSON object"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    done = migrate(text)
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith("Error: ") and message in done.stderr
