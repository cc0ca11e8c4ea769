"""Kernels in graphs: one opaque node each, with the results of the torch twins. NKI kernels run in the simulator."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.fixtures import SMALL
from tests.routes import native_steps as steps
from vllm_neuron.compilation import key as keys
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.engine.compiler import GraphCompiler
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kernels.nki_ops import NkiOptions
from vllm_neuron.kernels.simulator import Violation
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU, Lowered, Route
from vllm_neuron.routes.xla import XlaRoute
from vllm_neuron.sampling import SamplingInputs, sample

ROUTES: list[Route] = [NativeRoute(CPU), XlaRoute(CPU)]
SHAPES = [(2, 1), (1, 40)]
"""(requests, rows of each): few rows go to the decode attention kernel, many to the prefill one."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SPACE = "vllm_neuron_nki"
CPP = (KernelSet.CPU,)
every_route = pytest.mark.parametrize("route", ROUTES, ids=["native", "xla"])
every_kind = pytest.mark.parametrize("kernels", [KernelSet.NKI, KernelSet.CPU], ids=["nki", "cpp"])


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_SIMULATOR", "1")


def lowered(
    route: Route, step: Any, arguments: tuple[Any, Any, Any], sets: tuple[KernelSet, ...] = (KernelSet.NKI,)
) -> Lowered:
    with using(*sets, options=NkiOptions(in_place=route.name == "neuron_native")):
        return route.trace("step", step, *map(steps.to_meta, arguments)).lower()


def run_model(route: Route, sets: tuple[KernelSet, ...], shape: tuple[int, int], dtype: torch.dtype) -> list[Any]:
    """Logits and hidden states of two steps on one cache, and the cache's keys, after saving and loading the graph."""
    weights, inputs = steps.weights(dtype), steps.inputs(*shape)
    saved = lowered(route, steps.MODEL.step, (weights, steps.cache(20, dtype), inputs), sets).compile().save()
    executable = route.load(saved)
    placed, kv_cache = route.place_weights(weights), route.allocate_kv_cache(steps.cache_shapes(20), dtype)
    results = []
    for start in (3, 3 + shape[1]):
        outputs, kv_cache = executable(placed, kv_cache, steps.inputs(*shape, start=start))
        results += [tensor.clone() for tensor in outputs]
    return results


@every_route
@every_kind
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_equal_the_twins(route: Route, kernels: KernelSet, shape: tuple[int, int], dtype: torch.dtype) -> None:
    got, expected = (run_model(route, sets, shape, dtype) for sets in ((kernels,), ()))
    largest = max(float(tensor.abs().max()) for tensor in expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCES[dtype] * largest)


