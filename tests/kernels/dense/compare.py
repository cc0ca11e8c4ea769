"""Random arguments, and how a kernel's results are compared with its twin's."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of a difference, by the largest value of the result."""

few = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
dtypes = st.sampled_from(list(TOLERANCE))
cores = st.sampled_from([1, 2])


def tokens(most: int = 300) -> st.SearchStrategy[int]:
    """Numbers of rows, those around the sizes where kernels change their way among them."""
    edges = [n for n in (1, 2, 31, 32, 33, 127, 128, 129, 256, 257, 512, 513) if n <= most]
    return st.sampled_from(edges) | st.integers(1, most)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """The same for the same shape."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def tables(rows: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [rows, half]."""
    angles = torch.arange(rows).float().unsqueeze(1) * torch.linspace(1.0, 0.01, half)
    return angles.cos(), angles.sin()


def same(results, wanted) -> None:
    """Results of a kernel are those of its twin."""
    for result, want in zip(results, wanted, strict=True):
        assert result.shape == want.shape
        assert result.dtype == want.dtype
        tolerance = TOLERANCE[want.dtype]
        most = want.abs().max().item()
        torch.testing.assert_close(result, want, rtol=tolerance, atol=tolerance * most)


def identical(results, wanted) -> None:
    """The same, value by value (zeros of either sign are equal)."""
    for result, want in zip(results, wanted, strict=True):
        assert result.shape == want.shape
        assert result.dtype == want.dtype
        assert torch.equal(result.double(), want.double())
