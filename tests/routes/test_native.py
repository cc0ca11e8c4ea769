"""The native route's stages: capture, donation, code, saving and loading."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.fixtures import random_weights, tiny_model
from tests.routes import native_steps as steps
from tests.routes.native_steps import ROUTE
from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.inputs import InputBuilder, Row
from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kv_cache.layout import group_windows, layer_shapes
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import Target

SETS = [KernelSet.TORCH, KernelSet.CPU]
every_set = pytest.mark.parametrize("kernels", SETS, ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products of tiny models only lose by being split, and lose much when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trace(step: Callable[..., Any], weights: Any = None, kv_cache: Any = None, inputs: Any = None) -> Any:
    """Lowered graph of a step over small tensors."""
    weights = {"w": torch.ones(4)} if weights is None else weights
    kv_cache = [(torch.zeros(2, 4), torch.zeros(2, 4))] if kv_cache is None else kv_cache
    inputs = (torch.zeros(4),) if inputs is None else inputs
    return ROUTE.trace("step", step, *map(steps.to_meta, (weights, kv_cache, inputs))).lower()


@every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (3, 1), (1, 20)])
def test_steps_equal_the_model_itself(requests: int, rows: int, dtype: torch.dtype, kernels: KernelSet) -> None:
    """Two steps on one cache, so that the second reads what the first wrote."""
    placed, held = ROUTE.place_weights(steps.weights(dtype)), ROUTE.allocate_kv_cache(steps.cache_shapes(40), dtype)
    kv_cache = steps.cache(40, dtype)
    for start in (0, rows):
        inputs = steps.inputs(requests, rows, start)
        outputs, held = steps.lowered(inputs, 40, kernels, dtype).compile()(placed, held, inputs)
        expected, kv_cache = steps.MODEL.step(steps.weights(dtype), kv_cache, inputs)
        tolerance = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
        torch.testing.assert_close(outputs, expected, atol=tolerance, rtol=tolerance)
        assert outputs.logits.dtype is torch.float32
        assert type(outputs) is type(expected)


@every_set
def test_layers_that_share_a_pool_write_into_it_one_after_the_other(kernels: KernelSet) -> None:
    """Three KV groups of a layer each, two of them with a window, in one pool full of numbers."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    model = tiny_model(num_hidden_layers=3, sliding_window=20, layer_types=kinds)
    blocks = np.arange(1, 1 + 6 * 16).reshape(2, 3, 16)
    rows = [Row(np.array([7 + i]), 200 + 9 * i, tuple(blocks[i])) for i in range(2)]
    inputs = InputBuilder(GraphSpec("decode", 2, 2, 256), 16, group_windows(model.kv_layers)).build(rows)
    weights = {**random_weights(model), **model.constants}
    ((keys, values),) = kv_cache = [tuple(torch.randn(2, *layer_shapes(model.kv_layers, 97, 16)[0]))]
    with using(kernels):
        lowered = ROUTE.trace("step", model.step, *map(steps.to_meta, (weights, kv_cache, inputs))).lower()
    held = ROUTE.allocate_kv_cache([keys.shape], torch.float32)
    for placed, half in zip(held.tensors, (keys, values), strict=True):
        placed.copy_(half)
    outputs, after = lowered.compile()(ROUTE.place_weights(weights), held, inputs)
    expected, ((new_keys, new_values),) = model.step(weights, kv_cache, inputs)
    torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.tensors, (new_keys, new_values), atol=1e-4, rtol=1e-4)
    assert sum((new_keys != keys).flatten(2).any(2).flatten().tolist()) == 2 * 3


def test_outputs_may_be_changed_by_their_owner() -> None:
    executable = trace(lambda w, kv, x: (x[0] * w["w"], kv)).compile()
    outputs, _ = executable(
        ROUTE.place_weights({"w": torch.ones(4)}), ROUTE.allocate_kv_cache([(2, 4)], torch.float32), (torch.ones(4),)
    )
    outputs.mul_(2)
    assert outputs.tolist() == [2.0] * 4


@every_set
def test_the_cache_stays_where_it_is(kernels: KernelSet) -> None:
    inputs = steps.inputs(1, 1)
    executable = steps.lowered(inputs, 40, kernels).compile()
    held = ROUTE.allocate_kv_cache(steps.cache_shapes(40), torch.float32)
    pointers = [tensor.data_ptr() for tensor in held.tensors]
    _, after = executable(ROUTE.place_weights(steps.weights()), held, inputs)
    assert [tensor.data_ptr() for tensor in after.tensors] == pointers
    slot = int(inputs.slot_mappings[0][0])
    for tensor in after.tensors:
        rows = tensor.flatten(0, 1).abs().sum((1, 2))
        assert rows[slot] > 0
        assert rows.count_nonzero() == 1


