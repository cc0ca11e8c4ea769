"""The table in docs/compile-cache.md: what changes a cache key and what does not, each row proved on a real graph.

python -m tests.engine.test_key_table      writes the table anew
"""

import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.fixtures import SMALL, tiny_model
from vllm_neuron.compilation import key as keys
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.compiler import GraphCompiler
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.models.fp8_cache import with_fp8_cache
from vllm_neuron.models.model import Model
from vllm_neuron.routes.route import CPU, Route
from vllm_neuron.routes.select import select_route

DOCUMENT = Path(__file__).parents[2] / "docs" / "compile-cache.md"
BEGIN, END = "<!-- key table: written by tests/engine/test_key_table.py -->\n", "<!-- end of key table -->\n"

DECODE = GraphSpec("decode", 1, 1, 256)
PREFILL = GraphSpec("prefill", 32, 1, 256)


@dataclass(frozen=True)
class Made:
    """What a key is made from; a row of the table changes one thing of it."""

    model: Model = field(default_factory=tiny_model)
    config: ResolvedConfig = field(default_factory=lambda: replace(SMALL, disable_nki_kernels=False))
    graph: GraphSpec = DECODE
    dtype: torch.dtype = torch.bfloat16
    num_blocks: int = 40
    target: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    def digest(self, backend: str = "neuron_native") -> str:
        route: Route = select_route(backend, CPU)
        if self.versions:
            route.versions = lambda: {**type(route).versions(route), **self.versions}  # type: ignore[method-assign]
        if self.flags:
            route.flags = lambda: self.flags  # type: ignore[method-assign]
        config = replace(self.config, backend=backend)
        cache = CompileCache(CacheFolders(), route.name)
        compiler = GraphCompiler(self.model, config, route, cache, self.dtype, self.num_blocks)
        if self.target:
            compiler._target = self.target
        return compiler.key(compiler.lower(self.graph)).digest


Patch = pytest.MonkeyPatch
Change = Callable[[Patch], Made]


def made(**changes: Any) -> Change:
    return lambda patch: Made(**changes)


def with_config(**changes: Any) -> Change:
    return lambda patch: Made(config=replace(SMALL, **{"disable_nki_kernels": False, **changes}))


def with_environment(**variables: str) -> Change:
    def change(patch: Patch) -> Made:
        for name, value in variables.items():
            patch.setenv(name, value)
        return Made()

    return change


def another_step(patch: Patch) -> Made:
    model = tiny_model()
    return Made(model=replace(model, logits=lambda weights, hidden: model.logits(weights, hidden) * 2))


def another_python(patch: Patch) -> Made:
    patch.setattr(platform, "python_version_tuple", lambda: ("3", "99", "0"))
    return Made()


def after_another_graph(patch: Patch) -> Made:
    Made(graph=PREFILL).digest()
    return Made()


def another_source(name: str, packages: tuple[str, ...]) -> Change:
    def change(patch: Patch) -> Made:
        original = getattr(keys, name)
        patch.setattr(keys, name, lambda names: "edited" if names == packages or not packages else original(names))
        return Made()

    return change


def another_folder(patch: Patch) -> Made:
    patch.setenv("HOME", "/somewhere/else")
    patch.setenv("VLLM_CACHE_ROOT", "/somewhere/else/cache")
    patch.setenv("NEURON_LIBTORCH_REMOTE_CACHE", "/somewhere/else/remote")
    patch.setenv("NEURON_COMPILED_ARTIFACTS", "/somewhere/else/artifacts")
    patch.chdir("/")
    return Made()


def another_host(patch: Patch) -> Made:
    patch.setattr(socket, "gethostname", lambda: "another-host")
    patch.setattr(platform, "node", lambda: "another-host")
    patch.setenv("HOSTNAME", "another-host")
    return Made()


def more_sources(patch: Patch) -> Made:
    """Edits of what only the host runs: nothing of it is asked for."""
    original = keys.source_digest

    def digest(packages: tuple[str, ...]) -> str:
        assert packages == ("vllm_neuron.kernels.cpu",), "the key reads sources that compiled code does not depend on"
        return original(packages)

    patch.setattr(keys, "source_digest", digest)
    return Made()


