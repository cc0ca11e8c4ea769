"""What changes a cache key, and what must not."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.engine.fixtures import SMALL, StandInRoute, config, tiny_model
from vllm_neuron.compilation import key as key_module
from vllm_neuron.compilation.cache import CompileCache
from vllm_neuron.compilation.key import graph_key, host_target, source_digest, trace_fingerprint
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.compiler import GraphCompiler
from vllm_neuron.engine.graphs import GraphSpec, list_graphs
from vllm_neuron.kernels.dispatch import KernelSet
from vllm_neuron.models.model import Model

BASE = {"text": "graph", "route": "neuron_native", "versions": {"torch": "2.9.1"}, "target": "x86"}


@pytest.mark.parametrize(
    "change",
    [
        {"text": "graph2"},
        {"route": "vllm_neuron"},
        {"versions": {"torch": "2.9.2"}},
        {"versions": {"torch": "2.9.1", "jax": "1"}},
        {"target": "arm"},
    ],
)
def test_each_part_changes_the_key(change: dict[str, object]) -> None:
    assert graph_key(**{**BASE, **change}) != graph_key(**BASE)


def test_order_of_versions_and_flags_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    one = graph_key("t", "r", {"a": "1", "b": "2"}, "x")
    assert one == graph_key("t", "r", {"b": "2", "a": "1"}, "x")
    monkeypatch.setenv("XLA_FLAGS", "--a --b")
    with_flags = graph_key("t", "r", {"a": "1", "b": "2"}, "x")
    assert with_flags != one
    monkeypatch.setenv("XLA_FLAGS", "--b  --a")
    assert graph_key("t", "r", {"a": "1", "b": "2"}, "x") == with_flags


def test_kernel_sources_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = graph_key(**BASE)
    monkeypatch.setattr(key_module, "source_digest", lambda packages: "other")
    assert graph_key(**BASE) != before


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


def _keys_in_a_new_process(folder: Path, hash_seed: str) -> str:
    program = """
import torch
from tests.engine.fixtures import SMALL, StandInRoute, tiny_model
from vllm_neuron.compilation import key
from vllm_neuron.compilation.cache import CompileCache
from vllm_neuron.compilation.key import graph_key, host_target
from vllm_neuron.engine.compiler import GraphCompiler
from vllm_neuron.engine.graphs import list_graphs
key.source_digest = lambda packages: "whatever is edited meanwhile"
route = StandInRoute()
compiler = GraphCompiler(tiny_model(), SMALL, route, CompileCache(None, route.name, {}), torch.float32, 40)
for graph in list_graphs(SMALL):
    print(graph_key(compiler.lower(graph).text(), route.name, route.versions(), host_target()))
    print(compiler.fingerprint(graph))
"""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(folder),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_PORT": hash_seed,
    }
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout


def test_keys_are_equal_in_other_processes_folders_and_hash_seeds(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = _keys_in_a_new_process(tmp_path / "a", "1")
    assert len(set(first.split())) == 2 * len(list_graphs(SMALL))
    assert "None" not in first
    assert first == _keys_in_a_new_process(tmp_path / "b", "2")


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
    cache = CompileCache(None, route.name, {})
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