@every_set
def test_a_large_cache_is_not_copied(kernels: KernelSet) -> None:
    """A gigabyte and a half, which takes hundreds of times as long to copy as a step takes."""
    inputs = steps.inputs(1, 1)
    executable = steps.lowered(inputs, 700_000, kernels).compile()
    weights = ROUTE.place_weights(steps.weights())
    held = ROUTE.allocate_kv_cache(steps.cache_shapes(700_000), torch.float32)
    assert sum(tensor.nbytes for tensor in held.tensors) > 1.4e9
    step_times, copy_times = [], []
    for _ in range(5):
        begin = perf_counter()
        _, held = executable(weights, held, inputs)
        step_times.append(perf_counter() - begin)
        begin = perf_counter()
        held.tensors[0].clone()
        copy_times.append(perf_counter() - begin)
    assert min(step_times) < 0.25 * min(copy_times)


@every_set
def test_saved_code_runs_in_another_process(kernels: KernelSet, tmp_path: Path) -> None:
    inputs = steps.inputs(2, 1)
    lowered = steps.lowered(inputs, 40, kernels)
    executable = lowered.compile()
    outputs, _ = executable(
        ROUTE.place_weights(steps.weights()), ROUTE.allocate_kv_cache(steps.cache_shapes(40), torch.float32), inputs
    )
    (tmp_path / "blob").write_bytes(executable.save())
    code = f"""
import hashlib, sys, torch
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU
route = NativeRoute(CPU)
loaded = route.load(open({str(tmp_path / "blob")!r}, "rb").read())
assert "torch_xla" not in sys.modules and "vllm" not in sys.modules
from tests.routes import native_steps as steps
from vllm_neuron.kernels.dispatch import KernelSet
inputs = steps.inputs(2, 1)
held = route.allocate_kv_cache(steps.cache_shapes(40), torch.float32)
outputs, _ = loaded(route.place_weights(steps.weights()), held, inputs)
torch.save(list(outputs), {str(tmp_path / "outputs")!r})
print(hashlib.sha256(steps.lowered(inputs, 40, KernelSet({kernels.value!r})).text().encode()).hexdigest())
"""
    repository = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, timeout=300)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "outputs"), list(outputs))
    assert done.stdout.split()[-1] == hashlib.sha256(lowered.text().encode()).hexdigest()


@every_set
def test_text_tells_forms_and_code_only(kernels: KernelSet) -> None:
    inputs = steps.inputs(2, 1)
    text = steps.lowered(inputs, 40, kernels).text()
    assert "weights['layers.1.qkv']: float32[48, 32] stride [32, 1]" in text
    assert "kv_cache[1][0]: float32[40, 16, 1, 8]" in text
    assert "inputs.block_tables[0]: int32[2, 8]" in text
    assert " at 0x" not in text and str(Path(__file__).parents[2]) not in text
    assert steps.lowered(inputs, 40, kernels).text() == text
    assert steps.lowered(inputs, 41, kernels).text() != text
    assert ("index_copy_" if kernels is KernelSet.TORCH else "vllm_neuron_cpu_kv_write(kv0, kv1") in text


def test_traced_text_is_before_donation() -> None:
    step = lambda w, kv, x: (x[0], [(kv[0][0].index_copy(0, x[1], x[2]), kv[0][1])])  # noqa: E731
    inputs = (torch.zeros(4), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4))
    traced = ROUTE.trace("step", step, {}, *map(steps.to_meta, ([(torch.zeros(2, 4), torch.zeros(2, 4))], inputs)))
    assert "aten_index_copy(" in traced.text()
    assert "aten_index_copy_(" in traced.lower().text()
    assert "aten_index_copy(" in traced.text(), "lowering changes the traced graph"


def test_a_step_that_reads_values_is_refused() -> None:
    def branch(w: Any, kv: Any, x: Any) -> Any:
        return (x[0] * 2 if x[0].sum() > 0 else x[0]), kv

    with pytest.raises(ValueError, match=r"depends on the values.*torch\.where"):
        trace(branch)
    with pytest.raises(ValueError, match="depends on the values"):
        trace(lambda w, kv, x: (x[0][: int(x[0][0].item())], kv))
    with pytest.raises(ValueError, match="depends on the values"):
        trace(lambda w, kv, x: (x[0].nonzero(), kv))


