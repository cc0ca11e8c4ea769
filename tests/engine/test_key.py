"""What changes a cache key, and what must not."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.fixtures import SMALL, StandInRoute, config, tiny_model
from vllm_neuron.compilation import key
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.compilation.key import graph_key, host_target, module_digest, source_digest, trace_fingerprint
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.compiler import GraphCompiler
from vllm_neuron.engine.graphs import GraphSpec, list_graphs
from vllm_neuron.kernels.dispatch import KernelSet
from vllm_neuron.models.model import Model
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.xla import XlaRoute

BASE: dict[str, Any] = {
    "text": "graph",
    "arguments": ("ids: int32[8] stride [1]",),
    "route": "neuron_native",
    "target": "x86",
    "versions": {"torch": "2.9.1"},
    "parallel": {"tensor": 1},
}


def digest(**changes: Any) -> str:
    return graph_key(**{**BASE, **changes}).digest


@pytest.mark.parametrize(
    "change",
    [
        {"text": "graph2"},
        {"arguments": ("ids: int32[8] stride [2]",)},
        {"arguments": ("ids: int64[8] stride [1]",)},
        {"arguments": ("ids: int32[16] stride [1]",)},
        {"route": "vllm_neuron"},
        {"versions": {"torch": "2.9.2"}},
        {"versions": {"torch": "2.9.1", "jax": "1"}},
        {"target": "trn2"},
        {"parallel": {"tensor": 2}},
        {"flags": ("-O1",)},
        {"modules": ("vllm_neuron.routes.capture",)},
        {"kernel_packages": ("vllm_neuron.kernels.cpu",)},
    ],
)
def test_each_part_changes_the_key(change: dict[str, Any]) -> None:
    assert digest(**change) != digest()


def test_order_of_versions_and_flags_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert digest(versions={"a": "1", "b": "2"}) == digest(versions={"b": "2", "a": "1"})
    assert digest(flags=("-O1", "--lnc=2")) == digest(flags=("--lnc=2", "-O1"))
    monkeypatch.setenv("XLA_FLAGS", "--a --b")
    with_flags = digest()
    monkeypatch.setenv("XLA_FLAGS", "--b  --a")
    assert digest() == with_flags
    monkeypatch.delenv("XLA_FLAGS")
    assert digest() != with_flags


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--optlevel 1 --lnc 2", "--optlevel 2 --lnc 1"),
        ("--optlevel=1 --optlevel=2", "--optlevel=2 --optlevel=1"),
        ("-O1", "-O2"),
        ("", "-O2"),
    ],
)
def test_flags_that_mean_something_else_change_the_key(monkeypatch: pytest.MonkeyPatch, one: str, other: str) -> None:
    digests = set()
    for flags in (one, other):
        monkeypatch.setenv("NEURON_CC_FLAGS", flags)
        digests.add(digest())
    assert len(digests) == 2


def test_sources_of_kernels_and_lowering_change_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bodies do not stand in the graph's text."""
    digests = set()
    for number, body in enumerate(("x = 1", "x = 2", "x = 2")):
        folder = tmp_path / str(number)
        (folder / "some_kernels").mkdir(parents=True)
        (folder / "some_kernels" / "__init__.py").write_text(body)
        (folder / "some_lowering.py").write_text(body)
        monkeypatch.syspath_prepend(str(folder))
        source_digest.cache_clear()
        module_digest.cache_clear()
        digests.add((digest(kernel_packages=("some_kernels",)), digest(modules=("some_lowering",))))
    assert len({kernels for kernels, _ in digests}) == 2
    assert len({lowering for _, lowering in digests}) == 2


def test_every_module_of_the_routes_is_part_of_a_key() -> None:
    """Those that no route lists are interfaces, or are read by every trace fingerprint anyway."""
    listed = {*NativeRoute.modules, *XlaRoute.modules}
    folder = Path(find_spec("vllm_neuron.routes").submodule_search_locations[0])  # type: ignore[union-attr, index]
    found = {f"vllm_neuron.routes.{path.stem}" for path in folder.glob("*.py")}
    others = ("__init__", "blob", "compile_only", "route", "select")
    assert found - listed == {f"vllm_neuron.routes.{name}" for name in others}


