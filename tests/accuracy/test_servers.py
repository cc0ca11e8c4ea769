"""Two running servers, asked for scores in whichever way both answer."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.accuracy.fake_server import answering, best, completion, scores
from vllm_neuron.accuracy.servers import OpenAIServer, ServerError, continue_greedily, scores_of_both
from vllm_neuron.cli.main import app

PROMPT = "3 1 4"


def forced_tokens(count: int) -> list[int]:
    tokens = [4]
    for _ in range(count):
        tokens.append(best(tokens[-1]))
    return tokens[1:]


@pytest.mark.parametrize(
    ("abilities", "method"),
    [
        ({}, "prompt_logprobs"),
        ({"prompt_logprobs": False}, "echo"),
        ({"prompt_logprobs": False, "echo": False}, "a request per token"),
        ({"prompt_logprobs": False, "ids": False}, "echo"),
    ],
)
def test_both_servers_are_asked_in_the_same_way(abilities: dict[str, bool], method: str) -> None:
    with answering(completion()) as first_url, answering(completion(**abilities)) as second_url:
        first, second = OpenAIServer(first_url), OpenAIServer(second_url)
        asked = second if "ids" in abilities else first
        forced = continue_greedily(asked, PROMPT, 5)
        used, ours, theirs = scores_of_both(first, second, forced, 3)
        assert used == method
        assert ours == theirs and len(ours) == 5
        for position, token in enumerate([4, *forced_tokens(4)]):
            whole = scores(token)
            top = sorted(whole, key=lambda index: -whole[index])[:3]
            assert {int(name) for name in ours[position]} == set(top)
            assert sorted(ours[position].values()) == pytest.approx(sorted(whole[index] for index in top))
        first.close()
        second.close()


def test_what_each_server_answered_is_said_where_no_way_works() -> None:
    def nothing(body: dict[str, object]) -> dict[str, object]:
        return {"text": "x"}

    with answering(completion()) as first_url, answering(nothing) as second_url:
        first, second = OpenAIServer(first_url), OpenAIServer(second_url)
        forced = continue_greedily(first, PROMPT, 2)
        with pytest.raises(ServerError) as caught:
            scores_of_both(first, second, forced, 3)
        assert all(name in str(caught.value) for name in ("prompt_logprobs", "echo", "a request per token", second_url))
        with pytest.raises(ServerError, match="names no tokens"):
            continue_greedily(second, PROMPT, 2)


def test_no_server_is_said() -> None:
    result = CliRunner().invoke(app, ["validate", "http://127.0.0.1:1", "--against", "http://127.0.0.1:1"])
    assert result.exit_code == 1 and "no answer to GET /v1/models" in result.output


@pytest.mark.parametrize(("sharpness", "code"), [(1.0, 0), (0.2, 3)])
def test_command_compares_two_servers_and_its_exit_code_tells(sharpness: float, code: int, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(f"{PROMPT}\n2 7 1\n")
    with answering(completion(sharpness=sharpness)) as ours, answering(completion()) as reference:
        command = ["validate", ours, "--against", reference, "--tokens", "6", "--prompts", str(prompts)]
        result = CliRunner().invoke(app, [*command, "--json"])
        shown = CliRunner().invoke(app, command)
    assert result.exit_code == shown.exit_code == code, result.output
    document = json.loads(result.stdout)
    found = document["servers"]["prompts"]
    assert document["passed"] == (code == 0) and [one["positions"] for one in found] == [6, 6]
    assert (found[0]["kl_mean"] == 0) == (code == 0)
    assert shown.stdout.splitlines()[-1] == ("passed" if code == 0 else "failed")


def test_a_server_and_a_model_are_not_compared(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(tmp_path), "--against", "http://127.0.0.1:1"])
    assert result.exit_code == 1 and "Name two URLs" in result.output


def test_a_server_takes_no_flags() -> None:
    result = CliRunner().invoke(app, ["validate", "http://127.0.0.1:1", "--against", "http://127.0.0.1:1", "--foo"])
    assert result.exit_code == 1 and "--foo" in result.output
