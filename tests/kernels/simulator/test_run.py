"""How kernels are run: installing, calling, arguments and outputs, targets, memory in use."""

import subprocess
import sys
from dataclasses import dataclass, field

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

from vllm_neuron.envs import EnvironmentVariableError
from vllm_neuron.kernels import simulator
from vllm_neuron.kernels.simulator import Violation

from .tiles import normal, out, tile


@nki.jit
def double(a):
    result = nl.ndarray(a.shape, a.dtype)
    nisa.tensor_scalar(result, tile(a), nl.multiply, 2.0)
    return out(result)


def test_real_package_is_left_alone(tmp_path):
    (tmp_path / "nki").mkdir()
    for name in ("__init__", "isa"):
        (tmp_path / "nki" / f"{name}.py").write_text("real = True\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vllm_neuron.kernels import simulator\n"
        "assert simulator.install() is False and not simulator.installed()\n"
        "import nki, nki.isa; assert nki.real and nki.isa.real\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stub_of_the_same_name_is_replaced(tmp_path):
    (tmp_path / "nki.py").write_text("stub = True\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vllm_neuron.kernels import simulator\n"
        "assert simulator.install() and simulator.installed()\n"
        "import nki, nki.language as nl, nki.isa as nisa; assert nisa.nc_matmul and nl.float32 == 'float32'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernel_without_device_says_how_to_run_it(monkeypatch):
    monkeypatch.delenv("NKI_SIMULATOR", raising=False)
    with pytest.raises(RuntimeError, match=r"double is a kernel for Neuron devices.*nki\.simulate.*NKI_SIMULATOR=1"):
        double(normal(2, 2))
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    a = normal(2, 2)
    np.testing.assert_array_equal(double(a), a * 2)


def test_instruction_outside_of_a_kernel_says_so():
    with pytest.raises(RuntimeError, match="inside a kernel only"):
        nl.ndarray((2, 2), nl.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_torch_in_torch_out(dtype):
    a = torch.arange(8.0).reshape(2, 4).to(dtype)
    result = nki.simulate(double)(a)
    assert result.dtype == dtype and torch.equal(result.float(), a.float() * 2)


def test_arguments_at_any_depth():
    @dataclass
    class Pair(nl.NKIObject):
        left: object = None
        factors: list = field(default_factory=list)

    def kernel(pair, rest):
        result = nl.ndarray(pair.left.shape, pair.left.dtype)
        nisa.tensor_tensor(result, tile(pair.left), tile(rest[0]["b"]), nl.add)
        return {"sum": out(result), "factors": pair.factors}

    a, b = normal(2, 3), normal(2, 3)
    result = nki.simulate(kernel)(Pair(left=a), ({"b": b},))
    np.testing.assert_array_equal(result["sum"], a + b)
    assert result["factors"] == []


def test_objects_without_an_initialiser_get_the_documented_one():
    class Plain(nl.NKIObject):
        size = 3
        name: str = "x"

    assert (Plain().size, Plain(name="y").name, Plain("z", 5).size) == (3, "y", 5)
    with pytest.raises(TypeError, match="takes name, size"):
        Plain(other=1)


def test_lists_and_unknown_types_are_refused():
    with pytest.raises(Violation, match="takes tuples"):
        nki.simulate(double)([normal(2, 2)])
    with pytest.raises(TypeError, match="float64 is no data type of NKI"):
        nki.simulate(double)(np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"kernel\[3\]"):
        nki.simulate(double[3])(normal(2, 2))


def test_target_is_trn2_unless_the_variable_or_the_caller_says_otherwise(monkeypatch):
    def kernel(a):
        assert nisa.get_nc_version() == nisa.nc_version[versions[0]]
        return out(tile(a))

    versions = ["gen3"]
    a = normal(2, 2)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    nki.simulate(kernel, strict=False)(a)
    versions[0] = "gen4"
    nki.simulate(kernel, strict=False, target="trn3")(a)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen4")
    nki.simulate(kernel, strict=False)(a)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(EnvironmentVariableError):
        nki.simulate(kernel, strict=False)(a)


def test_precision_by_variable(monkeypatch):
    def kernel(a):
        rounded, result = nl.ndarray(a.shape, nl.bfloat16), nl.ndarray(a.shape, nl.float32)
        nisa.tensor_copy(rounded, tile(a))
        nisa.tensor_copy(result, rounded)
        return out(result)

    a = np.full((1, 1), 1.001, np.float32)
    assert nki.simulate(kernel)(a).item() == 1.0
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    np.testing.assert_array_equal(nki.simulate(kernel)(a), a)


def test_both_cores_share_outputs_and_have_their_own_private_memory():
    def kernel(a):
        result, rank = nl.ndarray((2, 4), a.dtype, nl.shared_hbm), nl.program_id(0)
        private = nl.ndarray((1, 4), a.dtype, nl.private_hbm)
        nisa.dma_copy(private, a[rank : rank + 1])
        nisa.dma_copy(result[rank : rank + 1], private)
        assert nl.num_programs(0) == 2
        return result

    a = normal(2, 4)
    np.testing.assert_array_equal(nki.simulate(kernel)[2](a), a)


def test_tensors_that_are_done_make_room():
    """Ten tiles of a tenth of SBUF after another are no problem, and the report says how much was in use."""

    def kernel(a):
        total = nl.zeros((128, 1), nl.float32)
        for _ in nl.affine_range(10):
            rows = nl.ndarray((128, 10000), nl.float32)
            nisa.dma_copy(rows, a)
            nisa.tensor_reduce(total, nl.add, rows, axis=1)
        return out(total)

    run = nki.simulate(kernel).run(np.zeros((128, 10000), np.float32))
    assert 40000 <= run.peak["sbuf"] < 80000 and run.peak["psum"] == 0


def test_source_that_cannot_be_read_is_noted():
    scope: dict = {"nl": nl, "out": out, "tile": tile}
    exec("def kernel(a):\n    return out(tile(a))\n", scope)
    for kernel in (scope["kernel"], lambda a: out(tile(a))):
        run = simulator.simulate(kernel).run(normal(2, 2))
        assert list(run.notes) == ["language: not checked, because the kernel's source cannot be read"]


@pytest.mark.parametrize("name", ["topk", "rand2", "anything"])
def test_what_is_not_simulated_says_so(name):
    with pytest.raises(AttributeError, match=f"nki.isa.{name} is not simulated"):
        getattr(nisa, name)
    import nki.collectives

    with pytest.raises(AttributeError, match="not simulated"):
        nki.collectives.all_reduce()
    with pytest.raises(Violation, match="not simulated"):
        nki.simulate(lambda a: tile(a).indirect(a))(normal(2, 2))
