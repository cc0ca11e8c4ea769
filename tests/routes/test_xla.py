"""The XLA route's stages: capture, lowering, the mapping of parameters, donation, saving and loading."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from tests.routes import xla_steps
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.xla import XlaExecutable, XlaRoute

ROUTE = XlaRoute(CPU)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def run(executable: XlaExecutable, rows: int, dtype: torch.dtype, num_blocks: int, steps: int = 2) -> list[Any]:
    """Outputs of several steps on one cache."""
    weights = ROUTE.place_weights(xla_steps.weights(dtype))
    kv_cache = ROUTE.allocate_kv_cache([xla_steps.cache_shape(num_blocks)] * 2, dtype)
    results = []
    for _ in range(steps):
        outputs, kv_cache = executable(weights, kv_cache, xla_steps.inputs(rows, dtype))
        results.append({name: tensor.clone() for name, tensor in outputs.items()})
    return results


def run_eagerly(rows: int, dtype: torch.dtype, num_blocks: int, steps: int = 2) -> list[Any]:
    shape = xla_steps.cache_shape(num_blocks)
    kv_cache: Any = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2)]
    results = []
    for _ in range(steps):
        outputs, kv_cache = xla_steps.step(xla_steps.weights(dtype), kv_cache, xla_steps.inputs(rows, dtype))
        results.append(outputs)
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_steps_equal_eager_torch(rows: int, dtype: torch.dtype) -> None:
    """With a weight that is not used, a weight under two names, and several dtypes of cache."""
    got = run(xla_steps.executable(rows, dtype, 8), rows, dtype, 8)
    want = run_eagerly(rows, dtype, 8)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert got[0]["sum"].dtype is dtype
    assert got[0]["tied"].dtype is torch.float32


def test_parameters_that_are_not_used_are_dropped() -> None:
    lowered = xla_steps.lowered(1, torch.float32, 8)
    flat = [*sorted(xla_steps.weights(torch.float32)), *["cache"] * 4, "x", "slots"]
    unused = lowered.signature.weights.index("weights['unused']")
    assert sorted(lowered.signature.parameters) == [index for index in range(len(flat)) if index != unused]


def test_weights_are_found_by_name_whatever_their_order() -> None:
    dtype = torch.float32
    executable = xla_steps.executable(1, dtype, 8)
    weights = xla_steps.weights(dtype) | {"tied": torch.zeros(xla_steps.WIDTH, xla_steps.WIDTH)}
    placed = ROUTE.place_weights(dict(reversed(weights.items())) | {"more": torch.ones(1)})
    outputs, _ = executable(
        placed, ROUTE.allocate_kv_cache([xla_steps.cache_shape(8)] * 2, dtype), xla_steps.inputs(1, dtype)
    )
    torch.testing.assert_close(outputs["sum"], run_eagerly(1, dtype, 8, steps=1)[0]["sum"])
    assert not outputs["tied"].any()


def test_placed_weights_share_their_memory() -> None:
    tensor = torch.ones(64, 64)
    (array,) = ROUTE.place_weights({"w": tensor}).values()
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()


def test_weights_that_cannot_be_shared_are_copied() -> None:
    tensors = {"view": torch.randn(8, 4).t(), "unaligned": torch.randn(9)[1:]}
    for name, array in ROUTE.place_weights(tensors).items():
        torch.testing.assert_close(torch.from_dlpack(array), tensors[name.removeprefix("weights['").removesuffix("']")])


def test_inputs_may_be_overwritten_after_the_step() -> None:
    dtype = torch.float32
    executable = xla_steps.executable(1, dtype, 8)
    weights = ROUTE.place_weights(xla_steps.weights(dtype))
    kv_cache = ROUTE.allocate_kv_cache([xla_steps.cache_shape(8)] * 2, dtype)
    inputs = xla_steps.inputs(1, dtype)
    first, kv_cache = executable(weights, kv_cache, inputs)
    kept = first["sum"].clone()
    for tensor in inputs:
        tensor.zero_()
    torch.testing.assert_close(first["sum"], kept)


# --- donation -----------------------------------------------------------------------------------------------------

LARGE_BLOCKS = {torch.bfloat16: 2**18, torch.float16: 2**18, torch.float32: 2**17}
"""Two layers of keys and values of so many blocks are half a gibibyte."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_large_cache_is_updated_in_place(rows: int, dtype: torch.dtype) -> None:
    """No temporary of a cache's size. The compiler reports it, so nothing is allocated."""
    executable = xla_steps.executable(rows, dtype, 2 * LARGE_BLOCKS[dtype])
    assert executable.program.temporary_bytes() < 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_step_time_does_not_grow_with_the_cache(dtype: torch.dtype) -> None:
    """A copy of half a gibibyte takes over a hundred milliseconds; a step of either size takes one."""
    small, large = (shortest_step(dtype, num_blocks) for num_blocks in (64, LARGE_BLOCKS[dtype]))
    assert large < 10 * small + 0.02


