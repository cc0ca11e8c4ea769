"""The forms in which launches are written: what is found in them, what is changed, and what stays."""

import json
import shlex
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_neuron.migration import Form, Launch, LaunchError, Verdict, migrate
from vllm_neuron.migration.forms import shell
from vllm_neuron.migration.forms.detect import form_of
from vllm_neuron.migration.launch import Expression
from vllm_neuron.migration.values import read_mapping
from vllm_neuron.migration.words import tokenize, unquote

SERVE = "vllm serve m --device neuron --max-num-seqs 4"


def only(text: str, name: str = "") -> Launch:
    (found,) = migrate(text, name).launches
    return found.old


def options(text: str, name: str = "") -> dict[str, object]:
    return {option.name: option.value for option in only(text, name).options.values()}


@pytest.mark.parametrize(
    ("text", "name", "form"),
    [
        (SERVE, "", Form.SHELL),
        (SERVE, "start.sh", Form.SHELL),
        ("--override-neuron-config '{}'", "", Form.SHELL),
        ('{"seq_len": 128}', "", Form.OVERRIDES),
        ('llm = LLM(model="m")', "", Form.PYTHON),
        ("x = 1", "run.py", Form.PYTHON),
        ("FROM base\nCMD vllm serve m", "", Form.DOCKERFILE),
        ("FROM base\nRUN x", "Dockerfile.neuron", Form.DOCKERFILE),
        ("services:\n  a:\n    command: vllm serve m", "", Form.MANIFEST),
        ("a: 1", "deploy.yml", Form.MANIFEST),
        ("echo LLM(", "", Form.SHELL),
    ],
)
def test_form(text: str, name: str, form: Form) -> None:
    assert form_of(text, name) is form


@pytest.mark.parametrize(
    "program",
    [
        "vllm serve",
        "/opt/bin/vllm serve",
        "python -m vllm.entrypoints.openai.api_server --model",
        "python3.11 -m vllm.entrypoints.openai.api_server --model",
        "python vllm/entrypoints/openai/api_server.py --model",
        "nohup vllm serve",
        "A=1 B='2 3' vllm serve",
        "exec vllm serve",
        "cd /srv && vllm serve",
        "docker run -e A=1 --rm image vllm serve",
    ],
)
def test_programs(program: str) -> None:
    found = migrate(f"{program} m --device neuron | tee log")
    assert found.launches[0].old.options["model"].value == "m"
    assert found.new.endswith("vllm serve m | tee log")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("$VENV/bin/python3 -u -m vllm.entrypoints.openai.api_server --model m --device neuron",
         "$VENV/bin/vllm serve m"),
        ("/venv/bin/vllm serve m --device neuron", "/venv/bin/vllm serve m"),
        ("numactl -N 0 python -m vllm.entrypoints.openai.api_server --model m", "numactl -N 0 vllm serve m"),
    ],
)  # fmt: skip
def test_the_program_stays_in_its_environment(old: str, new: str) -> None:
    assert migrate(old).new == new


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0\r"), min_size=1), min_size=1))
def test_words_are_those_of_the_shell(words: list[str]) -> None:
    tokens = list(tokenize(shlex.join(words)))
    assert [unquote(token.text, {}) for token in tokens] == words


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A", "x"),
        ('"$A"', "x"),
        ("'$A'", "$A"),
        (r"\$A", "$A"),
        ('"${A}/y"', "x/y"),
        ("""'{"m": "'"$A"'"}'""", '{"m": "x"}'),
        ('"a\\\nb"', "ab"),
        (r'"\"q\""', '"q"'),
    ],
)
def test_known_variables_are_put_in_place(text: str, value: str) -> None:
    found = unquote(text, {"A": "x"})
    assert found == value and not isinstance(found, Expression)