def test_a_step_that_holds_tensors_is_refused() -> None:
    held = torch.ones(4)
    with pytest.raises(ValueError, match="no argument of it"):
        trace(lambda w, kv, x: (x[0] + held, kv))
    with pytest.raises(ValueError, match="out of Python values"):
        trace(lambda w, kv, x: (x[0] + torch.tensor([1.0, 2.0, 3.0, 4.0]), kv))


def test_a_cache_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="returns a KV cache of"):
        trace(lambda w, kv, x: (x[0], [(kv[0][0][:1], kv[0][1])]))


def test_a_cache_that_would_be_copied_is_refused() -> None:
    with pytest.raises(ValueError, match="copy all of it"):
        trace(lambda w, kv, x: (x[0], [(torch.cat((kv[0][0][:1], x[0][None])), kv[0][1])]))
    with pytest.raises(ValueError, match="not made from the old one"):
        trace(lambda w, kv, x: (x[0], [(kv[0][1], kv[0][0])]))


def test_reading_the_old_cache_after_a_write_is_refused() -> None:
    def step(w: Any, kv: Any, x: Any) -> Any:
        old = kv[0][0]
        new = old.index_fill(0, x[1], 1.0)
        return new.sum() - old.sum(), [(new, kv[0][1])]

    with pytest.raises(ValueError, match="reads the KV cache as it was before"):
        trace(step, inputs=(torch.zeros(4), torch.zeros(1, dtype=torch.int64)))


def test_changing_weights_or_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="a weight or an input"):
        trace(lambda w, kv, x: (w["w"].add_(1), kv))
    with pytest.raises(ValueError, match="a weight or an input"):
        trace(lambda w, kv, x: (x[0].view(2, 2).mul_(2), kv))


def test_weights_and_inputs_are_checked() -> None:
    executable = trace(lambda w, kv, x: (x[0] * w["w"], kv)).compile()
    held = ROUTE.allocate_kv_cache([(2, 4)], torch.float32)
    placed = ROUTE.place_weights({"more": torch.ones(1), "w": torch.full((4,), 3.0)})
    assert executable(placed, held, (torch.ones(4),))[0].tolist() == [3.0] * 4
    with pytest.raises(ValueError, match=r"no weight weights\['w'\]"):
        executable(ROUTE.place_weights({}), held, (torch.ones(4),))
    with pytest.raises(ValueError, match="float32"):
        executable(ROUTE.place_weights({"w": torch.ones(4).half()}), held, (torch.ones(4),))
    with pytest.raises(ValueError, match=r"inputs\[0\].*\[5\]"):
        executable(placed, held, (torch.ones(5),))
    with pytest.raises(ValueError, match=r"kv_cache\[0\]\[0\]"):
        executable(placed, ROUTE.allocate_kv_cache([(3, 4)], torch.float32), (torch.ones(4),))


def test_placed_weights_share_their_memory() -> None:
    tensor = torch.ones(8, 8)
    (placed,) = ROUTE.place_weights({"w": tensor}).by_path.values()
    assert placed.data_ptr() == tensor.data_ptr()


def test_keys_and_values_of_a_layer_lie_together() -> None:
    keys, values, *_ = ROUTE.allocate_kv_cache([(3, 4, 2, 8)] * 2, torch.bfloat16).tensors
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert keys.shape == values.shape == (3, 4, 2, 8)
    assert not keys.any() and not values.any()


def test_probe_names_the_compiler_and_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ROUTE.probe().works
    assert "torch" in ROUTE.probe().versions
    monkeypatch.setenv("PATH", str(tmp_path))
    probe = ROUTE.probe()
    assert not probe.works
    assert "g++" in probe.reason and "VLLM_NEURON_DISABLE_NKI_KERNELS=1" in probe.reason
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    assert ROUTE.probe().works


def test_without_torch_neuronx_the_package_is_named() -> None:
    route = NativeRoute(Target("trn2"))
    probe = route.probe()
    assert not probe.works
    assert "torch-neuronx" in probe.reason and "VLLM_NEURON_CPU_MODE=1" in probe.reason
    assert probe.versions["torch-neuronx"] == "absent"
    for call in (
        lambda: route.place_weights({"w": torch.ones(1)}),
        lambda: route.allocate_kv_cache([(1, 1)], torch.float32),
        lambda: route.trace("step", lambda w, kv, x: (x, kv), {}, [], torch.ones(1, device="meta")).lower().compile(),
    ):
        with pytest.raises(RuntimeError, match="torch-neuronx"):
            call()
