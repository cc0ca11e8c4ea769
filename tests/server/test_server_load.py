"""Many requests at once, requests that go away, and an engine that stands still for a while."""

import http.client
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.checkpoints import greedy_oracle, prompt
from tests.server.completions import all_at_once, assert_next_is_right, decode_steps, token_ids
from tests.server.harness import MODEL_NAME, Server, wait_until


def open_stream(server: Server, body: dict[str, object]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    full = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "stream": True, **body}
    connection.request("POST", "/v1/completions", json.dumps(full), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def idle(server: Server) -> bool:
    return (
        server.metric("vllm:num_requests_running") == 0
        and server.metric("vllm:num_requests_waiting") == 0
        and server.metric("vllm:kv_cache_usage_perc") == 0
    )


def test_server_64_requests_at_concurrency_16(server: Server, tiny: Path) -> None:
    different = [prompt(1 + (53 * i) % 330, seed=i) for i in range(16)]
    prompts = [different[(5 * i) % 16] for i in range(64)]
    answers = all_at_once(server, prompts, 12, concurrency=16)
    assert answers == [greedy_oracle(tiny, ids, 12) for ids in prompts]
    assert server.rpc("graph_statistics")["compiles_after_warmup"] == 0


def test_server_more_requests_than_slots_keep_the_batch_full(server: Server) -> None:
    """Above max_num_seqs requests wait: full batches go on, and the same work takes no more steps than before.

    Each call brings its requests all at once, so that slow clients on a busy machine leave no slot empty.
    """
    prompts = [prompt(64, seed=1000 + i) for i in range(32)]
    steps: dict[int, int] = {}
    full: dict[int, int] = {}
    for at_once in (4, 8, 32):
        before = decode_steps(server)
        for start in range(0, len(prompts), at_once):
            server.client.completions.create(
                model=MODEL_NAME,
                prompt=prompts[start : start + at_once],
                max_tokens=64,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        after = decode_steps(server)
        ran = {name: after[name] - before.get(name, 0) for name in after}
        steps[at_once] = sum(ran.values())
        full[at_once] = sum(count for name, count in ran.items() if "_b4_" in name)
    # In batches of four, 32 requests of 63 decode steps each are 504 steps.
    assert all(504 <= count <= 1.1 * 504 for count in steps.values()), (steps, full)
    assert full[32] >= 0.9 * steps[32], (steps, full)


def test_server_late_short_request_is_not_starved_by_long_ones(server: Server) -> None:
    streams = [open_stream(server, {"prompt": prompt(10, seed=i), "max_tokens": 500}) for i in range(3)]
    for _, response in streams:
        assert response.readline().startswith(b"data: ")
    token_ids(server, prompt(10, seed=9), 2)
    assert server.metric("vllm:num_requests_running") > 0, "the short request came last"
    for connection, response in streams:
        assert b"[DONE]" in response.read()
        connection.close()


def test_server_client_that_leaves_in_the_middle(server: Server, tiny: Path) -> None:
    for _ in range(4):
        connection, response = open_stream(server, {"prompt": prompt(60, seed=5), "max_tokens": 400})
        assert response.status == 200
        for _ in range(4):
            response.readline()
        response.close()
        connection.close()
    wait_until(lambda: idle(server), 15, "free KV cache after cancelled requests", server)
    assert_next_is_right(server, tiny)


def test_server_clients_that_leave_while_they_wait(server: Server, tiny: Path) -> None:
    """More requests than slots, all cancelled: running ones and waiting ones.

    So many wait that some still do when a busy machine lets us look.
    """
    open_ones = [open_stream(server, {"prompt": prompt(60, seed=i), "max_tokens": 400}) for i in range(4)]
    waiting = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(24)]
    for i, connection in enumerate(waiting):
        body = {"model": MODEL_NAME, "prompt": prompt(50, seed=i), "max_tokens": 300, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: server.metric("vllm:num_requests_waiting") >= 4, 15, "waiting requests", server)
    for connection in waiting:
        connection.close()
    wait_until(lambda: server.metric("vllm:num_requests_waiting") == 0, 15, "an empty queue", server)
    for connection, response in open_ones:
        response.close()
        connection.close()
    wait_until(lambda: idle(server), 15, "free KV cache after cancelled requests", server)
    assert_next_is_right(server, tiny)


def test_server_compiles_nothing_under_a_mixed_load(server: Server) -> None:
    before = server.rpc("graph_statistics")
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"logprobs": 3},
        {"n": 2, "temperature": 0.9, "seed": 1},
        {"ignore_eos": False},
        {"repetition_penalty": 1.2, "min_p": 0.1, "temperature": 0.7},
    ]
    work = [(prompt(1 + (97 * i) % 500, seed=i), 1 + i % 9, kinds[i % len(kinds)]) for i in range(36)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda item: token_ids(server, item[0], item[1], **item[2]), work))
    assert all(1 <= len(answer) <= count for answer, (_, count, _) in zip(answers, work, strict=True))
    after = server.rpc("graph_statistics")
    assert after["compiles_after_warmup"] == 0
    assert (after["compiled"], after["cached"]) == (before["compiled"], before["cached"])
    assert sum(after["executions"].values()) > sum(before["executions"].values())


def test_server_frozen_engine_recovers(server: Server, tiny: Path) -> None:
    engine = server.engine_core()
    engine.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(token_ids, server, prompt(20, seed=4), 8)
            time.sleep(5)
            assert not pending.done()
            engine.send_signal(signal.SIGCONT)
            assert len(pending.result(30)) == 8
    finally:
        engine.send_signal(signal.SIGCONT)
    assert_next_is_right(server, tiny)