@pytest.mark.parametrize("text", ["$B", '"${B}"', "${A:-y}", "$(cat f)", "`cat f`", '"$1"', "$A$B"])
def test_what_is_only_known_later_is_marked(text: str) -> None:
    assert isinstance(unquote(text, {"A": "x"}), Expression)


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ('{"a": false, "b": [1, 2]}', True),
        ('{"a": False, "b": [1, 2],}', False),
        ("{'a': False, 'b': (1, 2)}", False),
        ("{a:false, b:[1, 2]}", False),
        ('{"a": false, \\\n "b": [1, 2]}', True),
    ],
)
def test_dictionaries_in_every_spelling(text: str, exact: bool) -> None:
    found = read_mapping(text)
    assert found is not None
    values, is_exact = found
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()} == {"a": False, "b": [1, 2]}
    assert is_exact is exact


@pytest.mark.parametrize("text", ["", "[1]", "a", "{", "nonsense: {"])
def test_what_is_no_dictionary(text: str) -> None:
    assert read_mapping(text) is None


def test_a_script_keeps_everything_else() -> None:
    script = """#!/bin/sh
# start it
export VLLM_NEURON_FRAMEWORK=x HF_HOME=/models  # both
trap 'kill 0' EXIT
if [ -f lock ]; then exit 1; fi
VLLM_NEURON_FRAMEWORK=y vllm serve "$MODEL" \\
  --device neuron \\
  --served-model-name 'my model' >> "log file" 2>&1 &
wait
"""
    assert (
        migrate(script).new
        == """#!/bin/sh
# start it
export HF_HOME=/models  # both
trap 'kill 0' EXIT
if [ -f lock ]; then exit 1; fi
vllm serve "$MODEL" \\
  --served-model-name 'my model' >> "log file" 2>&1 &
wait
"""
    )


def test_several_launches_of_a_script() -> None:
    found = migrate("export VLLM_NEURON_FRAMEWORK=x\nvllm serve a --device neuron &\nvllm serve b --device neuron\n")
    assert found.new == "vllm serve a &\nvllm serve b\n"
    assert [launch.old.options["model"].value for launch in found.launches] == ["a", "b"]


def test_branches_of_a_script_leave_a_variable_unknown() -> None:
    launch = only("if x; then N=1; else N=2; fi\nvllm serve m --max-num-seqs $N")
    assert isinstance(launch.options["max_num_seqs"].value, Expression)
    (found,) = migrate("if x; then N=1; else N=2; fi\nvllm serve m --max-num-seqs $N").launches
    assert found.unchecked == ("--max-num-seqs",)


def test_a_script_in_single_quotes() -> None:
    new = migrate("""sh -c 'vllm serve m --device neuron --override-neuron-config "{}" --port $PORT'""").new
    assert new == "sh -c 'vllm serve m --port $PORT'"


@pytest.mark.parametrize("text", ['echo "vllm serve m --device neuron"', "logger 'now: vllm serve m'"])
def test_texts_that_only_speak_of_a_launch(text: str) -> None:
    found = migrate(f"{text}\nvllm serve m --device neuron")
    assert found.new == f"{text}\nvllm serve m" and len(found.launches) == 1


def test_a_variable_that_grows() -> None:
    launch = only('F="--max-num-seqs 4"\nF+=" --port 1"\nvllm serve m $F --device neuron')
    assert {name: option.value for name, option in launch.options.items()} == {
        "model": "m", "max_num_seqs": "4", "port": "1", "device": "neuron"}  # fmt: skip


def test_flags_of_docker_are_variables() -> None:
    text = "docker run -e VLLM_NEURON_FRAMEWORK=x --env HF_HOME=/m image vllm serve m --device neuron"
    assert only(text).environment["VLLM_NEURON_FRAMEWORK"] == "x"
    assert migrate(text).new == "docker run --env HF_HOME=/m image vllm serve m"


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--block_size 128", "block_size", "128"),
        ("--block-size=128", "block_size", "128"),
        ("-tp 8", "tensor_parallel_size", "8"),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enable-lora", "enable_lora", True),
        ("--lora-modules a=b c=d", "lora_modules", ("a=b", "c=d")),
        ("-—max-num-seqs 1", "max_num_seqs", "1"),
        ("--seed -1", "seed", "-1"),
        ("--port 1 --port 2", "port", "2"),
    ],
)
def test_flags(flags: str, name: str, value: object) -> None:
    assert options(f"vllm serve m {flags}")[name] == value


