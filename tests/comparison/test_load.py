"""Streams are timed token by token, against a server whose pauses are known."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_neuron.comparison.load import LoadError, stream_all

PAUSE = 0.02


@pytest.fixture(params=["answers", "refuses", "ends"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    running, most = 0, 0
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal running, most
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["stream"] and body["ignore_eos"] and body["temperature"] == 0
            with lock:
                running += 1
                most = max(most, running)
            self.send_response(400 if request.param == "refuses" else 200)
            self.end_headers()
            if request.param == "refuses":
                self.wfile.write(b"too long")
            elif request.param == "answers":
                for _ in range(body["max_tokens"]):
                    time.sleep(PAUSE)
                    self.wfile.write(b'data: {"choices": [{"text": ""}]}\n\n')
            if request.param == "answers":
                self.wfile.write(b"data: [DONE]\n\n")
            with lock:
                running -= 1

        def log_message(self, *args: Any) -> None:
            assert most <= 2

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert most <= 2


@pytest.mark.parametrize("url", ["answers"], indirect=True)
def test_every_token_is_counted_and_timed(url: str) -> None:
    found = stream_all(url, [[1, 2, 3]] * 4, 5, 2)
    assert (found.tokens, found.prompt_tokens, len(found.first), len(found.gaps)) == (20, 12, 4, 16)
    # Sleeping never takes less than it is told to; how much more depends on the machine.
    assert min(found.first) >= PAUSE and found.seconds >= 10 * PAUSE
    figures = found.figures()
    assert figures["output_tokens_per_second"] == pytest.approx(20 / found.seconds)
    assert figures["itl_p50_ms"] <= figures["itl_p95_ms"] <= figures["itl_p99_ms"]


@pytest.mark.parametrize(("url", "text"), [("refuses", "400: too long"), ("ends", "without a token")], indirect=["url"])
def test_failed_requests_are_errors(url: str, text: str) -> None:
    with pytest.raises(LoadError, match=text):
        stream_all(url, [[1]], 2, 1)
