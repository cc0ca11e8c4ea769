"""Request parameters through the HTTP interface: what they do, and how wrong ones are refused."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.checkpoints import EOS, greedy_oracle, prompt, tokenizer
from tests.server.completions import assert_next_is_right, complete, token_ids
from tests.server.harness import MODEL_NAME, Server, http

IDS = prompt(30, seed=21)


@pytest.fixture(scope="module")
def greedy(tiny: Path) -> list[int]:
    """Greedy tokens after IDS, which end with a whole character: a stream does not send halves of one."""
    ids = greedy_oracle(tiny, IDS, 24)
    while text_of(ids).endswith("\N{REPLACEMENT CHARACTER}"):
        ids = ids[:-1]
    assert len(ids) >= 16
    return ids


text_of = tokenizer().decode


def test_server_streamed_text_is_the_whole_text(server: Server, greedy: list[int]) -> None:
    whole = complete(server, IDS, len(greedy)).choices[0].text
    chunks = list(complete(server, IDS, len(greedy), stream=True, stream_options={"include_usage": True}))
    assert whole == text_of(greedy)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens == len(greedy)


def test_server_one_token(server: Server, greedy: list[int]) -> None:
    reply = complete(server, IDS, 1)
    assert list(reply.choices[0].token_ids) == greedy[:1]
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("length", [1, 127, 128, 129, 511])
def test_server_prompt_lengths_at_the_edges(server: Server, tiny: Path, length: int) -> None:
    ids = prompt(length, seed=length)
    count = min(3, 512 - length)
    assert token_ids(server, ids, count) == greedy_oracle(tiny, ids, count)


def test_server_output_ends_where_the_model_length_ends(server: Server, tiny: Path) -> None:
    ids = prompt(508, seed=3)
    assert token_ids(server, ids, 4) == greedy_oracle(tiny, ids, 4)
    with pytest.raises(openai.BadRequestError, match="512"):
        token_ids(server, ids, 5)


def test_server_stop_string_is_left_out_or_kept(server: Server, greedy: list[int]) -> None:
    whole = text_of(greedy)
    stop = whole[5:8]
    cut = whole.index(stop)
    left_out = complete(server, IDS, len(greedy), stop=[stop]).choices[0]
    assert (left_out.text, left_out.finish_reason, left_out.stop_reason) == (whole[:cut], "stop", stop)
    kept = complete(server, IDS, len(greedy), stop=[stop], include_stop_str_in_output=True).choices[0]
    assert kept.text == whole[: cut + len(stop)]
    streamed = complete(server, IDS, len(greedy), stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[:cut]


def test_server_stop_token(server: Server, greedy: list[int]) -> None:
    token = greedy[6]
    choice = complete(server, IDS, len(greedy), stop_token_ids=[token]).choices[0]
    assert list(choice.token_ids) == greedy[: greedy.index(token) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)


def test_server_end_of_sequence_stops_unless_ignored(server: Server, tiny: Path) -> None:
    """logit_bias makes end-of-sequence the next token."""
    bias = {str(EOS): 100}
    stopped = complete(server, IDS, 8, ignore_eos=False, logit_bias=bias).choices[0]
    assert (list(stopped.token_ids), stopped.finish_reason, stopped.text) == ([EOS], "stop", "")
    ignored = complete(server, IDS, 8, logit_bias=bias).choices[0]
    assert (list(ignored.token_ids), ignored.finish_reason) == ([EOS] * 8, "length")


def test_server_special_tokens_are_shown_on_request(server: Server) -> None:
    bias = {str(EOS): 100}
    hidden = complete(server, IDS, 2, logit_bias=bias).choices[0].text
    shown = complete(server, IDS, 2, logit_bias=bias, skip_special_tokens=False).choices[0].text
    assert (hidden, shown) == ("", "</s></s>")


def test_server_truncated_prompt_keeps_its_end(server: Server, tiny: Path) -> None:
    reply = complete(server, IDS, 4, truncate_prompt_tokens=10)
    assert list(reply.choices[0].token_ids) == greedy_oracle(tiny, IDS[-10:], 4)
    assert reply.usage.prompt_tokens == 10


def test_server_three_choices(server: Server) -> None:
    arguments: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5}
    first = [choice.text for choice in complete(server, IDS, 8, **arguments).choices]
    assert len(first) == 3
    assert len(set(first)) > 1
    assert [choice.text for choice in complete(server, IDS, 8, **arguments).choices] == first


def test_server_logprobs_name_the_greedy_token_first(server: Server, greedy: list[int]) -> None:
    logprobs = complete(server, IDS, 4, logprobs=2, return_tokens_as_token_ids=True).choices[0].logprobs
    assert logprobs.tokens == [f"token_id:{token}" for token in greedy[:4]]
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values())


TOO_LONG = {"prompt": prompt(512, seed=1), "max_tokens": 1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prompt of max_model_len": (TOO_LONG, "512"),
    "prompt longer than max_model_len": ({"prompt": prompt(600, seed=1), "max_tokens": 1}, "512"),
    "temperature": ({"temperature": -1}, "temperature"),
    "top_p": ({"top_p": 1.5}, "top_p"),
    "top_k": ({"top_k": -5}, "top_k"),
    "min_p": ({"min_p": 2}, "min_p"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "n": ({"n": 0}, "n"),
    "repetition_penalty": ({"repetition_penalty": 0}, "repetition_penalty"),
    "presence_penalty": ({"presence_penalty": 5}, "presence_penalty"),
    "token id": ({"prompt": [5, 512]}, "512"),
    "negative token id": ({"prompt": [5, -1]}, "-1"),
    "logit_bias": ({"logit_bias": {"512": 1}}, "512"),
    "logprobs": ({"logprobs": 10_000}, "logprobs"),
    "empty prompt": ({"prompt": []}, ""),
    "embeddings": ({"prompt": None, "prompt_embeds": "AAAA"}, "--enable-prompt-embeds"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("what", REFUSED)
def test_server_refuses(server: Server, what: str, stream: bool) -> None:
    changes, named = REFUSED[what]
    body = {"model": MODEL_NAME, "prompt": IDS, "max_tokens": 4, "temperature": 0, "stream": stream, **changes}
    status, answer = http("POST", f"{server.url}/v1/completions", body)
    assert status == 400, answer
    assert named in str(answer)


def test_server_refuses_another_model_by_name(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        server.client.completions.create(model="other", prompt=IDS, max_tokens=1)


def test_server_is_right_after_all_refusals(server: Server, tiny: Path) -> None:
    for changes, _ in REFUSED.values():
        http("POST", f"{server.url}/v1/completions", {"model": MODEL_NAME, "prompt": IDS, "max_tokens": 4, **changes})
    assert_next_is_right(server, tiny)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
