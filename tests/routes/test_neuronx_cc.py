"""CPU compile mode of the XLA route, with a stand-in for Neuron's compiler."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.engine.fixtures import NUM_BLOCKS, SMALL, config, tiny_model
from tests.routes import xla_steps
from tests.routes.neuronx_cc_stand_in import BEHAVIOUR, VERSION, StandIn, install, on_path, parsed
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.compilation.pool import JobFailedError
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.compiler import GraphCompiler
from vllm_neuron.engine.graphs import list_graphs
from vllm_neuron.engine.precompile import precompiled
from vllm_neuron.routes import neuronx_cc
from vllm_neuron.routes.neuronx_cc import CompilerError, compile_hlo
from vllm_neuron.routes.route import CPU, Target
from vllm_neuron.routes.xla import XlaLowered, XlaRoute
from vllm_neuron.routes.xla_pjrt import Client

TRN2 = Target("trn2", compile_only=True)
ROUTE = XlaRoute(TRN2)
FLAGS = ["--target=trn2", "--model-type=transformer", "--auto-cast=none", "--logical-nc-config=2", "--optlevel=1"]
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 6e-2}}
COMPILE_ONLY = {"backend": "vllm_neuron", "cpu_mode": False, "cpu_compile": True, "platform_target": "trn2"}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BEHAVIOUR, "NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    (tmp_path / "bin").mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    return on_path(tmp_path / "bin", monkeypatch)


def test_command_line_is_that_of_the_documentation(stand_in: StandIn, tmp_path: Path) -> None:
    assert compile_hlo("decode_b1", b"module", "trn2").startswith(b"NEFF ")
    (call,) = stand_in.calls()
    expected = ["compile", "decode_b1.hlo_module.pb", "--framework=XLA", *FLAGS, "--output=decode_b1.neff"]
    assert call.arguments == expected
    assert stand_in.hlo("decode_b1") == b"module"
    assert not list((tmp_path / "scratch").iterdir()), "nothing is left behind"


def test_flags_of_the_environment_come_last_so_that_they_win(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--optlevel 3 --internal='a b'")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    compile_hlo("g", b"module", "trn3")
    (call,) = stand_in.calls()
    assert call.arguments[3:] == [
        "--target=trn3",
        *FLAGS[1:3],
        "--logical-nc-config=1",
        "--optlevel=1",
        "--optlevel",
        "3",
        "--internal=a b",
        "--output=g.neff",
    ]


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ("exit 70", "failed with exit code 70"),
        ("signal 9", "was ended by SIGKILL (by hand, or for lack of memory)"),
        ("signal 11", "was ended by SIGSEGV"),
        ("no neff", "has written no NEFF, though it reports success"),
    ],
)
def test_a_failure_names_graph_cause_command_and_last_lines(
    behaviour: str,
    cause: str,
    stand_in: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(BEHAVIOUR, behaviour)
    with pytest.raises(CompilerError) as raised:
        compile_hlo("decode_b1", b"module", "trn2")
    first, second, *lines = str(raised.value).splitlines()
    assert first.startswith(f"neuronx-cc {cause} on graph decode_b1: {stand_in.folder}/neuronx-cc compile ")
    assert "--target=trn2" in first and "--output=decode_b1.neff" in first
    assert "last 20 lines" in second
    assert lines == [f"line {number} about decode_b1" for number in range(10, 30)]
    printed = capfd.readouterr().err
    assert printed.startswith("+ ") and all(f"line {number} about" in printed for number in range(30))
    assert not list((tmp_path / "scratch").iterdir())


def test_a_missing_compiler_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    probe = ROUTE.probe()
    assert not probe.works
    for part in ("there is no neuronx-cc", "on PATH", "extra `neuron`", "empty placeholder"):
        assert part in probe.reason
    assert probe.versions["neuronx-cc"] == "absent"
    with pytest.raises(CompilerError, match="g cannot be compiled: there is no neuronx-cc"):
        compile_hlo("g", b"module", "trn2")


def test_probe_names_the_compiler_and_its_version(stand_in: StandIn) -> None:
    probe = ROUTE.probe()
    assert probe.works, probe.reason
    assert f"{stand_in.folder}/neuronx-cc compiles for trn2" in probe.reason
    assert probe.versions["neuronx-cc"] == VERSION


def test_a_bad_core_configuration_is_named(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "4")
    assert "NEURON_LOGICAL_NC_CONFIG='4': must be 1 or 2" in ROUTE.probe().reason


@pytest.mark.parametrize(("body", "words"), [("exit 3", "exit status 3"), ("echo neuron", "names no version")])
def test_a_compiler_that_does_not_tell_its_version_is_refused(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = tmp_path / "neuronx-cc"
    executable.write_text(f"#!/bin/sh\n{body}\n")
    executable.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    probe = ROUTE.probe()
    assert not probe.works
    assert f"{executable} --version" in probe.reason and words in probe.reason


HANGS = """
import sys
from vllm_neuron.routes.neuronx_cc import compile_hlo
compile_hlo("g", b"module", "trn2")
"""


def test_the_compiler_ends_with_the_process_group_of_its_caller(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BEHAVIOUR, "hang")
    with subprocess.Popen([sys.executable, "-c", HANGS], start_new_session=True, stderr=subprocess.DEVNULL) as caller:
        deadline = time.monotonic() + 60
        while not stand_in.calls() and time.monotonic() < deadline:
            time.sleep(0.05)
        (call,) = stand_in.calls()
        assert os.getpgid(call.pid) == caller.pid
        os.killpg(caller.pid, signal.SIGKILL)
    wait_until_gone(call.pid)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the compiler is still there"
        time.sleep(0.05)


# The route


def lowered(rows: int, dtype: torch.dtype = torch.bfloat16) -> XlaLowered:
    return xla_steps.lowered(rows, dtype, 8, target=TRN2)


def entry(text: str) -> tuple[list[str], list[str], dict[int, int]]:
    """Parameters and results of a module, and which result each aliased parameter becomes."""
    layout = re.search(r"entry_computation_layout=\{\((.*)\)->\(?(.*?)\)?\}$", text.splitlines()[0])
    assert layout
    parameters, results = (re.findall(r"\w+\[[\d,]*\]", part) for part in layout.groups())
    aliases = {int(p): int(r) for r, p in re.findall(r"\{(\d+)\}: \((\d+), \{\}, may-alias\)", text.splitlines()[0])}
    return parameters, results, aliases


@pytest.mark.parametrize("rows", [1, 4])
def test_hlo_that_reaches_the_compiler(rows: int, stand_in: StandIn) -> None:
    graph = lowered(rows)
    graph.compile()
    text = parsed(stand_in.hlo("tiny"))
    parameters, results, aliases = entry(text)
    kv, x = "bf16[8,16,2,8]", f"bf16[{rows},16]"
    assert sorted(parameters) == sorted([*[kv] * 4, "bf16[16,16]", "bf16[16,16]", x, f"s32[{rows}]"])
    assert results == [x, f"f32[{rows},16]", kv, kv, kv, kv]
    # Weights unused, first and tied come first: the KV cache is arguments 3 to 6.
    assert aliases == {graph.signature.parameters.index(3 + index): 2 + index for index in range(4)}
    assert text.count("scatter(") == 4
    assert f"s64[{rows}]" in text and "s16[" not in text, "rows are written once, as numbers"
    assert not re.search(r"f32\[16,16\]", text), "no weight is widened"


def test_what_comes_out_can_be_saved_and_loaded_and_says_why_it_cannot_run(stand_in: StandIn) -> None:
    executable = lowered(1).compile()
    for one in (executable, ROUTE.load(executable.save())):
        assert one.name == "tiny"
        with pytest.raises(RuntimeError, match=r"tiny is compiled for trn2, and this machine only compiles"):
            one({}, (), ())
        assert b"NEFF " in one.save()
    with pytest.raises(ValueError, match="compiled for"):
        XlaRoute(Target("trn3", compile_only=True)).load(executable.save())
    with pytest.raises(ValueError, match="compiled for"):
        XlaRoute(CPU).load(executable.save())
    with pytest.raises(RuntimeError, match=r"not supported yet: running tiny .* vllm-neuron cache rm"):
        XlaRoute(Target("trn2")).load(executable.save())


def test_nothing_is_placed_or_allocated() -> None:
    for call in (
        lambda: ROUTE.place_weights({"w": torch.ones(1)}),
        lambda: ROUTE.allocate_kv_cache([(1, 1)], torch.float32),
    ):
        with pytest.raises(RuntimeError, match="There is no device here: VLLM_NEURON_CPU_COMPILE=1"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4])
def test_lowering_for_neuron_computes_the_step(rows: int, dtype: torch.dtype) -> None:
    """Neuron's compiler is not here, but XLA's for the CPU understands the same module."""
    graph, client = lowered(rows, dtype), Client.get("cpu")
    program = client.compile(graph.text())
    weights, inputs = xla_steps.weights(dtype), xla_steps.inputs(rows, dtype)
    caches = [torch.zeros(xla_steps.cache_shape(8), dtype=dtype) for _ in range(4)]
    flat = [*weights.values(), *(cache.clone() for cache in caches), *inputs]
    found = [client.fetch(a) for a in program([client.put(flat[index]) for index in graph.signature.parameters])]
    outputs, new = xla_steps.step(weights, list(zip(caches[::2], caches[1::2], strict=True)), inputs)
    expected = [outputs["sum"], outputs["tied"], *(half for pair in new for half in pair)]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
def test_a_zeroed_cache_of_any_dtype(dtype: torch.dtype) -> None:
    client = Client.get("cpu")
    zeros = client.fetch(client.zeros_program((2, 3), dtype)([])[0])
    assert zeros.dtype == dtype and zeros.shape == (2, 3) and not zeros.any()


# The engine


def compiler(
    tmp_path: Path, resolved: ResolvedConfig | None = None, target: Target = TRN2, dtype: torch.dtype = torch.bfloat16
) -> GraphCompiler:
    resolved = resolved or config(**{**vars(SMALL), **COMPILE_ONLY})
    cache = CompileCache(CacheFolders(local=tmp_path / "cache"), "vllm_neuron")
    return GraphCompiler(tiny_model(), resolved, XlaRoute(target), cache, dtype, NUM_BLOCKS)


def test_every_graph_of_a_model_is_compiled_once_and_kept(stand_in: StandIn, tmp_path: Path) -> None:
    graphs = list_graphs(SMALL)
    first = [compiler(tmp_path).compile(graph) for graph in graphs]
    assert [one.source for one in first] == ["compiled"] * 3
    assert [call.graph for call in stand_in.calls()] == [graph.name for graph in graphs]
    again = [compiler(tmp_path).compile(graph) for graph in graphs]
    assert [one.source for one in again] == ["local"] * 3
    assert [one.executable.save() for one in again] == [one.executable.save() for one in first]
    assert len(stand_in.calls()) == 3

    parts = first[0].manifest.parts
    assert parts["target"] == "trn2" and set(FLAGS) <= set(parts["flags"])
    assert parts["versions"]["neuronx-cc"] == VERSION
    for graph in graphs:
        parameters, results, aliases = entry(parsed(stand_in.hlo(graph.name)))
        cached = [f"bf16[{NUM_BLOCKS},16,2,8]"] * (4 if graph.context else 0)
        assert [parameters[index] for index in aliases] == cached == [results[index] for index in aliases.values()]


def test_a_graph_has_the_same_key_as_on_a_device_and_another_for_another_target(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = list_graphs(SMALL)[-1]

    def key(target: Target) -> tuple[str, str | None]:
        made = compiler(tmp_path, target=target)
        return made.key(made.lower(graph)).digest, made.fingerprint(graph)

    here = key(TRN2)
    assert key(Target("trn2")) == here
    others = [key(Target("trn3", compile_only=True)), key(CPU)]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    others.append(key(TRN2))
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--optlevel=2")
    others.append(key(TRN2))
    assert len({here, *others}) == 5
    assert len({fingerprint for _, fingerprint in (here, *others)}) == 5


def test_a_failure_leaves_no_entry_and_the_next_run_goes_on(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = list_graphs(SMALL)
    monkeypatch.setenv(BEHAVIOUR, f"{graphs[1].name}: exit 70")
    compiler(tmp_path).compile(graphs[0])
    with pytest.raises(CompilerError, match=f"exit code 70 on graph {graphs[1].name}"):
        compiler(tmp_path).compile(graphs[1])
    monkeypatch.delenv(BEHAVIOUR)
    assert [compiler(tmp_path).compile(graph).source for graph in graphs] == ["local", "compiled", "compiled"]


def test_a_compiler_that_hangs_is_ended_in_time(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BEHAVIOUR, "hang")
    made = compiler(tmp_path, config(**{**vars(SMALL), **COMPILE_ONLY, "compile_timeout": 20}))
    graph = list_graphs(SMALL)[-1]
    with (
        pytest.raises(JobFailedError, match=rf"(?s){graph.name}.*_TIMEOUT=20 s"),
        precompiled(made, [graph], lambda ready: None),
    ):
        pass
    (call,) = stand_in.calls()
    wait_until_gone(call.pid)
    assert not made.is_cached(graph)


def test_a_stand_in_beside_python_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("environment", "elsewhere"):
        (tmp_path / name).mkdir()
        install(tmp_path / name)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert neuronx_cc.find() == tmp_path / "environment" / "neuronx-cc"