CHANGES: dict[str, Change] = {
    "version of the Neuron SDK: neuronx-cc": made(versions={"neuronx-cc": "9.9"}),
    "version of the Neuron SDK: torch-neuronx": made(versions={"torch-neuronx": "9.9"}),
    "version of the Neuron SDK: nki": made(versions={"nki": "9.9"}),
    "version of torch (and, on the XLA route, of torch-xla, jax, jaxlib)": made(versions={"torch": "9.9"}),
    "version of Python": lambda patch: (
        patch.setattr(platform, "python_version_tuple", lambda: ("3", "99", "0")),
        Made(),
    )[1],
    "model code that gives another graph": another_step,
    "layers, sizes, biases or norms of the model": lambda patch: Made(model=tiny_model(num_hidden_layers=1)),
    "constants in the graph, such as rms_norm_eps": lambda patch: Made(model=tiny_model(rms_norm_eps=1e-6)),
    "dtype of weights, activations and KV cache": made(dtype=torch.float32),
    "FP8 in the KV cache": lambda patch: Made(model=with_fp8_cache(tiny_model(), 448.0)),
    "token bucket": lambda patch: Made(graph=replace(PREFILL, tokens=16)),
    "batch bucket": lambda patch: Made(graph=GraphSpec("decode", 2, 2, 256)),
    "context bucket, and so max_model_len": lambda patch: Made(graph=replace(DECODE, context=128)),
    "block_size": with_config(block_size=32),
    "enable_prompt_embeds, of prefill graphs": lambda patch: Made(graph=replace(PREFILL, embeddings=True)),
    "number of KV blocks": made(num_blocks=41),
    "compiler flags, such as the optimisation level": made(flags=("-O2",)),
    "NEURON_CC_FLAGS": with_environment(NEURON_CC_FLAGS="-O2"),
    "XLA_FLAGS": with_environment(XLA_FLAGS="--xla_cpu_enable_fast_math=true"),
    "hardware target": made(target="trn3"),
    "tensor parallel degree": with_config(tensor_parallel_size=2),
    "compile route (VLLM_NEURON_BACKEND)": made(),
    "VLLM_NEURON_DISABLE_NKI_KERNELS": with_config(disable_nki_kernels=True),
    "NKI_SIMULATOR": with_config(nki_simulator=True),
    "sources of the kernels that the graph calls": another_source("source_digest", ("vllm_neuron.kernels.cpu",)),
    "sources of the route that lowers it": another_source("module_digest", ()),
}
"""What has to change a key."""

KEEPS: dict[str, Change] = {
    "values of weights and of constant tensors, such as rope_theta": lambda patch: Made(
        model=tiny_model(rope_theta=5e5)
    ),
    "VLLM_CACHE_ROOT, HOME, the working directory and every other path": another_folder,
    "ports": with_environment(VLLM_PORT="4711", MASTER_PORT="4712"),
    "log levels": with_environment(VLLM_NEURON_LOG_LEVEL="DEBUG", VLLM_LOGGING_LEVEL="DEBUG"),
    "host name": another_host,
    "order in which graphs are traced": after_another_graph,
    "order of compiler flags": made(),
    "sources of what only the host runs: scheduler, worker, sampler, CLI": more_sources,
    "sizes of other buckets": with_config(num_batched_tokens_buckets=(16, 32), num_seqs_buckets=(1, 2, 4)),
    "gpu_memory_utilization and the KV budget's variables, as long as the number of blocks is the same": with_config(
        gpu_memory_utilization=0.5, kv_headroom_gib=1.0, kv_minimum_gib=0.0
    ),
    "enable_prompt_embeds, of all other graphs": with_config(enable_prompt_embeds=True),
    "enable_prefix_caching": with_config(enable_prefix_caching=False),
    "compile workers and timeouts": with_config(compile_workers=4, compile_timeout=60),
}
"""What must not change a key. Hash seeds and new processes are in tests/engine/test_key.py."""


def base(what: str) -> Made:
    return Made(graph=PREFILL) if what in ("token bucket", "enable_prompt_embeds, of prefill graphs") else Made()


@pytest.mark.parametrize("what", CHANGES)
def test_changes_the_key(what: str, monkeypatch: Patch) -> None:
    before = base(what).digest()
    after = CHANGES[what](monkeypatch).digest("vllm_neuron" if "VLLM_NEURON_BACKEND" in what else "neuron_native")
    assert after != before


@pytest.mark.parametrize("what", KEEPS)
def test_keeps_the_key(what: str, monkeypatch: Patch) -> None:
    if what == "order of compiler flags":
        assert Made(flags=("-O1", "--lnc=2")).digest() == Made(flags=("--lnc=2", "-O1")).digest()
    assert KEEPS[what](monkeypatch).digest() == Made().digest()


def table() -> str:
    lines = ["| What | Changes the key |", "| --- | --- |"]
    lines += [f"| {what} | yes |" for what in CHANGES]
    lines += [f"| {what} | no |" for what in KEEPS]
    lines += ["| hash seed, another process | no |"]
    return BEGIN + "\n".join(lines) + "\n" + END


def test_the_document_shows_these_rows() -> None:
    text = DOCUMENT.read_text()
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == table(), f"python -m {__spec__.name}"


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text[: text.index(BEGIN)] + table() + text[text.index(END) + len(END) :])
