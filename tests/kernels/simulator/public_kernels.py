"""Public kernels without a test that runs as it is: the tutorials of the Neuron SDK, and two of nki-library.

Run by test_conformance.py in the process of library_plugin; the kernels are loaded from fetched sources, unmodified,
and compared with the golden functions or the NumPy and torch expressions that the same sources give.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from vllm_neuron.kernels import simulator
from vllm_neuron.kernels.simulator.report import estimate

SDK = Path(os.environ["CONFORMANCE_SDK"]) / "nki" / "examples"
SAMPLES = Path(os.environ["CONFORMANCE_SAMPLES"]) / "src" / "nki_samples" / "tutorials"
RANDOM = np.random.default_rng(0)


def load(path: Path) -> ModuleType:
    """A file as a module. Some set NEURON_PLATFORM_TARGET_OVERRIDE at import, for their own demonstration."""
    before = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ.pop("NEURON_PLATFORM_TARGET_OVERRIDE", None)
    if before is not None:
        os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = before
    return module


def run(kernel: Any, *args: Any, lnc: int = 1, **kwargs: Any) -> Any:
    return simulator.simulate(kernel, strict=False)[lnc](*args, **kwargs)


def uniform(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RANDOM.random(shape).astype(dtype)


def test_sdk_simulate() -> None:
    load(SDK / "simulate" / "nki_simulate_example.py")  # it compares itself


def test_sdk_tensor_addition() -> None:
    a, b = uniform(256, 1024), uniform(256, 1024)
    kernel = load(SDK / "tensor_addition" / "tensor_addition_nki_kernels.py").nki_tensor_add
    np.testing.assert_allclose(run(kernel, a, b), a + b, rtol=1e-5)


def test_sdk_getting_started() -> None:
    ones = np.ones((4, 3), np.float16)
    np.testing.assert_array_equal(run(load(SDK / "getting_started_baremetal.py").nki_tensor_add_kernel, ones, ones), 2)


def test_sdk_index_cases() -> None:
    x = torch.arange(20, dtype=torch.bfloat16).reshape(4, 5)
    even, odd = run(load(SDK / "index-case-1.py").tensor_split_kernel_, x)
    assert torch.equal(even, x[:, 0::2]) and torch.equal(odd, x[:, 1::2])
    image = torch.arange(2 * 6 * 6, dtype=torch.bfloat16).reshape(2, 6, 6)
    pooled = run(load(SDK / "index-case-3.py").tensor_maxpool_kernel_, image, 2)
    assert torch.equal(pooled, torch.nn.functional.max_pool2d(image, 2))


@pytest.mark.parametrize("folder", ["sdk", "samples"])
def test_matrix_multiplication(folder: str) -> None:
    file = Path("matrix_multiplication") / "matrix_multiplication_nki_kernels.py"
    module = load((SDK if folder == "sdk" else SAMPLES) / file)
    lhs, rhs = torch.rand(64, 128).bfloat16(), torch.rand(128, 512).bfloat16()
    torch.testing.assert_close(run(module.nki_matmul_basic_, lhs.T, rhs), lhs @ rhs, atol=1e-4, rtol=1e-2)
    lhs, rhs = torch.rand(2048, 1024).bfloat16(), torch.rand(1024, 1024).bfloat16()
    golden = (lhs.float() @ rhs.float()).bfloat16()
    for name in ("tiled", "hoist_load", "block_free_dimension", "fully_optimized"):
        result = run(getattr(module, f"nki_matmul_{name}_"), lhs.T, rhs)
        torch.testing.assert_close(result, golden, atol=1e-4, rtol=1e-2)


def test_transpose2d() -> None:
    a = torch.arange(5 * 12, dtype=torch.int8).reshape(5, 12)
    result = run(load(SDK / "transpose2d" / "transpose2d_nki_kernels.py").tensor_transpose2D_kernel_, a, (3, 4))
    assert torch.equal(result, a.reshape(5, 3, 4).transpose(1, 2).reshape(5, 12))


def test_average_pool2d() -> None:
    module = load(SDK / "average_pool2d" / "average_pool2d_nki_kernels.py")
    image = uniform(16, 24, 24)
    np.testing.assert_allclose(
        run(module.tensor_avgpool_kernel, image, 2), module.np_average_pool_2D(image, 2), rtol=1e-5
    )


def test_fused_mamba() -> None:
    module = load(SDK / "fused_mamba" / "mamba_nki_kernels.py")
    delta, u, a = uniform(1, 256, 512), uniform(1, 256, 512), -uniform(256, 16)
    b, c = uniform(1, 16, 512), uniform(1, 16, 512)
    state, golden = np.zeros((1, 256, 16), np.float32), np.empty_like(delta)
    for t in range(512):
        decay = np.exp(delta[:, :, None, t] * a)
        state = decay * state + delta[:, :, None, t] * b[:, None, :, t] * u[:, :, None, t]
        golden[:, :, t] = (c[:, None, :, t] * state).sum(axis=-1)
    for version in ("v1", "v2", "v3"):
        np.testing.assert_allclose(
            run(getattr(module, f"mamba_{version}"), delta, u, a, b, c), golden, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("lnc", [1, 2])
def test_cross_entropy(lnc: int) -> None:
    from nkilib_src.nkilib.experimental.loss.cross_entropy import cross_entropy_backward, cross_entropy_forward
    from nkilib_src.nkilib.experimental.loss.cross_entropy_torch import (
        cross_entropy_backward_torch_ref,
        cross_entropy_forward_torch_ref,
    )

    logits, targets = RANDOM.standard_normal((64, 3000), np.float32), RANDOM.integers(0, 3000, 64).astype(np.int32)
    settings = {"positions_per_batch": 32, "chunk_size": 1024, "dtype": "float32"}
    loss, lse = run(cross_entropy_forward, logits, targets, lnc=lnc, **settings)
    wanted = cross_entropy_forward_torch_ref(torch.from_numpy(logits), torch.from_numpy(targets).long())
    for result, golden in zip((loss, lse), wanted, strict=True):
        np.testing.assert_allclose(result.reshape(-1), golden.numpy(), rtol=1e-5, atol=1e-5)
    gradient = run(cross_entropy_backward, logits.copy(), targets, lse, lnc=lnc, inplace=False, **settings)
    golden = cross_entropy_backward_torch_ref(torch.from_numpy(logits), torch.from_numpy(targets).long())
    np.testing.assert_allclose(gradient, golden.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((2, 2, 512, 128), {"causal_mask": True}, id="causal"),
        pytest.param((4, 2, 256, 64), {"causal_mask": False, "tp_q": False}, id="gqa"),
        pytest.param((2, 1, 640, 128), {"causal_mask": True, "sliding_window": 128, "sink": True}, id="window-sink"),
    ],
)
def test_attention_cte(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    from nkilib_src.nkilib.core.attention.attention_cte import attention_cte
    from nkilib_src.nkilib.core.attention.attention_cte_torch import attention_cte_torch_ref

    batch, batch_kv, length, d = shape
    q, k, v = (RANDOM.standard_normal((n, length, d)) * 0.3 for n in (batch, batch_kv, batch_kv))
    k = k.transpose(0, 2, 1)
    q = q if options.get("tp_q", True) else q.transpose(0, 2, 1)
    settings = {"scale": 1.0, **options}
    q, k, v = (np.ascontiguousarray(x).astype(ml_dtypes.bfloat16) for x in (q, k, v))
    if settings.pop("sink", False):
        settings["sink"] = RANDOM.standard_normal((batch, 1)).astype(ml_dtypes.bfloat16)
    result = run(attention_cte, q, k, v, lnc=2, **settings)
    tensors = {"q": q, "k": k, "v": v, **settings}
    as_torch = {
        n: torch.from_numpy(x.astype(np.float32)) if isinstance(x, np.ndarray) else x for n, x in tensors.items()
    }
    golden = attention_cte_torch_ref(**as_torch)
    np.testing.assert_allclose(result.astype(np.float32), golden.float().numpy(), rtol=2e-2, atol=2e-2)


def test_attention_cte_takes_what_was_published() -> None:
    """30 % of the peak at 2048 tokens and 128 dimensions, by the library's own figures; the estimate is within 35 %."""
    from nkilib_src.nkilib.core.attention.attention_cte import attention_cte

    q, k, v = (np.zeros(shape, ml_dtypes.bfloat16) for shape in ((1, 2048, 128), (1, 128, 2048), (1, 2048, 128)))
    kernel = simulator.simulate(attention_cte, strict=False)
    report = estimate(kernel.run(q, k, v, causal_mask=False, trace=True, values=False))
    assert report.utilization == pytest.approx(0.30, rel=0.35)
