"""The sampler against vLLM's, run as it stands and as both routes compile it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU, Route
from vllm_neuron.routes.xla import XlaRoute
from vllm_neuron.sampling import (
    MAX_LOGPROBS,
    GreedyInputs,
    SampledWithLogprobs,
    SamplingInputs,
    Uniforms,
    mask_of,
    pick_greedily,
    sample,
)

ROWS = 14
SIZES = [(9, 9), (33, 40), (300, 300)]
"""(vocabulary, columns of the logits): one whose mask has spare bits, one with padded columns, one of more than 256."""

ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
FORMS = ["eager", "native", "xla"]
Sampler = Callable[[torch.Tensor, SamplingInputs], SampledWithLogprobs]


@cache
def sampler(form: str, vocab: int, columns: int, greedy: bool = False) -> Any:
    """The sampler of ROWS rows in one of its forms; compiled ones take these shapes only."""

    def step(weights: Any, kv_cache: Any, arguments: Any) -> Any:
        return (pick_greedily if greedy else sample)(*arguments, vocab), kv_cache

    if form == "eager":
        return lambda logits, inputs: step({}, [], (logits, inputs))[0]
    route: Route = NativeRoute(CPU) if form == "native" else XlaRoute(CPU)
    rows = inputs(vocab)
    with using(KernelSet.CPU if form == "native" else KernelSet.TORCH):
        arguments = (torch.zeros(ROWS, columns), GreedyInputs(rows.mask) if greedy else rows)
        executable = route.trace("sampler", step, {}, [], arguments).lower().compile()
    weights, kv_cache = route.place_weights({}), route.allocate_kv_cache((), torch.float32)
    return lambda logits, inputs: executable(weights, kv_cache, (logits, inputs))[0]


def inputs(vocab: int, **changes: Any) -> SamplingInputs:
    """Rows without limits at temperature 1; a change is one value for all rows or a list of ROWS values."""

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        values = value if isinstance(value, list) else [value] * ROWS
        return torch.tensor(values, dtype=dtype)

    mask = torch.full((ROWS, -(-vocab // 32)), -1, dtype=torch.int32)
    for row, allowed in enumerate(changes.pop("allowed", [])):
        if allowed is not None:
            mask[row] = torch.from_numpy(mask_of(allowed, vocab))
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "uniforms": 0.0, **changes}
    return SamplingInputs(
        column(values["temperature"], torch.float32),
        column(values["top_k"], torch.int32),
        column(values["top_p"], torch.float32),
        column(values["uniforms"], torch.float32),
        mask,
    )


def kept_by_vllm(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """What vLLM's sampler makes of logits [V]: -inf where a token is not kept."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    vocab = logits.shape[0]
    k = torch.tensor([top_k if 0 < top_k < vocab else min(256, vocab)])
    return apply_top_k_top_p(logits[None] / temperature, k, torch.tensor([top_p]))[0]


@dataclass(frozen=True)
class Kept:
    """The tokens that may be sampled, in order, and the uniform number where each begins; the last entry is 1."""

    ids: list[int]
    starts: list[float]


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> Kept:
    """vLLM's kept set, with ties at its edge resolved to the lowest token, as far as vLLM leaves that open."""
    scaled = kept_by_vllm(logits, temperature, top_k, top_p)
    order = torch.sort(logits, descending=True, stable=True).indices
    count = min(int((scaled > -torch.inf).sum()), 256)
    ids = order[:count]
    mass = torch.softmax(logits.double() / temperature, -1)[ids].cumsum(0)
    return Kept(ids.tolist(), [0.0, *(mass / mass[-1]).tolist()])


