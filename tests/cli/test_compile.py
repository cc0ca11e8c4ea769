"""`vllm-neuron compile` in CPU mode, on a folder without weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.checkpoints import checkpoint
from vllm_neuron.cli.main import app

# The platform is chosen at the first import of vLLM in a process.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("VLLM_NEURON_CPU_MODE", "1")
    import vllm.platforms

    assert vllm.platforms.current_platform.is_out_of_tree()

SMALL = ("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "128")
GRAPHS = {"prefill_t128_ctx128", "decode_b2_ctx128", "decode_b1_ctx128", "prompt_logits_t128"}
GIB = 1 << 30


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing but config.json."""
    folder = tmp_path_factory.mktemp("no-weights")
    shutil.copy(checkpoint("llama") / "config.json", folder)
    return folder


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU mode with the torch form of every operation, which spares building kernels, and an empty cache."""
    for name in ("VLLM_NEURON_BACKEND", "NEURON_COMPILED_ARTIFACTS", "NEURON_LIBTORCH_REMOTE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))


@pytest.fixture
def another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, a machine whose local cache is empty."""

    def move() -> None:
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / f"cache-{len(list(tmp_path.iterdir()))}"))

    return move


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compile", *map(str, arguments)], catch_exceptions=False)


def last_line(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return str(result.stdout.splitlines()[-1])


def errors(result: Result) -> list[str]:
    """What was wrong; nothing else may have been printed as a result."""
    assert result.exit_code == 1
    assert result.stdout == "" and "Traceback" not in result.output
    lines = result.stderr.splitlines()
    assert all(line.startswith("Error: ") for line in lines), result.stderr
    return [line.removeprefix("Error: ") for line in lines]


def test_what_is_compiled_here_is_found_elsewhere(
    model: Path, tmp_path: Path, another_machine: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = tmp_path / "artifacts"
    first = run(model, *SMALL, "--output", artifacts)
    assert last_line(first) == "graphs: 4, compiled: 4, cached: 0"
    rows = {line.split()[0]: line.split() for line in first.stdout.splitlines() if "ctx128" in line or "_t128" in line}
    assert set(rows) == GRAPHS and {row[1] for row in rows.values()} == {"compiled"}
    keys = {path.name for path in (artifacts / "neuron_native").iterdir() if len(path.name) == 64}
    assert {key[:12] for key in keys} == {row[4] for row in rows.values()}

    another_machine()
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(artifacts))
    found = run(model, *SMALL, "--json")
    document = json.loads(found.stdout)
    assert (document["compiled"], document["cached"], document["folder"]) == (0, 4, str(artifacts))
    assert {graph["graph"] for graph in document["graphs"]} == GRAPHS
    assert {graph["source"] for graph in document["graphs"]} == {"artifacts"}
    assert {graph["key"] for graph in document["graphs"]} == keys
    assert all(graph["bytes"] > 0 and graph["seconds"] >= 0 for graph in document["graphs"])
    assert found.stderr.splitlines()[-1] == "graphs: 4, compiled: 0, cached: 4"


def test_the_command_line_of_a_server_can_be_used_as_it_is(model: Path, tmp_path: Path) -> None:
    buckets = {"neuron_config": {"num_batched_tokens_buckets": [128], "num_seqs_buckets": [2]}}
    limits = {"dtype": "float32", "max-model-len": 128, "max-num-seqs": 2, "max-num-batched-tokens": 128}
    first = run("--additional-config", json.dumps(buckets), *SMALL, model, "--port", 8123, "--api-key", "x")
    assert last_line(first) == "graphs: 3, compiled: 3, cached: 0"
    again = "graphs: 3, compiled: 0, cached: 3"
    dotted = [f"--additional-config.neuron_config.{name}={value}" for name, value in buckets["neuron_config"].items()]
    assert last_line(run(model, *SMALL, *dotted, "--served-model-name", "other")) == again
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({**limits, "additional-config": buckets, "host": "127.0.0.1"}))
    assert last_line(run(model, "--config", file)) == again