def shortest_step(dtype: torch.dtype, num_blocks: int) -> float:
    """Seconds."""
    executable = xla_steps.executable(1, dtype, num_blocks)
    weights, inputs = ROUTE.place_weights(xla_steps.weights(dtype)), xla_steps.inputs(1, dtype)
    kv_cache = ROUTE.allocate_kv_cache([xla_steps.cache_shape(num_blocks)] * 2, dtype)
    pointers = [array.unsafe_buffer_pointer() for array in kv_cache]
    times = []
    for _ in range(6):
        start = perf_counter()
        _, kv_cache = executable(weights, kv_cache, inputs)
        times.append(perf_counter() - start)
    assert [array.unsafe_buffer_pointer() for array in kv_cache] == pointers
    return min(times)


def test_a_cache_that_was_handed_in_is_gone() -> None:
    dtype = torch.float32
    executable = xla_steps.executable(1, dtype, 8)
    weights = ROUTE.place_weights(xla_steps.weights(dtype))
    kv_cache = ROUTE.allocate_kv_cache([xla_steps.cache_shape(8)] * 2, dtype)
    executable(weights, kv_cache, xla_steps.inputs(1, dtype))
    with pytest.raises((RuntimeError, ValueError), match="deleted or donated"):
        executable(weights, kv_cache, xla_steps.inputs(1, dtype))


# --- text, saving, loading ----------------------------------------------------------------------------------------


def in_another_process(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True).stdout


def test_equal_graphs_have_equal_text_here_and_in_another_process() -> None:
    first, second = (xla_steps.lowered(3, torch.bfloat16, 8).text() for _ in range(2))
    assert first == second
    assert "tf.aliasing_output" in first
    assert in_another_process("-m", "tests.routes.xla_steps", "3", "bfloat16", "8").strip() == first.strip()


def test_different_graphs_have_different_text() -> None:
    texts = {xla_steps.lowered(rows, dtype, 8).text() for rows in (1, 2) for dtype in DTYPES}
    assert len(texts) == 6


def test_traced_text_is_the_captured_graph() -> None:
    traced = ROUTE.trace("mine", lambda w, kv, x: (x + 1, kv), {}, [], torch.zeros(3))
    assert "aten.add.Tensor" in traced.text()


LOAD = """
import sys
from pathlib import Path
import torch
from tests.routes import xla_steps
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.xla import XlaRoute
route = XlaRoute(CPU)
executable = route.load(Path(sys.argv[1]).read_bytes())
dtype = torch.bfloat16
kv_cache = route.allocate_kv_cache([xla_steps.cache_shape(8)] * 2, dtype)
outputs, _ = executable(route.place_weights(xla_steps.weights(dtype)), kv_cache, xla_steps.inputs(3, dtype))
assert "torch_xla" not in sys.modules
torch.save(outputs, sys.argv[2])
"""


def test_a_saved_executable_runs_in_another_process_without_torch_xla(tmp_path: Path) -> None:
    executable = xla_steps.executable(3, torch.bfloat16, 8)
    (tmp_path / "blob").write_bytes(executable.save())
    in_another_process("-c", LOAD, str(tmp_path / "blob"), str(tmp_path / "outputs"))
    got = torch.load(tmp_path / "outputs")
    torch.testing.assert_close(got, run(executable, 3, torch.bfloat16, 8)[0], atol=0, rtol=0)


# --- what cannot be captured --------------------------------------------------------------------------------------


def branches_on_a_value(weights: Any, kv_cache: Any, x: torch.Tensor) -> Any:
    return (x + 1 if x.sum() > 0 else x - 1), kv_cache


def has_a_shape_made_of_values(weights: Any, kv_cache: Any, x: torch.Tensor) -> Any:
    return x[x > 0], kv_cache


def keeps_a_tensor(weights: Any, kv_cache: Any, x: torch.Tensor) -> Any:
    return x + KEPT, kv_cache


def bakes_values(weights: Any, kv_cache: Any, x: torch.Tensor) -> Any:
    return x + torch.tensor([1.0, 2.0, 3.0]), kv_cache


def changes_its_argument(weights: Any, kv_cache: Any, x: torch.Tensor) -> Any:
    return x.add_(1), kv_cache


def loses_the_cache(weights: Any, kv_cache: Any, x: torch.Tensor) -> Any:
    return x, kv_cache[:0]


KEPT = torch.ones(3)
FAULTS: dict[Callable[..., Any], str] = {
    branches_on_a_value: "depends on the values of tensors",
    has_a_shape_made_of_values: "depends on the values of tensors",
    keeps_a_tensor: "no argument of it",
    bakes_values: "out of Python values",
    changes_its_argument: "in place",
    loses_the_cache: "returns a KV cache of",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_step_that_is_not_a_pure_function_of_shapes_is_refused(fault: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"faulty: .*{FAULTS[fault]}"):
        ROUTE.trace("faulty", fault, {}, [(torch.zeros(2, 3), torch.zeros(2, 3))], torch.zeros(3))


def test_an_operator_without_lowering_is_refused() -> None:
    traced = ROUTE.trace("odd", lambda w, kv, x: (torch.histc(x, 10), kv), {}, [], torch.zeros(3))
    with pytest.raises(ValueError, match=r"odd: torch_xla has no lowering of aten[.]histc"):
        traced.lower()


def test_python_numbers_are_constants() -> None:
    lowered = ROUTE.trace("numbers", lambda w, kv, x: (x * 3.25 + 7, kv), {}, [], torch.zeros(3)).lower()
    assert lowered.signature.parameters == (0,)
    outputs, _ = lowered.compile()({}, (), torch.ones(3))
    torch.testing.assert_close(outputs, torch.full((3,), 10.25))