def test_python_in_every_spelling() -> None:
    text = """import os
from vllm import LLM
os.environ.setdefault("VLLM_NEURON_FRAMEWORK", "x")
config = dict(context_encoding_buckets=[128, 256], token_generation_buckets=sizes())
size = -1
args = AsyncEngineArgs("m", seed=size, override_neuron_config=config, **more)
"""
    found = migrate(text)
    old = found.launches[0].old
    assert old.program == "AsyncEngineArgs" and old.options["seed"].value == -1
    assert old.environment == {"VLLM_NEURON_FRAMEWORK": "x"}
    assert found.new.splitlines()[2:] == [
        "config = dict(context_encoding_buckets=[128, 256], token_generation_buckets=sizes())",
        "size = -1",
        'args = AsyncEngineArgs("m", seed=size, additional_config={"neuron_config": '
        '{"num_batched_tokens_buckets": [128, 256]}}, **more)',
    ]
    (row,) = (row for row in found.open_rows if row.old.startswith("token_generation_buckets"))
    assert "only known when the launch runs" in row.reason


def test_python_stays_python() -> None:
    text = (
        'if True:\n    x = LLM(\n        "é", device="neuron",\n        override_neuron_config={"seq_len": N},\n    )\n'
    )
    new = migrate(text).new
    assert new == 'if True:\n    x = LLM(\n        "é",\n        max_model_len=N,\n    )\n'
    compile(new, "new", "exec")


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        ('def f():\n    os.environ["VLLM_NEURON_FRAMEWORK"] = "x"\n', "def f():\n    pass\n"),
        ('import os; os.environ["VLLM_NEURON_FRAMEWORK"] = "x"; a = 1\n', "import os; pass; a = 1\n"),
        ('os.environ["VLLM_NEURON_FRAMEWORK"] = "x"\n', ""),
    ],
)
def test_python_without_a_statement_is_still_python(statement: str, left: str) -> None:
    new = migrate(f'{statement}LLM("m", device="neuron")\n').new
    assert new == f'{left}LLM("m")\n'
    compile(new, "new", "exec")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ('"enable_bucketing": flag', "enable_bucketing"),
        ('"text_config": build()', "text_config"),
        ('"vision_config": build()', "vision_config"),
        ('"on_device_sampling_config": build()', "on_device_sampling_config"),
        ('"on_device_sampling_config": {"do_sample": flag}', "do_sample"),
        ('"quantized": flag', "quantized"),
    ],
)
def test_values_that_only_python_knows_need_a_person(field: str, name: str) -> None:
    rows = migrate(f'LLM("m", max_model_len=512, max_num_seqs=4, override_neuron_config={{{field}}})').open_rows
    assert [row.old.split(":")[0] for row in rows if row.place != "check"] == [name]


@pytest.mark.parametrize("config", ["build()", '{"override_neuron_config": build()}', '{"neuron_config": build()}'])
def test_groups_that_only_python_knows_need_a_person(config: str) -> None:
    found = migrate(f'LLM("m", additional_config={config})')
    (row,) = found.open_rows
    assert row.verdict is Verdict.DECIDE and "cannot be read" in row.reason
    assert "override_neuron_config" not in found.new


def test_lengths_that_only_python_knows_go_over() -> None:
    new = migrate('LLM("m", override_neuron_config={"seq_len": N, "num_seqs_buckets": sizes})').new
    assert new == 'LLM("m", max_model_len=N, additional_config={"neuron_config": {"num_seqs_buckets": sizes}})'


def test_a_dockerfile_with_a_shell_form() -> None:
    text = (
        "FROM base\nENV VLLM_NEURON_FRAMEWORK x\nENTRYPOINT vllm serve m \\\n    --device neuron --port ${PORT:-80}\n"
    )
    assert migrate(text).new == "FROM base\nENTRYPOINT vllm serve m \\\n    --port ${PORT:-80}\n"


