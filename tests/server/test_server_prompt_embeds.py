"""Prompt embeddings through the completions API, on a server of their own: on the native route in float32.

What `LLM` does with them on the XLA route is in tests/serving/test_real_prompt_embeds.py.
"""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import embedding_rows, embeddings_oracle, greedy_oracle, prompt, random_embeddings
from tests.server.completions import assert_next_is_right
from tests.server.harness import MODEL_NAME, Server, http, serving

CONFIG = {"neuron_config": {"num_batched_tokens_buckets": [128], "num_seqs_buckets": [4]}}
ARGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4", "--block-size", "32"),
    *("--num-gpu-blocks-override", "40", "--enable-prompt-embeds"),
)
"""39 blocks hold two requests of full length; of four at once some are preempted."""


@pytest.fixture(scope="module")
def embeds(tiny: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("prompt-embeds")
    with serving(tiny, "neuron_native", folder, cache, ARGS, CONFIG) as running:
        yield running


def encoded(value: Any) -> str:
    buffer = BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def body(embeddings: Any, **extra: Any) -> dict[str, Any]:
    sent = {"prompt_embeds": embeddings, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL_NAME, "return_token_ids": True, **sent, **extra}


def choices(server: Server, embeddings: Any, **extra: Any) -> list[list[int]]:
    status, reply = http("POST", f"{server.url}/v1/completions", body(embeddings, **extra))
    assert status == 200, reply
    return [choice["token_ids"] for choice in sorted(reply["choices"], key=lambda choice: choice["index"])]


def test_server_stock_client_sends_embeddings(embeds: Server, tiny: Path) -> None:
    ids = prompt(30, seed=1)
    extra = body(encoded(embedding_rows(tiny, ids)))
    given = {name: extra.pop(name) for name in ("model", "max_tokens", "temperature")}
    reply = embeds.client.completions.create(prompt=None, extra_body=extra, **given)
    assert reply.choices[0].token_ids == greedy_oracle(tiny, ids, 6)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (30, 6)
    streamed = embeds.client.completions.create(prompt=None, extra_body=extra, stream=True, **given)
    assert "".join(chunk.choices[0].text for chunk in streamed) == reply.choices[0].text


def test_server_takes_both_kinds_in_one_request(embeds: Server, tiny: Path) -> None:
    first, second, ids = random_embeddings(40, seed=1), random_embeddings(7, seed=2), prompt(12, seed=3)
    wanted = [embeddings_oracle(tiny, first, 6), embeddings_oracle(tiny, second, 6), greedy_oracle(tiny, ids, 6)]
    assert choices(embeds, [encoded(first), encoded(second[None])], prompt=ids) == wanted


def test_server_takes_both_kinds_at_once(embeds: Server, tiny: Path) -> None:
    prompts = [random_embeddings(5 + 9 * index, seed=10 + index) for index in range(6)]
    ids = [prompt(5 + 9 * index, seed=10 + index) for index in range(6)]
    with ThreadPoolExecutor(12) as pool:
        from_embeddings = pool.map(lambda p: choices(embeds, encoded(p.bfloat16().float())), prompts)
        from_ids = pool.map(lambda i: choices(embeds, None, prompt=i), ids)
        wanted = [[embeddings_oracle(tiny, p.bfloat16().float(), 6)] for p in prompts]
        assert list(from_embeddings) == wanted
        assert list(from_ids) == [[greedy_oracle(tiny, i, 6)] for i in ids]


def test_server_takes_rows_of_the_embedding_table_for_tokens(embeds: Server, tiny: Path) -> None:
    for length in (1, 32, 128, 129, 300):
        ids = prompt(length, seed=length)
        assert choices(embeds, encoded(embedding_rows(tiny, ids))) == [greedy_oracle(tiny, ids, 6)], length


def test_server_shares_blocks_of_equal_embeddings_only(embeds: Server, tiny: Path) -> None:
    one, other = random_embeddings(150, seed=20), random_embeddings(150, seed=21)
    longer = torch.cat([one, other[:100]])
    for embeddings, shared in ((one, 0), (one, 128), (other, 0), (longer, 128), (one.double(), 128)):
        before = embeds.metric("vllm:prefix_cache_hits_total")
        assert choices(embeds, encoded(embeddings)) == [embeddings_oracle(tiny, embeddings.float(), 6)]
        assert embeds.metric("vllm:prefix_cache_hits_total") - before == shared


def test_server_resumes_preempted_embeddings(embeds: Server, tiny: Path) -> None:
    prompts = [random_embeddings(400, seed=30 + index) for index in range(4)]
    before = embeds.metric("vllm:num_preemptions_total")
    # In one request, so that all are there before the first is done.
    answers = choices(embeds, [encoded(p) for p in prompts], max_tokens=40)
    assert answers == [embeddings_oracle(tiny, p, 40) for p in prompts]
    assert embeds.metric("vllm:num_preemptions_total") > before


def test_server_casts_embeddings_to_the_models_dtype(embeds: Server, tiny: Path) -> None:
    half = random_embeddings(20, seed=4).half()
    wanted = [embeddings_oracle(tiny, half.float(), 6)]
    assert choices(embeds, encoded(half)) == choices(embeds, encoded(half.double())) == wanted


def test_server_truncates_embeddings_as_it_does_tokens(embeds: Server, tiny: Path) -> None:
    embeddings = random_embeddings(30, seed=5)
    wanted = [embeddings_oracle(tiny, embeddings[-10:], 6)]
    assert choices(embeds, encoded(embeddings), truncate_prompt_tokens=10) == wanted


GOOD = torch.ones(3, 64)
NOT_FINITE = torch.ones(3, 64)
NOT_FINITE[2, 7] = torch.inf
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "hidden size": (encoded(torch.ones(3, 65)), {}, "[3, 65]"),
    "one dimension": (encoded(torch.ones(64)), {}, "[64]"),
    "a batch": (encoded(torch.ones(2, 3, 64)), {}, "[2, 3, 64]"),
    "no tokens": (encoded(torch.ones(0, 64)), {}, "empty"),
    "whole numbers": (encoded(torch.ones(3, 64).int()), {}, "int32"),
    "nan": (encoded(GOOD * torch.nan), {}, "nan at [0, 0]"),
    "infinity": (encoded(NOT_FINITE), {}, "inf at [2, 7]"),
    "beyond float32": (encoded(GOOD.double() * 1e300), {}, "finite float32"),
    "max_model_len": (encoded(torch.ones(512, 64)), {"max_tokens": 1}, "512"),
    "a shape without elements": (encoded(torch.ones(1).expand(1 << 40, 64)), {}, "1099511627776"),
    "no base64": ("??", {}, "base64"),
    "no file": ("", {}, "torch.load"),
    "noise": (base64.b64encode(bytes(999)).decode(), {}, "torch.load"),
    "no tensor": (encoded({"embeddings": GOOD}), {}, "dict"),
    "sparse": (encoded(GOOD.to_sparse()), {}, "sparse"),
    "huge and sparse": (encoded(torch.sparse_coo_tensor(size=(1 << 20, 1 << 20))), {}, "sparse"),
    "one of two": ([encoded(GOOD), encoded(torch.ones(3, 65))], {}, "[3, 65]"),
    "numbers in the request": ([[0.5, 0.5]], {}, "prompt_embeds"),
    "nothing": ([], {}, "prompt_embeds"),
    "echo": (encoded(GOOD), {"echo": True}, "Echo"),
    "prompt_logprobs": (encoded(GOOD), {"prompt_logprobs": 1}, "prompt_logprobs"),
    "beam search": (encoded(GOOD), {"use_beam_search": True, "n": 2}, ""),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("what", REFUSED)
def test_server_refuses(embeds: Server, what: str, stream: bool) -> None:
    embeddings, extra, named = REFUSED[what]
    status, answer = http("POST", f"{embeds.url}/v1/completions", body(embeddings, stream=stream, **extra))
    assert status == 400, answer
    assert named in str(answer)


def test_server_is_right_beside_refusals(embeds: Server, tiny: Path) -> None:
    good = random_embeddings(50, seed=6)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(choices, embeds, encoded(good)) for _ in range(4)]
        refused = [
            pool.submit(http, "POST", f"{embeds.url}/v1/completions", body(embeddings, **extra))
            for embeddings, extra, _ in REFUSED.values()
        ]
    assert {future.result()[0] for future in refused} == {400}
    assert [future.result() for future in answers] == [[embeddings_oracle(tiny, good, 6)]] * 4
    assert_next_is_right(embeds, tiny)
    assert embeds.metric("vllm:kv_cache_usage_perc") == 0
    assert embeds.rpc("graph_statistics")["compiles_after_warmup"] == 0