def test_source_digest_sees_content_and_names_but_no_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for number, (folder, files) in enumerate(
        [
            ("here", {"kernel.cpp": "int x;", "__init__.py": ""}),
            ("there", {"kernel.cpp": "int x;", "__init__.py": "", "kernel.so": "binary"}),
            ("edited", {"kernel.cpp": "int y;", "__init__.py": ""}),
            ("renamed", {"kernel2.cpp": "int x;", "__init__.py": ""}),
        ]
    ):
        package = tmp_path / folder / f"sources_{number}"
        package.mkdir(parents=True)
        for name, content in files.items():
            (package / name).write_text(content)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        digests.append(source_digest((f"sources_{number}",)))
    here, there, edited, renamed = digests
    assert here == there
    assert len({here, edited, renamed}) == 3


def keys_and_fingerprints() -> list[str | None]:
    """Of every graph of a small model, whatever is edited meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("source_digest", "module_digest"):
            patch.setattr(key, name, lambda names: "the same")
        route = StandInRoute()
        compiler = GraphCompiler(
            tiny_model(), SMALL, route, CompileCache(CacheFolders(), route.name), torch.float32, 40
        )
        graphs = list_graphs(SMALL)
        keys = [compiler.key(compiler.lower(graph)).digest for graph in graphs]
        return [*keys, *(compiler.fingerprint(graph) for graph in graphs)]


def test_keys_are_equal_in_other_processes_folders_and_hash_seeds(tmp_path: Path) -> None:
    here = keys_and_fingerprints()
    assert None not in here and len(set(here)) == 2 * len(list_graphs(SMALL))
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        "HOME": str(tmp_path),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "VLLM_PORT": "1",
    }
    program = "import json; from tests.engine import test_key as t; print(json.dumps(t.keys_and_fingerprints()))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == here


def _fingerprint(
    model: Model | None = None,
    resolved: ResolvedConfig | None = None,
    graph: GraphSpec | None = None,
    version: str = "1",
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 40,
) -> str | None:
    route = StandInRoute(version)
    resolved = resolved or config()
    cache = CompileCache(CacheFolders(), route.name)
    compiler = GraphCompiler(model or tiny_model(), resolved, route, cache, dtype, num_blocks)
    return compiler.fingerprint(graph or GraphSpec("decode", 1, 1, 128))


def test_fingerprint_sees_everything_that_tracing_reads() -> None:
    same = _fingerprint()
    assert same is not None
    assert same == _fingerprint()
    variants = [
        _fingerprint(tiny_model(rms_norm_eps=1e-6)),
        _fingerprint(tiny_model(num_hidden_layers=3)),
        _fingerprint(tiny_model(vocab_size=97)),
        _fingerprint(tiny_model(num_key_value_heads=4)),
        _fingerprint(tiny_model(attention_bias=True)),
        _fingerprint(tiny_model(tie_word_embeddings=True)),
        _fingerprint(resolved=config(block_size=32)),
        _fingerprint(resolved=config(disable_nki_kernels=False)),
        _fingerprint(graph=GraphSpec("decode", 2, 2, 128)),
        _fingerprint(graph=GraphSpec("decode", 1, 1, 256)),
        _fingerprint(graph=GraphSpec("prefill", 1, 1, 128)),
        _fingerprint(version="2"),
        _fingerprint(dtype=torch.bfloat16),
        _fingerprint(num_blocks=41),
    ]
    assert len({same, *variants}) == 1 + len(variants)


def test_constants_are_arguments_so_their_values_do_not_count() -> None:
    assert _fingerprint(tiny_model(rope_theta=10000.0)) == _fingerprint(tiny_model(rope_theta=500000.0))


def _captures(value: float) -> object:
    return lambda x: x * value


class _Opaque:
    pass


@pytest.mark.parametrize("value", [_captures(1.0), _Opaque(), partial(_captures(1.0)), {"a": [_Opaque()]}, len])
def test_what_cannot_be_described_has_no_fingerprint(value: object) -> None:
    assert trace_fingerprint("r", {}, "x", value) is None


def test_what_can_be_described_is_told_apart() -> None:
    values = [None, 1, 1.0, "1", True, KernelSet.CPU, KernelSet.TORCH, (1,), [1], torch.float32, torch.zeros(1)]
    values += [torch.zeros(2), torch.zeros(1, dtype=torch.int32), torch.zeros(4, 4).T, torch.zeros(4, 4), {"a": 1}]
    prints = [trace_fingerprint("r", {}, "x", value) for value in values]
    assert None not in prints
    assert len(set(prints)) == len(values)


def test_host_target_names_the_machine() -> None:
    assert host_target() == host_target()
    assert os.uname().machine in host_target()
