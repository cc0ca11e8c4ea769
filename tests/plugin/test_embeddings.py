"""Prompts that are embeddings, from what a client sends to the rows of a step."""

import base64
import zipfile
from collections.abc import Callable
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform

from tests.plugin.simulation import BLOCK_SIZE, Simulation, answer, embedded, make_config, prompts
from vllm_neuron.plugin.embeddings import EmbeddingsForm, read_embeddings, usable_embeddings

HIDDEN = 8
FORM = EmbeddingsForm(HIDDEN, torch.float32, max_model_len=64)
ON: Any = SimpleNamespace(enable_prompt_embeds=True)
GOOD = torch.arange(3.0 * HIDDEN).view(3, HIDDEN)


def saved(value: Any, **options: Any) -> bytes:
    buffer = BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def read(content: bytes) -> torch.Tensor:
    return read_embeddings(ON, base64.b64encode(content))


def compressed(content: bytes) -> bytes:
    """The archive that torch.save wrote, but deflated."""
    buffer = BytesIO()
    with zipfile.ZipFile(BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


class Claimed:
    """A tensor that is made when the file is read, of whatever lies in memory."""

    def __reduce__(self) -> Any:
        return torch.Tensor, (9999, HIDDEN)


@pytest.mark.parametrize(
    "sent", [GOOD, GOOD[None], GOOD.half(), GOOD.bfloat16(), GOOD.double(), torch.nn.Parameter(GOOD), GOOD.T.clone().T]
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_torch_saves_is_read_and_cast_to_the_models_dtype(sent: torch.Tensor, zipped: bool) -> None:
    got = usable_embeddings(read(saved(sent, _use_new_zipfile_serialization=zipped)), SamplingParams(), FORM)
    assert torch.equal(got, GOOD)
    assert got.dtype == torch.float32 and got.is_contiguous() and not got.requires_grad


def test_a_view_of_a_larger_tensor_is_read() -> None:
    assert torch.equal(read(saved(torch.cat([GOOD, GOOD])[3:])), GOOD)


class Anything:
    """A class that weights_only does not let through."""


FILES = {
    "no base64": (b"!not base64!", "not base64"),
    "nothing": (b"", "torch.load"),
    "half of a file": (base64.b64encode(saved(GOOD)[:200]), "torch.load"),
    "noise": (base64.b64encode(bytes(range(256))), "torch.load"),
    "code": (base64.b64encode(saved(Anything)), "torch.load"),
    "bare numbers": (base64.b64encode(np.zeros((2, HIDDEN)).tobytes()), "torch.load"),
    "a list": (base64.b64encode(saved([GOOD])), "no tensor but a list"),
    "more than it brings": (base64.b64encode(saved(Claimed())), "more elements than it brings"),
    "compressed": (base64.b64encode(compressed(saved(torch.zeros(999, HIDDEN)))), "compressed"),
}


@pytest.mark.parametrize("what", FILES)
def test_what_torch_has_not_saved_is_refused_by_name(what: str) -> None:
    encoded, named = FILES[what]
    with pytest.raises(ValueError, match=r"^prompt_embeds ") as refusal:
        read_embeddings(ON, encoded)
    assert named in str(refusal.value)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    zipped=st.booleans(),
    changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4),
    length=st.integers(0, 4000),
)
def test_a_damaged_file_is_read_or_refused(zipped: bool, changes: list[tuple[int, int]], length: int) -> None:
    content = bytearray(saved(GOOD, _use_new_zipfile_serialization=zipped))
    for position, value in changes:
        content[position % len(content)] = value
    try:
        assert read(bytes(content[: max(length, len(content) // 2)])).dim() == 2
    except VLLMValidationError as refusal:
        assert refusal.parameter == "prompt_embeds"


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: GOOD.to_sparse(), "torch.sparse_coo"),
    "sparse rows": (lambda: GOOD.to_sparse_csr(), "torch.sparse_csr"),
    "huge and sparse": (lambda: torch.sparse_coo_tensor(torch.zeros(2, 0), [], (1 << 20, 1 << 20)), "torch.sparse_coo"),
    "nested": (lambda: torch.nested.nested_tensor([GOOD, GOOD]), "nested"),
    "without contents": (lambda: GOOD.to("meta"), "meta"),
    "whole numbers": (lambda: GOOD.long(), "int64"),
    "truth values": (lambda: GOOD > 0, "bool"),
    "complex numbers": (lambda: GOOD.to(torch.complex64), "complex64"),
    "eight bits": (lambda: GOOD.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "quantized": (lambda: torch.quantize_per_tensor(GOOD, 0.1, 0, torch.qint8), "qint8"),
    "a number": (lambda: torch.tensor(1.0), "has shape []"),
    "a row": (lambda: GOOD[0], "has shape [8]"),
    "a batch": (lambda: torch.stack([GOOD, GOOD]), "has shape [2, 3, 8]"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", TENSORS)
def test_a_tensor_of_another_kind_is_refused_by_name(what: str) -> None:
    make, named = TENSORS[what]
    with pytest.raises(ValueError, match=r"^prompt_embeds ") as refusal:
        read(saved(make()))
    assert named in str(refusal.value)


def test_nothing_is_read_when_the_option_is_off() -> None:
    off: Any = SimpleNamespace(enable_prompt_embeds=False)
    with pytest.raises(ValueError, match="--enable-prompt-embeds"):
        read_embeddings(off, base64.b64encode(saved(GOOD)))


def with_value(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    changed = GOOD.clone().to(dtype)
    changed[1, 5] = value
    return changed


@pytest.mark.parametrize(
    ("embeddings", "params", "named"),
    [
        (torch.zeros(3, HIDDEN + 1), {}, "has shape [3, 9]. It must be [number of tokens, 8]"),
        (torch.zeros(1, 1).expand(3, 1 << 40), {}, "has shape [3, 1099511627776]"),
        (torch.zeros(HIDDEN), {}, "has shape [8]"),
        (torch.zeros(0, HIDDEN), {}, "has shape [0, 8]"),
        (torch.zeros(64, HIDDEN), {}, "has 64 tokens and max_model_len is 64"),
        (torch.zeros(1, 1).expand(1 << 40, HIDDEN), {}, "max_model_len is 64"),
        (with_value(torch.nan), {}, "has nan at [1, 5]"),
        (with_value(-torch.inf), {}, "has -inf at [1, 5]"),
        (with_value(1e300, torch.float64), {}, "has 1e+300 at [1, 5]. Every value must be a finite float32"),
        (GOOD.int(), {}, "has dtype int32"),
        (GOOD.to_sparse(), {}, "torch.sparse_coo"),
        (GOOD, {"prompt_logprobs": 0}, "cannot be combined with prompt_logprobs"),
    ],
)
def test_what_the_engine_cannot_use_is_refused_by_name(
    embeddings: torch.Tensor, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=r"^prompt_embeds ") as refusal:
        usable_embeddings(embeddings, SamplingParams(**params), FORM)
    assert named in str(refusal.value)


def test_requests_are_checked_and_cast_on_their_way_to_the_engine() -> None:
    make_config(enable_prompt_embeds=True, dtype="bfloat16")
    inputs: dict[str, Any] = {"type": "embeds", "prompt_embeds": torch.ones(63, 64)}
    current_platform.validate_request([], SamplingParams(), inputs)
    assert inputs["prompt_embeds"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="hidden size"):
        current_platform.validate_request([], SamplingParams(), {"type": "embeds", "prompt_embeds": torch.ones(3, 8)})


def test_vllm_reads_embeddings_with_our_reader() -> None:
    import vllm.renderers.protocol

    make_config(enable_prompt_embeds=True)
    assert vllm.renderers.protocol.safe_load_prompt_embeds is read_embeddings


PROTOCOLS = pytest.mark.parametrize("v2", ["0", "1"], ids=["v1", "v2"])
FEW_BLOCKS = 1 + 64 // BLOCK_SIZE


def simulation(v2: str, num_blocks: int, **config: Any) -> Simulation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)
        return Simulation(make_config(enable_prompt_embeds=True, **config), num_blocks)


def numbers(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """What embeddings stand for in the simulation: no token ids."""
    return [[1000 + number for number in prompt] for prompt in prompts(lengths, seed)]


@PROTOCOLS
def test_tokens_after_a_preempted_embeddings_prompt_are_tokens(v2: str) -> None:
    running = simulation(v2, FEW_BLOCKS, enable_prefix_caching=False)
    first, second = numbers([20, 20])
    running.add("first", embedded(first), 40)
    running.add("second", embedded(second), 40)
    running.run()
    assert running.trace.preemptions > 0
    assert running.tokens == {"first": answer(first, 40), "second": answer(second, 40)}


@PROTOCOLS
def test_blocks_are_shared_by_equal_embeddings_only(v2: str) -> None:
    running = simulation(v2, 64)
    (one,), (other,) = numbers([3 * BLOCK_SIZE + 2]), numbers([3 * BLOCK_SIZE + 2], seed=1)
    # To vLLM every embedding is the token 0, as in the last of these.
    cases = {"one": one, "again": one, "other": other, "zeros": [0] * len(one), "end": [*one[:-5], *other[-5:]]}
    hits = {"one": 0, "again": 3 * BLOCK_SIZE, "other": 0, "zeros": 0, "end": 2 * BLOCK_SIZE}
    for name, prompt in cases.items():
        running.add(name, prompt if name == "zeros" else embedded(prompt), 4)
        output, _ = running.step()
        while sum(output.num_scheduled_tokens.values()) == 16:
            output, _ = running.step()
        assert running.scheduler.requests[name].num_cached_tokens == hits[name], name
        running.run()
        assert running.tokens[name] == answer(prompt, 4), name


def test_equal_bytes_of_two_dtypes_are_not_shared() -> None:
    """vLLM hashes bytes without their dtype."""
    running = simulation("1", 64)
    halves = torch.full((BLOCK_SIZE, HIDDEN), 1.5, dtype=torch.float16)
    others = halves.view(torch.bfloat16)
    raw = [running.add(f"raw {index}", tensor, 1) for index, tensor in enumerate((halves, others))]
    assert raw[0].block_hashes == raw[1].block_hashes, "vLLM now tells them apart by itself"
    cast = [usable_embeddings(tensor, SamplingParams(), FORM) for tensor in (halves, others)]
    used = [running.add(f"used {index}", tensor, 1) for index, tensor in enumerate(cast)]
    assert used[0].block_hashes != used[1].block_hashes


def test_penalties_do_not_see_the_row_s_last_request() -> None:
    running = simulation("1", 64)
    (prompt,) = numbers([12])
    wanted = answer(prompt, 1)
    running.add("before", [*wanted, *range(5, 16)], 1)
    running.run()
    running.add("penalised", embedded(prompt), 1, repetition_penalty=1e6)
    running.run()
    assert running.tokens["penalised"] == wanted


def test_embeddings_are_forgotten_with_their_request() -> None:
    running = simulation("1", 64)
    for index, prompt in enumerate(numbers([5, 9, 17])):
        running.add(str(index), embedded(prompt), 3)
    running.run()
    for batch in (running.runner.prefill_batch, running.runner.decode_batch):
        assert not batch.input_batch.req_prompt_embeds


arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "length": st.integers(1, 50),
            "max_tokens": st.integers(1, 13),
            "family": st.integers(0, 1),
            "embedded": st.booleans(),
            "arrives": st.integers(0, 40),
            "aborted": st.one_of(st.none(), st.integers(0, 80)),
        }
    ),
    min_size=1,
    max_size=12,
)


@PROTOCOLS
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals, num_blocks=st.integers(FEW_BLOCKS, 3 * FEW_BLOCKS), max_num_seqs=st.integers(1, 5))
def test_random_loads_of_both_kinds(
    v2: str, arrivals: list[dict[str, Any]], num_blocks: int, max_num_seqs: int
) -> None:
    running = simulation(v2, num_blocks, max_num_seqs=max_num_seqs)
    shared = {True: numbers([50, 50], seed=1), False: list(prompts([50, 50], seed=1))}
    wanted: dict[str, list[int]] = {}
    for step in range(81):
        for index, arrival in enumerate(arrivals):
            if arrival["arrives"] == step:
                # Families that share prefixes, so that the prefix cache has hits of all lengths.
                prompt = [*shared[arrival["embedded"]][arrival["family"]][: arrival["length"] - 1], 3 + index]
                running.add(str(index), embedded(prompt) if arrival["embedded"] else prompt, arrival["max_tokens"])
                wanted[str(index)] = answer(prompt, arrival["max_tokens"])
            if arrival["aborted"] == step:
                running.abort(str(index))
        if running.scheduler.has_requests():
            running.step()
    running.run()
    for name, tokens in running.tokens.items():
        complete = arrivals[int(name)]["aborted"] is None
        assert tokens == (wanted[name] if complete else wanted[name][: len(tokens)])