@every_route
@every_kind
def test_sampling_in_the_graph_equals_that_of_the_twins(route: Route, kernels: KernelSet) -> None:
    """Greedy, among five, among all; the third may not have half of the tokens."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.full((3, 16), -1, dtype=torch.int32)
    mask[2, :8] = 0
    inputs = torch.randn(3, 512, generator=generator), SamplingInputs(
        torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 5, 0]).int(), torch.tensor([1.0, 1.0, 0.9]),
        torch.rand(3, generator=generator), mask,
    )  # fmt: skip

    def step(weights: Any, kv_cache: Any, given: Any) -> tuple[Any, Any]:
        return sample(*given, 512), kv_cache

    got, expected = (
        lowered(route, step, ({}, [], inputs), sets).compile()(
            route.place_weights({}), route.allocate_kv_cache((), torch.float32), inputs
        )[0]
        for sets in ((kernels,), ())
    )
    torch.testing.assert_close(got, expected)


@every_route
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_kernel_is_one_node(route: Route, shape: tuple[int, int]) -> None:
    arguments = steps.weights(), steps.cache(20), steps.inputs(*shape)
    graph = lowered(route, steps.MODEL.step, arguments)
    call = f"= {SPACE}_{{}}(" if route.name == "neuron_native" else f'"{SPACE}.{{}} '
    attention = "paged_decode_attention" if shape[1] == 1 else "paged_prefill_attention"
    write = "kv_write" if route.name == "neuron_native" else "kv_written"
    counts = {"rms_norm": 1, "add_rms_norm": 4, "rope": 2, write: 2, attention: 2}
    assert {name: graph.text().count(call.format(name)) for name in counts} == counts
    assert graph.text() == lowered(route, steps.MODEL.step, arguments).text(), "the same in every trace"


def test_cpp_kernels_are_calls_in_an_xla_program() -> None:
    """All but the one that writes in place, which a program of XLA may not."""
    graph = lowered(ROUTES[1], steps.MODEL.step, (steps.weights(), steps.cache(20), steps.inputs(2, 1)), CPP)
    counts = {"embedding": 2, "rms_norm": 1, "linear": 8, "logits": 1, "rope": 2, "paged_attention": 2, "kv_write": 0}
    assert {name: graph.text().count(f'"vllm_neuron_cpu.{name} ') for name in counts} == counts
    assert "vllm_neuron.kernels.cpu" in graph.kernel_packages()


def test_what_goes_wrong_in_a_cpp_kernel_is_raised_from_an_xla_program() -> None:
    route, inputs = ROUTES[1], steps.inputs(1, 1)
    executable = lowered(route, steps.MODEL.step, (steps.weights(), steps.cache(20), inputs), CPP).compile()
    placed = route.place_weights(steps.weights())
    wrong = inputs._replace(token_ids=torch.tensor([10**6], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="token id 1000000 of a vocabulary of"):
        executable(placed, route.allocate_kv_cache(steps.cache_shapes(20), torch.float32), wrong)
    executable(placed, route.allocate_kv_cache(steps.cache_shapes(20), torch.float32), inputs)


@every_route
def test_outputs_stay_when_inputs_are_filled_again(route: Route) -> None:
    """Also those that are an input: what a step computed is read while the next one runs."""
    weights = {"w": torch.arange(4.0)}
    given = torch.ones(4)
    executable = lowered(route, lambda w, kv, x: ((x, x * w["w"]), kv), (weights, [], given)).compile()
    placed, cache = route.place_weights(weights), route.allocate_kv_cache((), torch.float32)
    first, cache = executable(placed, cache, given)
    given.fill_(5.0)
    second, _ = executable(placed, cache, given)
    assert [output.tolist() for output in first] == [[1.0] * 4, [0.0, 1.0, 2.0, 3.0]]
    assert [output.tolist() for output in second] == [[5.0] * 4, [0.0, 5.0, 10.0, 15.0]]


@every_route
def test_operands_may_lie_in_memory_in_any_order(route: Route) -> None:
    """XLA likes to make a transposition a matter of layout, which a kernel must not see."""

    def step(weights: Any, kv_cache: Any, x: torch.Tensor) -> tuple[Any, Any]:
        with using(KernelSet.NKI):
            from vllm_neuron import nn

            return nn.rms_norm(x.t() + 1, weights["w"], 1e-5).t(), kv_cache

    weights, x = {"w": torch.arange(1.0, 6.0)}, torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    executable = lowered(route, step, (weights, [], x)).compile()
    got, _ = executable(route.place_weights(weights), route.allocate_kv_cache((), torch.float32), x)
    rows = x.t() + 1
    expected = (rows * rows.square().mean(1, True).rsqrt() * weights["w"]).t()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)


@every_route
def test_what_breaks_a_rule_at_run_time_is_raised(route: Route) -> None:
    """A slot beyond the cache is known when the graph runs; the next run is none the worse for it."""
    inputs = steps.inputs(1, 1)
    executable = lowered(route, steps.MODEL.step, (steps.weights(), steps.cache(20), inputs)).compile()
    placed = route.place_weights(steps.weights())
    wrong = inputs._replace(slot_mappings=(torch.tensor([10**6], dtype=torch.int32),))
    with pytest.raises(Violation, match="dst has index 1000000 of 320 rows"):
        executable(placed, route.allocate_kv_cache(steps.cache_shapes(20), torch.float32), wrong)
    executable(placed, route.allocate_kv_cache(steps.cache_shapes(20), torch.float32), inputs)


@every_kind
def test_a_saved_xla_program_finds_its_kernels_in_another_process(kernels: KernelSet, tmp_path: Path) -> None:
    route, inputs = ROUTES[1], steps.inputs(2, 1)
    executable = lowered(route, steps.MODEL.step, (steps.weights(), steps.cache(20), inputs), (kernels,)).compile()
    held = route.allocate_kv_cache(steps.cache_shapes(20), torch.float32)
    outputs, _ = executable(route.place_weights(steps.weights()), held, inputs)
    (tmp_path / "blob").write_bytes(executable.save())
    code = f"""
import sys, torch
from tests.routes import native_steps as steps
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.xla import XlaRoute
from vllm_neuron.sampling import SamplingInputs, sample
route = XlaRoute(CPU)
loaded = route.load(open({str(tmp_path / "blob")!r}, "rb").read())
held = route.allocate_kv_cache(steps.cache_shapes(20), torch.float32)
outputs, _ = loaded(route.place_weights(steps.weights()), held, steps.inputs(2, 1))
torch.save(list(outputs), {str(tmp_path / "outputs")!r})
"""
    repository = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, timeout=300)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "outputs"), list(outputs))


@every_route
def test_sources_of_the_kernels_that_a_graph_calls_are_in_its_key(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(SMALL, disable_nki_kernels=False, nki_simulator=True, backend=route.name)
    cache = CompileCache(CacheFolders(), route.name)
    compiler = GraphCompiler(steps.MODEL, config, route, cache, torch.float32, 40)
    graph = compiler.lower(GraphSpec("decode", 1, 1, 256))
    before = compiler.key(graph)
    package = "vllm_neuron.kernels"
    called = {f"{package}.{name}" for name in ("rms_norm", "rope", "kv_write", "paged_decode_attention", "paged_rows")}
    assert called <= set(before.kernels)
    assert not {f"{package}.top_k", f"{package}.paged_prefill_attention"} & set(before.kernels)

    digest = keys.source_digest
    for module, changes in ((f"{package}.paged_rows", True), (f"{package}.top_k", False)):
        monkeypatch.setattr(keys, "source_digest", lambda names, m=module: "new" if names == (m,) else digest(names))
        assert (compiler.key(graph).digest != before.digest) is changes