logits_of_few_values = st.lists(st.sampled_from([-3.0, -1.0, 0.0, -0.0, 0.5, 2.0]), min_size=9, max_size=9)
logits_of_any_value = st.lists(st.floats(-8, 8, width=16), min_size=9, max_size=9)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    values=logits_of_few_values | logits_of_any_value,
    temperature=st.floats(0.125, 4, width=16),
    top_k=st.integers(-1, 11),
    top_p=st.floats(0.0625, 1, width=16),
)
def test_each_kept_token_has_its_own_piece_of_the_uniforms(
    form: str, values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.tensor(values)
    scaled = kept_by_vllm(logits, temperature, top_k, 1.0).double()
    probabilities = torch.softmax(scaled, -1).sort(descending=True).values
    # On the very edge of top_p rounding decides, in vLLM too.
    before = probabilities.cumsum(0) - probabilities
    assume(top_p == 1 or float((before - top_p).abs().min()) > 1e-5)
    wanted = kept(logits, temperature, top_k, top_p)
    # Pieces that are narrower than a float's step cannot be hit.
    pieces = zip(wanted.ids, wanted.starts[:-1], wanted.starts[1:], strict=True)
    hit = {token: (start + end) / 2 for token, start, end in pieces if end - start > 1e-5}
    uniforms = [*hit.values(), *[0.0] * (ROWS - 1 - len(hit)), ALMOST_ONE]
    found = sampler(form, 9, 9)(
        logits.repeat(ROWS, 1), inputs(9, temperature=temperature, top_k=top_k, top_p=top_p, uniforms=uniforms)
    ).token_ids.tolist()
    assert found[: len(hit)] == list(hit)
    assert set(found[len(hit) : -1]) <= {wanted.ids[0]}
    assert found[-1] in wanted.ids


@pytest.mark.parametrize(("vocab", "columns"), SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_sampled_each_in_its_own_way(form: str, vocab: int, columns: int) -> None:
    """Greedy beside random, limits, masks, extreme temperatures; no padded column is ever sampled."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, columns, generator=generator).mul(3).bfloat16().float()
    logits[:, vocab:] = 50.0
    parameters: dict[str, list[Any]] = {
        "temperature": [0.0, 1e-6, 0.01, 0.7, 1.0, 1.0, 1.0, 100.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
        "top_k": [0, 5, 0, 3, 1, 256, -1, 0, 0, 0, vocab, 0, 0, 0],
        "top_p": [1.0, 0.1, 0.9, 0.9, 1.0, 0.9, 0.2, 1.0, 1e-6, 1.0, 0.5, 1.0, 1.0, 0.0],
        "uniforms": torch.rand(ROWS, generator=generator).tolist(),
        "allowed": [None] * 9 + [[vocab - 1], [0, 3, vocab - 1], [2, 5, 7], [4], None],
    }
    got = sampler(form, vocab, columns)(logits, inputs(vocab, **parameters))
    for row in range(ROWS - 1):
        own = logits[row, :vocab].clone()
        if parameters["allowed"][row] is not None:
            own[[i for i in range(vocab) if i not in parameters["allowed"][row]]] = -torch.inf
        if parameters["temperature"][row] < 1e-5:
            wanted = int(own.argmax())
        else:
            choices = kept(own, *(parameters[name][row] for name in ("temperature", "top_k", "top_p")))
            edges = np.array(choices.starts)
            assert np.abs(edges[1:-1] - parameters["uniforms"][row]).min(initial=1) > 1e-6, "a clear case"
            wanted = choices.ids[int(np.searchsorted(edges, parameters["uniforms"][row], "right")) - 1]
        assert int(got.token_ids[row]) == wanted, row
        check_logprobs(got, row, own)


def check_logprobs(got: SampledWithLogprobs, row: int, logits: torch.Tensor) -> None:
    """vLLM's raw logprobs of a row: the sampled token's, the best ones' in order, and its rank."""
    logprobs = logits.double().log_softmax(-1)
    count = min(MAX_LOGPROBS, len(logits))
    ids = got.logprob_ids[row].tolist()
    assert ids[0] == int(got.token_ids[row])
    best = torch.sort(logits, descending=True, stable=True).indices[:count].tolist()
    assert ids[1:] == best
    torch.testing.assert_close(got.logprobs[row].double(), logprobs[ids], rtol=0, atol=1e-4)
    assert int(got.ranks[row]) == int((logits >= logits[ids[0]]).sum())


@pytest.mark.parametrize("greedy", [True, False], ids=["argmax-only", "sampler"])
@pytest.mark.parametrize("form", FORMS)
def test_greedy_takes_the_lowest_of_the_best(form: str, greedy: bool) -> None:
    """bfloat16 logits are full of ties, and zeros come with both signs."""
    vocab = columns = 300
    logits = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(2)).clamp(max=0).mul(4).round().div(4)
    logits[1, 17:] = -0.0
    logits[2] = torch.where(torch.arange(columns) % 3 == 1, 0.0, -0.0)
    logits[3] = -torch.inf
    logits[4] = 7.0
    rows = inputs(vocab, temperature=0.0, allowed=[None] * 5 + [range(40, vocab), [299]])
    got = sampler(form, vocab, columns, greedy)(logits, GreedyInputs(rows.mask) if greedy else rows).token_ids
    masked = logits.clone()
    masked[5, :40] = masked[6, :299] = -torch.inf
    assert got.dtype is torch.int32
    assert got.tolist() == [row.index(max(row)) for row in masked.tolist()]


@pytest.mark.parametrize("form", FORMS)
def test_ties_beyond_the_candidates_go_to_the_lowest_tokens(form: str) -> None:
    logits = torch.zeros(ROWS, 300)
    logits[:, 290] = 1.0
    found = sampler(form, 300, 300)(
        logits, inputs(300, temperature=0.5, uniforms=[i / (ROWS - 1) * ALMOST_ONE for i in range(ROWS)])
    ).token_ids.tolist()
    assert found[0] == 290 and found[-1] == 254 and found[1:] == sorted(found[1:])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_nan_and_no_forbidden_token_comes_out_at_the_edges(form: str) -> None:
    logits = torch.full((ROWS, 9), -torch.inf)
    logits[:, 4] = 3.0
    logits[1] = -torch.inf
    logits[2:] = torch.tensor([-1e30, 1e30, 0, 0, 0, 0, 0, 0, 0])
    uniforms = [ALMOST_ONE] * ROWS
    temperature = [1.0, 1.0, 0.01, 0.0, 100.0] + [1.0] * (ROWS - 5)
    got = sampler(form, 9, 9)(logits, inputs(9, temperature=temperature, uniforms=uniforms, top_p=0.5))
    assert got.token_ids.tolist() == [4, 0] + [1] * (ROWS - 2)
    assert not got.logprobs.isnan().any()


def test_both_routes_sample_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        logits = torch.randn(ROWS, 300, generator=generator).mul(2).bfloat16().float()
        changes = {
            "temperature": (torch.rand(ROWS, generator=generator) * 2).mul(torch.arange(ROWS) % 4 > 0).tolist(),
            "top_k": torch.randint(-1, 300, (ROWS,), generator=generator).tolist(),
            "top_p": torch.rand(ROWS, generator=generator).clamp(min=0.01).tolist(),
            "uniforms": torch.rand(ROWS, generator=generator).tolist(),
        }
        eager, native, xla = (sampler(form, 300, 300)(logits, inputs(300, **changes)) for form in FORMS)
        for other in (native, xla):
            assert torch.equal(other.token_ids, eager.token_ids)
            assert torch.equal(other.logprob_ids, eager.logprob_ids) and torch.equal(other.ranks, eager.ranks)
            torch.testing.assert_close(other.logprobs, eager.logprobs)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, -1, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (0.8, 20, 0.95)]
)
def test_samples_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """With the random numbers that requests get: one position of many requests, and many positions of one."""
    logits = torch.randn(60, generator=torch.Generator().manual_seed(4)) * 1.5
    count = 20_000
    one = Uniforms(0, 123)
    numbers = [Uniforms(0, 1000 + i)[7] for i in range(count // 2)] + [one[i] for i in range(count // 2)]
    rows = SamplingInputs(
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.tensor(numbers),
        torch.full((count, 2), -1, dtype=torch.int32),
    )
    found = torch.bincount(sample(logits.expand(count, 60), rows, 60).token_ids, minlength=60)
    mass = torch.softmax(kept_by_vllm(logits, temperature, top_k, top_p).double(), -1)
    assert (found[mass == 0] == 0).all()
    # The approximation wants several expected samples in each bin.
    rare = mass * count < 10
    bins = [(found[i].item(), mass[i].item() * count) for i in range(60) if not rare[i]]
    bins += [(found[rare].sum().item(), mass[rare].sum().item() * count)] if mass[rare].sum() * count > 1 else []
    observed, expected = (np.array(side) for side in zip(*bins, strict=True))
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 0.001
