"""lm-eval's command line and results, with a stand-in for the package, and what is said without it."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.accuracy.fake_server import answering, completion
from vllm_neuron.accuracy.lm_eval import LmEvalError, run_tasks, task_scores, transformers_arguments
from vllm_neuron.cli.main import app

STAND_IN = """
import json, pathlib, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "broken" in arguments["--tasks"]:
    sys.exit("no such task")
folder = pathlib.Path(arguments["--output_path"]) / "model"
folder.mkdir(parents=True)
scores = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "asked": json.dumps(arguments)}
(folder / "results_2026.json").write_text(json.dumps({"results": {arguments["--tasks"]: scores}}))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lm_eval"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_tasks_without_lm_eval_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["validate", "folder", "--tasks", "arc_easy"])
    assert result.exit_code == 1 and "lm-eval is not installed" in result.output


def test_lm_eval_is_asked_as_its_documentation_says(stand_in: None) -> None:
    found = run_tasks(transformers_arguments("folder", "bfloat16"), ["arc_easy"], 10)
    asked = json.loads(found["arc_easy"]["asked"])
    assert asked["--model"] == "hf" and "pretrained=folder" in asked["--model_args"] and asked["--limit"] == "10"


def test_a_failing_task_is_said(stand_in: None) -> None:
    with pytest.raises(LmEvalError, match="no such task"):
        run_tasks(("hf", ""), ["broken"], None)


def test_scores_agree_within_their_standard_errors() -> None:
    ours = {"arc": {"acc,none": 0.50, "acc_stderr,none": 0.03, "acc_norm,none": 0.5, "acc_norm_stderr,none": "N/A"}}
    reference = {"arc": {"acc,none": 0.57, "acc_stderr,none": 0.03, "acc_norm,none": 0.6, "alias": "arc"}, "other": {}}
    found = {score.metric: score for score in task_scores(ours, reference)}
    assert found.keys() == {"acc,none", "acc_norm,none"}
    assert found["acc,none"].agrees and not found["acc_norm,none"].agrees


def test_command_runs_tasks_on_both_servers(stand_in: None, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("3 1 4\n")
    with answering(completion()) as ours, answering(completion()) as reference:
        command = ["validate", ours, "--against", reference, "--tokens", "2", "--prompts", str(prompts)]
        result = CliRunner().invoke(app, [*command, "--tasks", "arc_easy", "--json"])
    assert result.exit_code == 0, result.output
    (score,) = json.loads(result.stdout)["tasks"]
    assert (score["metric"], score["ours"], score["agrees"]) == ("acc,none", 0.5, True)