def test_builds_of_one_model_in_one_folder_are_told_apart(
    model: Path,
    tmp_path: Path,
    another_machine: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CCH-4: what is there for 2 and 4 requests is used for those, and 3 is refused in words."""
    artifacts = tmp_path / "artifacts"
    blocks = ("--num-gpu-blocks-override", 40)
    flags = {count: (model, *SMALL[:4], "--max-num-seqs", count, *SMALL[6:], *blocks) for count in (2, 3, 4)}
    assert last_line(run(*flags[2], "--output", artifacts)) == "graphs: 4, compiled: 4, cached: 0"
    assert last_line(run(*flags[4], "--output", artifacts)) == "graphs: 5, compiled: 1, cached: 4"

    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(artifacts))
    for count, graphs in ((4, 5), (2, 4)):
        another_machine()
        assert last_line(run(*flags[count])) == f"graphs: {graphs}, compiled: 0, cached: {graphs}"
    another_machine()
    (missing,) = errors(run(*flags[3]))
    for words in ("decode_b3_ctx128", "VLLM_NEURON_DISABLE_WARMUP_COMPILE=1", "nearest", "int32[3]", str(artifacts)):
        assert words in missing, words

    entries = {
        json.loads((path / "manifest.json").read_text())["graph"]: path
        for path in (artifacts / "neuron_native").iterdir()
        if len(path.name) == 64
    }
    one, other, aside = entries["decode_b2_ctx128"], entries["decode_b4_ctx128"], tmp_path / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    another_machine()
    refused = errors(run(*flags[4]))
    assert [fault.split()[1] for fault in refused] == ["decode_b4_ctx128", "decode_b2_ctx128"]
    assert f"{one}: it holds graph decode_b4_ctx128 of key {other.name}" in caplog.text
    assert f"{other}: it holds graph decode_b2_ctx128 of key {one.name}" in caplog.text


def test_stages_of_each_graph_are_saved_as_text(model: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    last_line(run(model, *SMALL, "--text", texts))
    assert {path.name for path in texts.iterdir()} == {
        f"{graph}.{stage}.txt" for graph in GRAPHS for stage in ("traced", "lowered")
    }
    traced, lowered = ((texts / f"decode_b2_ctx128.{stage}.txt").read_text() for stage in ("traced", "lowered"))
    assert "torch.ops.aten" in traced and "inputs.token_ids: int32[2]" in lowered
    assert traced != lowered, "the KV cache is donated when a graph is lowered"


def test_explain_says_what_a_key_is_made_of(model: Path) -> None:
    documents = [json.loads(run(model, *SMALL, "--json", *more).stdout) for more in ((), ("--block-size", "16"))]
    keys = [{graph["graph"]: graph["key"] for graph in document["graphs"]} for document in documents]
    key, other = (found["decode_b2_ctx128"] for found in keys)
    result = run("--explain", key[:10])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{key}: decode_b2_ctx128 of LlamaForCausalLM")
    for part in ("graph", "arguments", "route", "target", "parallel", "versions", "flags", "lowering", "kernels"):
        assert any(line.split()[:1] == [part] for line in result.stdout.splitlines()), part
    assert "tensor: 1" in result.stdout and "in all)" in result.stdout
    assert f"nearest other graph is decode_b2_ctx128 ({other[:12]})" in result.stdout
    document = json.loads(run("--explain", key, "--json").stdout)
    assert document["nearest"] == {"key": other, "graph": "decode_b2_ctx128"}
    assert document["parts"]["route"] == "neuron_native"
    assert any(line.startswith("arguments: kv_cache") for line in document["differences"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["abc"], "give 6 or more digits"),
        (["0123456789"], "no graph has such a key"),
        (["0123456789", "model"], "only takes --json"),
    ],
)
def test_explain_names_what_it_cannot_find(arguments: list[str], words: str) -> None:
    (fault,) = errors(run("--explain", *arguments))
    assert words in fault and "--explain" in fault


def test_a_size_that_follows_from_free_memory_is_pointed_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Note:" not in run(model, *SMALL).stdout, "the cache is as large as all requests need"
    monkeypatch.setenv("VLLM_NEURON_RESERVED_HEADROOM_GIB", "1")
    monkeypatch.setattr("vllm_neuron.plugin.memory.host_memory_available", lambda: 3 * GIB)
    found = run(model, *SMALL, "--json")
    document = json.loads(found.stdout)
    blocks = document["num_gpu_blocks"]
    assert len(document["notes"]) == 1 and f"--num-gpu-blocks-override {blocks}" in document["notes"][0]
    assert document["compiled"] == 3, "prompt_logits has no KV cache"
    # The serving machine has less memory; it is not asked, because it may not be this one.
    monkeypatch.setattr("vllm_neuron.plugin.memory.host_memory_available", lambda: GIB)
    served = run(model, *SMALL, "--num-gpu-blocks-override", blocks)
    assert last_line(served) == "graphs: 4, compiled: 0, cached: 4" and "Note:" not in served.stdout


def test_memory_for_the_weights_is_left_free(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_RESERVED_HEADROOM_GIB", "0")
    monkeypatch.setattr("vllm_neuron.plugin.memory.host_memory_available", lambda: 2 * GIB)
    monkeypatch.setattr("vllm_neuron.plugin.memory.weight_bytes", lambda model, dtype: 2 * GIB - 1000)
    (fault,) = errors(run(model, *SMALL))
    assert "KV cache budget below minimum threshold" in fault


FAULTS: dict[str, tuple[list[str], dict[str, str], list[list[str]]]] = {
    "an unknown flag": (["--max-model-length", "7"], {}, [["unrecognized arguments", "--max-model-length"]]),
    "a bad value": (["--max-num-seqs", "many"], {}, [["--max-num-seqs", "many"]]),
    "an absent --config file": (["--config", "absent.yaml"], {}, [["absent.yaml"]]),
    "several options": (
        ["--additional-config", '{"neuron_config": {"num_seqs_bucket": [1], "num_batched_tokens_buckets": [64]}}'],
        {"VLLM_NEURON_MIN_KV_BUDGET_GIB": "much"},
        [["num_seqs_bucket", "num_seqs_buckets"], ["num_batched_tokens_buckets"], ["VLLM_NEURON_MIN_KV_BUDGET_GIB"]],
    ),
    "a longer context than the model's": (["--max-model-len", "9999"], {}, [["max_model_len", "9999"]]),
    "no platform": ([], {"VLLM_NEURON_CPU_MODE": "0"}, [["VLLM_NEURON_CPU_COMPILE=1", "VLLM_NEURON_CPU_MODE=1"]]),
    "both modes": ([], {"VLLM_NEURON_CPU_COMPILE": "1"}, [["VLLM_NEURON_CPU_MODE=1", "VLLM_NEURON_CPU_COMPILE=1"]]),
    "no cache": ([], {"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"}, [["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1"]]),
    "two folders": (["--output", "a"], {"NEURON_COMPILED_ARTIFACTS": "b"}, [["--output=a", "ARTIFACTS=b"]]),
    "too few blocks": (["--num-gpu-blocks-override", "4"], {}, [["num_gpu_blocks_override=4"]]),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_are_named_in_a_line_each(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, variables, faults = FAULTS[what]
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = errors(run(model, *SMALL, *arguments))
    assert len(found) == len(faults), found
    for words in faults:
        assert any(all(word in line for word in words) for line in found), (words, found)
    assert not (tmp_path / "cache").exists() and not (tmp_path / "a").exists()


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    (fault,) = errors(run(*SMALL))
    assert "MODEL is missing" in fault
    (fault,) = errors(run(tmp_path / "absent", *SMALL))
    assert "absent" in fault


def test_a_folder_of_other_things_is_no_output(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    (fault,) = errors(run(model, *SMALL, "--output", tmp_path / "other"))
    assert "thesis.tex" in fault and str(tmp_path / "other") in fault


def test_graphs_that_cannot_be_kept_are_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_neuron.compilation.store import EntryStore

    def refuse(self: EntryStore, entry: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EntryStore, "write", refuse)
    (fault,) = errors(run(model, *SMALL, "--output", tmp_path / "artifacts"))
    assert "4 of 4 graphs could not be written to" in fault and "prefill_t128_ctx128" in fault
    assert "No space left on device" in caplog.text


def test_an_hbm_failure_of_the_compiler_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from tests.engine.fixtures import config
    from vllm_neuron.cli import compile as command
    from vllm_neuron.cli.errors import CommandError
    from vllm_neuron.routes.neuronx_cc import CompilerError

    def fail(*arguments: Any) -> None:
        raise CompilerError("neuronx-cc failed with exit code 70 on graph decode_b1\n[NCC_EOOM002] too large")

    settings = config(cpu_mode=False, kv_headroom_gib=4.0)
    compiler = SimpleNamespace(config=settings, compile=fail, load=lambda graph: None)
    monkeypatch.setattr(command, "prepare", lambda *arguments: SimpleNamespace(compiler=compiler))
    with pytest.raises(CommandError) as caught:
        command.run((), None, None)
    (told,) = caught.value.faults
    assert "exit code 70" in told and "export VLLM_NEURON_RESERVED_HEADROOM_GIB=5" in told
