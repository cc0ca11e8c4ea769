"""A pytest plugin under which the tests of the public nki-library run against our simulator, unmodified.

It runs in a process of its own, in the folder of that repository: it registers the simulator as `nki`, stands in for
the packages of AWS's test farm, and gives the fixtures that its tests ask for. Kernels run in compatible mode and are
compared by the repository's own function with the repository's own tolerances.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

from vllm_neuron.kernels import simulator

FARM = (
    "boto3",
    "botocore",
    "fabric2",
    "paramiko",
    "plotext",
    "aws_embedded_metrics",
    "pytest_html",
    "invoke",
    "allpairspy",
    "test.utils.test_orchestrator",
)
"""Modules that only AWS's machinery around the tests needs."""


class _Farm(MetaPathFinder, Loader):
    """Finds an empty stand-in for every module of the packages above."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        known = fullname in FARM or fullname.split(".")[0] in FARM
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        return None


def _neuron_dtypes() -> ModuleType:
    """The part of a private package of AWS that the tests use."""
    module = ModuleType("neuron_dtypes")
    names = ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn")
    values: dict[str, Any] = {name: getattr(ml_dtypes, name) for name in names}
    values |= {"float8_e4m3fn_x4": np.uint32, "float8_e5m2_x4": np.uint32, "float4_e2m1fn_x4": np.uint16}
    values["static_cast"] = lambda array, dtype: np.asarray(array).astype(_numpy(dtype))
    values["sizeinbytes"] = lambda dtype: np.dtype(_numpy(dtype)).itemsize
    values["finfo"] = lambda dtype: ml_dtypes.finfo(_numpy(dtype))
    values["is_float_type"] = lambda dtype: np.dtype(dtype).kind in "fV"
    for name, value in values.items():
        setattr(module, name, value)
    return module


def _numpy(dtype: Any) -> Any:
    return getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases-per-test", type=int, default=None, help="Cases to run of each of the library's tests.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = config.getoption("--cases-per-test")
    if limit is None:
        return
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        test = item.nodeid.split("[")[0]
        seen[test] += 1
        if seen[test] <= limit or "test_" not in item.path.name:
            kept.append(item)
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    sys.meta_path.insert(0, _Farm())
    sys.modules["neuron_dtypes"] = _neuron_dtypes()
    assert simulator.install(), "the real nki package is installed: the simulator cannot stand in for it"
    # `test` is the repository's package here, not the standard library's.
    for name in [n for n in sys.modules if n == "test" or n.startswith("test.")]:
        del sys.modules[name]
    sys.path[:0] = [str(config.invocation_params.dir), str(config.invocation_params.dir / "src")]
    for mark in ("fast", "coverage_parametrize", "platforms", "simulation", "slow_simulation"):
        config.addinivalue_line("markers", f"{mark}: of the nki-library")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases of the repository's own mark that names lists of values: each value once, as far as its filter allows."""
    for mark in metafunc.definition.iter_markers("coverage_parametrize"):
        from test.utils import coverage_parametrized_tests as coverage

        settings = ("filter", "coverage", "n_tests_per_boundary_value", "max_invalid_tests")
        named = {k: v for k, v in mark.kwargs.items() if k not in settings and not k.startswith("enable_")}
        values = {name: list(getattr(value, "values", value)) for name, value in named.items()}
        cases = coverage._generate_valid_cases(values, "singles", mark.kwargs.get("filter"))
        metafunc.parametrize([*values, "is_negative_test_case"], [(*case, False) for case in cases])


class Manager:
    """Runs a kernel in the simulator and compares with its golden function."""

    def execute(self, kernel_args: Any, *_: Any, **__: Any) -> None:
        inputs = {
            name.removesuffix(".must_alias_input"): value for name, value in (kernel_args.kernel_input or {}).items()
        }
        lnc = kernel_args.compiler_input.logical_nc_config
        target = kernel_args.compiler_input.platform_target.get_compile_target()
        kernel = simulator.simulate(kernel_args.kernel_func, strict=False, target=target)
        outputs = kernel[lnc](**inputs)
        results = [] if outputs is None else list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        _compare(results, kernel_args.validation_args)


def _compare(results: list[Any], validation: Any) -> None:
    from test.integration.nkilib.utils.comparators import maxAllClose

    golden = validation.golden_output
    expected = golden if isinstance(golden, dict) else golden.golden
    if expected is None:
        return  # the test checks something else than the outputs
    assert len(results) == len(expected), (len(results), list(expected))
    for result, (name, wanted) in zip(results, expected.items(), strict=True):
        if hasattr(wanted, "validator"):
            validator = wanted.validator() if isinstance(wanted.validator, type) else wanted.validator
            assert validator.validate(np.asarray(result, dtype=wanted.output_ndarray.dtype)), f"{name} differs"
            continue
        shaped = np.asarray(result).reshape(np.asarray(wanted).shape)
        rtol, atol = validation.relative_accuracy, validation.absolute_accuracy
        assert maxAllClose(shaped, np.asarray(wanted), rtol=rtol, atol=atol, verbose=1), f"{name} differs"


@pytest.fixture
def test_manager() -> Manager:
    return Manager()


@pytest.fixture
def collector() -> MagicMock:
    return MagicMock()


@pytest.fixture
def platform_target() -> Iterator[Any]:
    from test.utils.common_dataclasses import Platforms

    yield Platforms.TRN2