def test_a_dockerfile_with_a_script() -> None:
    text = 'FROM base\nCMD ["sh", "-c", "exec vllm serve $MODEL --device neuron"]\n'
    assert migrate(text).new == 'FROM base\nCMD ["sh", "-c", "exec vllm serve $MODEL"]\n'


def test_a_manifest_stays_valid() -> None:
    text = """containers:
- name: a
  command: [python, -m, vllm.entrypoints.openai.api_server]
  args: ["--model", "m", "--device", "neuron", "--max-num-seqs", "4", "--seed=$(SEED)"]
  env:
  - {name: VLLM_NEURON_FRAMEWORK, value: x}
  - name: HF_HOME
    value: /m
"""
    new = yaml.safe_load(migrate(text, "a.yaml").new)
    assert new["containers"][0] == {
        "name": "a",
        "command": ["python", "-m", "vllm.entrypoints.openai.api_server"],
        "args": ["--model=m", "--max-num-seqs=4", "--seed=$(SEED)"],
        "env": [{"name": "HF_HOME", "value": "/m"}],
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[{name: VLLM_USE_V1, value: '1'}, {name: A, value: b}, {name: VLLM_NEURON_FRAMEWORK, value: x}]",
         [{"name": "A", "value": "b"}]),
        ("{VLLM_USE_V1: 1, A: b}", {"A": "b"}),
        ("[VLLM_USE_V1=1]", []),
    ],
)  # fmt: skip
def test_variables_on_one_line_of_a_manifest(old: str, new: object) -> None:
    text = f"command: [vllm, serve, m]\nenv: {old}\n"
    assert yaml.safe_load(migrate(text).new) == {"command": ["vllm", "serve", "m"], "env": new}


def test_numbers_in_a_manifest_stay_text() -> None:
    words = ("vllm", "serve", "m", "--device", "neuron", "--max-num-seqs", "'4'", "--served-model-name", "'yes'")
    text = "command:\n" + "".join(f"- {word}\n" for word in words)
    new = yaml.safe_load(migrate(text).new)
    assert new["command"] == ["vllm", "serve", "m", "--max-num-seqs", "4", "--served-model-name", "yes"]


def test_overrides_become_flags() -> None:
    text = json.dumps({"tp-degree": 8, "context_encoding_buckets": [128]})
    first, second = migrate(text).new.splitlines()
    assert first == "--tensor-parallel-size 8 \\"
    assert second == """--additional-config '{"neuron_config": {"num_batched_tokens_buckets": [128]}}'"""


@pytest.mark.parametrize("text", ["echo hello", "", "x = LLM", "services:\n  a:\n    command: nginx\n", "vllm bench m"])
def test_texts_that_start_nothing(text: str) -> None:
    with pytest.raises(LaunchError, match="Nothing here starts vLLM"):
        migrate(text)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def (", "run.py", "not Python: line 1"),
        ("a: [", "a.yaml", "not YAML"),
        ("{nonsense", "", "not a JSON object"),
    ],
)
def test_texts_that_cannot_be_read(text: str, name: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        migrate(text, name)


@settings(max_examples=40)
@given(st.text(max_size=80))
def test_no_text_crashes(text: str) -> None:
    for candidate in (text, f"vllm serve m {text}", f"vllm serve m --override-neuron-config '{text}'"):
        with suppress(LaunchError):
            migrate(candidate)


def test_a_settings_dictionary_that_cannot_be_read_needs_a_person() -> None:
    found = migrate('vllm serve m --override-neuron-config "$(cat config.json)" --port 1')
    (row,) = found.open_rows
    assert row.old == "--override-neuron-config" and "as JSON" in row.reason
    assert found.new == "vllm serve m --port 1"


def test_a_change_that_changes_nothing_leaves_a_command_alone() -> None:
    text = "vllm serve m --port 1  # here\n"
    assert shell.rewrite(text, lambda launch: launch) == text
