"""The C++ kernels against their torch twins."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_neuron.kernels import (
    argmax_torch,
    embedding_torch,
    kv_write_torch,
    linear_torch,
    log_sum_exp_torch,
    logits_torch,
    mask_logits_torch,
    paged_attention_torch,
    rms_norm_torch,
    rope_torch,
    silu_mul_torch,
    top_k_torch,
)
from vllm_neuron.kernels.cpu import build, ops
from vllm_neuron.kernels.dispatch import COVERED, OPS, KernelSet, implementation, using

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(got: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """Equal up to `factor` times what rounding to the dtype may change, relative to the largest element."""
    assert got.dtype is expected.dtype
    assert got.is_contiguous()
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[got.dtype] * factor
    scale = expected.double().abs().max().item()
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance * scale)


@every_dtype
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 576, 1536),
        (2, 960, 576),
        (5, 7, 37),
        (6, 64, 32),
        (7, 130, 33),
        (8, 200, 576),
        (13, 3, 5),
        (32, 66, 100),
        (33, 40, 64),
        (200, 64, 48),
        (34, 1, 1),
        (65, 15, 7),
        (131, 17, 9),
        (64, 959, 577),
    ],
)
def test_linear(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=2)
    weight = (random(outputs, inputs, dtype=torch.float32, seed=1) / inputs**0.5).to(dtype)
    check(ops.linear(x, weight), linear_torch.linear(x, weight))
    check(ops.linear(x, weight, bias), linear_torch.linear(x.double(), weight.double(), bias.double()).to(dtype))


@every_dtype
def test_a_row_of_a_product_of_few_does_not_depend_on_how_many_there_are(dtype: torch.dtype) -> None:
    x, weight = random(8, 90, dtype=dtype), random(70, 90, dtype=dtype, seed=1)
    together = ops.linear(x, weight)
    for rows in (1, 2, 3, 4, 7):
        assert torch.equal(ops.linear(x[:rows], weight), together[:rows])


@every_dtype
def test_a_row_of_a_product_of_many_depends_neither_on_how_many_there_are_nor_on_threads(dtype: torch.dtype) -> None:
    # A CPU with AVX512 leaves more than 32 rows to PyTorch.
    most = 32 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 300
    x, weight = random(most, 90, dtype=dtype), random(70, 90, dtype=dtype, seed=1)
    together = ops.linear(x, weight)
    for rows in (9, 13, 31, most // 2):
        assert torch.equal(ops.linear(x[-rows:], weight), together[-rows:])
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 16):
            torch.set_num_threads(number)
            assert torch.equal(ops.linear(x, weight), together)
    finally:
        torch.set_num_threads(threads)


@every_dtype
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 3), (1, 49_152), (8, 5_003), (40, 130)])
def test_logits_are_rounded_to_the_dtype_of_hidden_and_float32(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    hidden, weight = random(rows, 64, dtype=dtype), random(vocabulary, 64, dtype=dtype, seed=1)
    got = ops.logits(hidden, weight)
    assert torch.equal(got, ops.linear(hidden, weight).float()) and got.dtype is torch.float32
    check(got.to(dtype), logits_torch.logits(hidden, weight).to(dtype))


@pytest.mark.parametrize(("columns", "k"), [(1, 1), (7, 3), (64, 64), (65, 64), (300, 256), (1000, 1), (5003, 256)])
@pytest.mark.parametrize("order", ["random", "ties", "rising", "falling", "equal", "mostly -inf", "a NaN"])
def test_top_k(columns: int, k: int, order: str) -> None:
    x = random(3, columns, dtype=torch.float32)
    if order == "ties":
        x = x.mul(2).round().div(2)
    elif order in ("rising", "falling"):
        x = x.sort(descending=order == "falling").values.contiguous()
    elif order == "equal":
        x = torch.full_like(x, 2.0)
    elif order == "mostly -inf":
        x = x.masked_fill(x < 2, -torch.inf)
    elif order == "a NaN":
        x[:, columns // 2] = torch.nan
    # A NaN counts as the least there is; the order of the twin does not put it anywhere in particular.
    values, ids = top_k_torch.top_k(x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), k)
    got_values, got_ids = ops.top_k(x, k)
    assert torch.equal(got_values, values)
    assert got_ids.dtype is ids.dtype is torch.int32 and torch.equal(got_ids, ids)
    if order != "a NaN":
        best = ops.argmax(x)
        assert best.dtype is torch.int32 and torch.equal(best, argmax_torch.argmax(x))


@pytest.mark.parametrize("columns", [1, 8, 31, 33, 500, 152_000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e30])
def test_log_sum_exp(columns: int, scale: float) -> None:
    x = random(6, columns, dtype=torch.float32) * scale
    x[1], x[2] = -torch.inf, x[2].masked_fill(x[2] > 0, -torch.inf)
    x[3, columns // 2 :] = -torch.inf
    x[4] = 50.0
    got = ops.log_sum_exp(x)
    expected = log_sum_exp_torch.log_sum_exp(x.double()).clamp(min=torch.finfo(torch.float32).min)
    assert got.dtype is torch.float32 and got.shape == (6, 1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 500, 5003])
def test_mask_logits(columns: int) -> None:
    x = random(4, columns, dtype=torch.float32)
    words = -(-columns // 32)
    mask = torch.randint(-(2**31), 2**31, (4, words), generator=torch.Generator().manual_seed(1)).int()
    mask[1], mask[2] = -1, 0
    got = ops.mask_logits(x, mask)
    assert torch.equal(got, mask_logits_torch.mask_logits(x, mask))
    assert torch.equal(got[1], x[1]) and (got[2] == -torch.inf).all()
    with pytest.raises(RuntimeError, match="mask_logits"):
        ops.mask_logits(x, mask[:, :0])


@every_dtype
@pytest.mark.parametrize("inputs", [64, 90, 100, 107])
def test_linear_of_a_row_does_not_depend_on_its_batch_whatever_the_width(inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(8, inputs, dtype=dtype), random(11, inputs, dtype=dtype, seed=1)
    together = ops.linear(x, weight)
    for rows in (1, 2, 3, 4):
        assert torch.equal(ops.linear(x[:rows], weight), together[:rows])


@every_dtype
def test_linear_of_strided_rows(dtype: torch.dtype) -> None:
    x, weight = random(4, 96, dtype=dtype)[:, 32:], random(10, 64, dtype=dtype, seed=1)
    check(ops.linear(x, weight), linear_torch.linear(x, weight))


@every_dtype
def test_embedding(dtype: torch.dtype) -> None:
    table, ids = random(11, 20, dtype=dtype), int32(3, 10, 0, 3)
    assert torch.equal(ops.embedding(ids, table), embedding_torch.embedding(ids, table))


@pytest.mark.parametrize("token", [-1, 11])
def test_embedding_of_an_unknown_token_is_refused(token: int) -> None:
    with pytest.raises(IndexError, match=f"token id {token} of a vocabulary of 11"):
        ops.embedding(int32(3, token), random(11, 20, dtype=torch.float32))


@every_dtype
@pytest.mark.parametrize("width", [1, 16, 77, 576])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x, residual = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    check(ops.rms_norm(x, weight, 1e-5), rms_norm_torch.rms_norm(x, weight, 1e-5))
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = rms_norm_torch.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    check(normed, expected)


@every_dtype
@pytest.mark.parametrize("dim", [8, 20, 64, 80])
def test_rope_and_head_norm_of_slices(dim: int, dtype: torch.dtype) -> None:
    """Queries and keys as models have them: slices of one product."""
    qkv = random(6, 15, dim, dtype=dtype)
    q, k = qkv[:, :9], qkv[:, 9:12]
    cos, sin = rope_torch.rope_tables(torch.arange(6, dtype=torch.int32) * 100, torch.rand(dim // 2), 1.2)
    for got, expected in zip(ops.rope(q, k, cos, sin), rope_torch.rope(q, k, cos, sin), strict=True):
        check(got, expected)
    weight = random(dim, dtype=dtype, seed=1)
    check(ops.rms_norm(q, weight, 1e-6), rms_norm_torch.rms_norm(q, weight, 1e-6))


@every_dtype
@pytest.mark.parametrize("width", [3, 16, 50])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate_up = random(5, 2 * width, dtype=dtype) * 5
    gate_up[0, 0], gate_up[1, 0] = 200, -200
    check(ops.silu_mul(gate_up), silu_mul_torch.silu_mul(gate_up))


@every_dtype
def test_kv_write_changes_its_argument(dtype: torch.dtype) -> None:
    caches = [random(4, 8, 3, 20, dtype=dtype, seed=s) for s in (0, 1)]
    k, v = random(5, 9, 20, dtype=dtype, seed=2).split((3, 6), dim=1)
    v, slots = v[:, :3], int32(31, 8, 0, 9, 17)
    expected = kv_write_torch.kv_write(*caches, k, v, slots)
    got = ops.kv_write(*caches, k, v, slots)
    for cache, result, want in zip(caches, got, expected, strict=True):
        assert result is cache
        assert torch.equal(cache, want)


@pytest.mark.parametrize("slot", [-1, 32])
def test_kv_write_outside_of_the_cache_is_refused(slot: int) -> None:
    cache, rows = torch.zeros(4, 8, 1, 4), torch.ones(1, 1, 4)
    with pytest.raises(IndexError, match=f"slot {slot} of a KV cache of 32"):
        ops.kv_write(cache, cache.clone(), rows, rows, int32(slot))


ATTENTION = [
    # requests, rows per request, query heads, KV heads, head size, block size, context, window
    (1, 1, 9, 3, 64, 32, 1024, None),
    (8, 1, 9, 3, 64, 32, 320, None),
    (3, 2, 4, 4, 20, 8, 64, 5),
    (2, 1, 40, 4, 128, 16, 640, 100),
    (1, 3, 32, 1, 256, 16, 48, None),
    (1, 16, 6, 2, 7, 4, 40, None),
    (1, 40, 9, 3, 64, 16, 96, None),
    (2, 20, 4, 2, 80, 8, 48, 7),
    (1, 300, 9, 3, 64, 32, 512, None),
    (1, 200, 20, 1, 64, 32, 1024, 100),
]


@every_dtype
@pytest.mark.parametrize("sizes", ATTENTION, ids=str)
def test_paged_attention(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shuffled blocks, every position that no row sees is NaN, and the last rows of a prefill are padding."""
    requests, rows, heads, kv_heads, dim, block_size, context, window = sizes
    generator = torch.Generator().manual_seed(3)
    blocks = requests * context // block_size
    k_cache, v_cache = (random(blocks + 3, block_size, kv_heads, dim, dtype=dtype, seed=s) for s in (0, 1))
    table = (1 + torch.randperm(blocks + 2, generator=generator)[:blocks]).view(requests, -1).int()
    starts = torch.randint(0, context - rows + 1, (requests, 1), generator=generator)
    positions = (starts + torch.arange(rows)).int()
    live = rows if rows < 30 else rows - 10
    positions[:, live:] = positions[:, live - 1 : live]
    seen = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for request, row_positions in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, row_positions[0] - window + 1)
        for position in range(first, row_positions[-1] + 1):
            seen[table[request, position // block_size], position % block_size] = True
    k_cache[~seen] = torch.nan
    v_cache[~seen] = torch.nan
    q = random(requests * rows, heads, dim, dtype=dtype, seed=2)

    got = ops.paged_attention(q, k_cache, v_cache, table, positions.flatten(), dim**-0.5, window)
    clean = k_cache.nan_to_num().float(), v_cache.nan_to_num().float()
    expected = paged_attention_torch.paged_attention(
        q.float(), *clean, table, positions.flatten(), dim**-0.5, window
    ).to(dtype)
    assert got.isfinite().all()
    unpadded = [x.view(requests, rows, heads, dim)[:, :live].contiguous() for x in (got, expected)]
    check(unpadded[0], unpadded[1], factor=2)


def test_attention_of_a_row_does_not_depend_on_its_batch() -> None:
    k_cache, v_cache = (random(40, 16, 2, 32, dtype=torch.bfloat16, seed=s) for s in (0, 1))
    table = (1 + torch.randperm(39, generator=torch.Generator().manual_seed(0))[:36]).view(2, 18).int()
    q, positions = random(2, 4, 32, dtype=torch.bfloat16, seed=2), int32(270, 30)
    together = ops.paged_attention(q, k_cache, v_cache, table, positions, 0.2)
    for row in (0, 1):
        alone = ops.paged_attention(
            q[row : row + 1], k_cache, v_cache, table[row : row + 1], positions[row : row + 1], 0.2
        )
        assert torch.equal(alone[0], together[row])


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_calls_from_several_threads_at_once(two_threads: None) -> None:
    weight = random(3000, 256, dtype=torch.bfloat16, seed=1)
    inputs = [random(3, 256, dtype=torch.bfloat16, seed=seed) for seed in range(4)]
    expected = [ops.linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        wrong.extend(index for _ in range(100) if not torch.equal(ops.linear(inputs[index], weight), expected[index]))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_can_use_the_kernels() -> None:
    code = """
import os, torch
from vllm_neuron.kernels.cpu import ops
torch.set_num_threads(2)
x, w = torch.randn(3, 256), torch.randn(3000, 256)
expected = ops.linear(x, w)
child = os.fork()
if child == 0:
    same = all(torch.equal(ops.linear(x, w), expected) for _ in range(50))
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_dtypes_that_do_not_match_are_refused() -> None:
    with pytest.raises(RuntimeError, match="linear"):
        ops.linear(torch.ones(1, 4), torch.ones(2, 4).bfloat16())
    with pytest.raises(RuntimeError, match="int32"):
        ops.embedding(torch.tensor([1]), torch.ones(2, 4))


def test_dispatch_takes_these_kernels() -> None:
    with using(KernelSet.CPU):
        taken = {op for op in OPS if implementation(op).__module__ == ops.__name__}
    assert taken == COVERED[KernelSet.CPU] == set(OPS) - {"rope_tables"}


def stand_in_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """A shell script in place of g++, and an empty cache."""
    compiler = folder / "g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))


def test_the_build_is_kept_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in_compiler(monkeypatch, tmp_path, 'while [ "$1" != -o ]; do shift; done\necho built > "$2"')
    built = build.library()
    assert built.read_text() == "built\n"
    monkeypatch.setattr(build, "_build", lambda target: pytest.fail("built again"))
    assert build.library() == built
    assert [path.name for path in built.parent.iterdir() if path.suffix == ".so"] == [built.name]


def test_no_compiler_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    with pytest.raises(build.KernelBuildError, match=r"g\+\+.*apt install.*VLLM_NEURON_DISABLE_NKI_KERNELS=1"):
        build.library()
    assert "g++" in str(build.fault())


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in_compiler(monkeypatch, tmp_path, "echo 'ops.cpp: no such flag' >&2\nexit 3")
    with pytest.raises(build.KernelBuildError, match=r"exit code 3.*no such flag"):
        build.library()
    assert not list((tmp_path / "cache").rglob("*.so"))
