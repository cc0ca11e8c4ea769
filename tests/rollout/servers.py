"""Small OpenAI servers that stand in for the two ends of a rollout."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class StandIn:
    """What a server says and how.

    Attributes:
        words: of each answer, an event each.
        model: that it lists.
        healthy: /health is 200.
        status: of completions.
        delay: seconds before each word.
        broken: an error comes in the middle of each stream.
        requests: how many completions were asked for.
        keys: Authorization headers that came.
    """

    words: tuple[str, ...] = (" one", " two", " three")
    model: str = "demo"
    healthy: bool = True
    status: int = 200
    delay: float = 0.0
    broken: bool = False
    requests: int = 0
    keys: set[str] = field(default_factory=set)


@contextmanager
def serving(behaviour: StandIn) -> Iterator[str]:
    """The URL of a server that behaves like this, for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self._send(200 if behaviour.healthy else 503, b"")
            else:
                self._send(200, json.dumps({"data": [{"id": behaviour.model}]}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            behaviour.requests += 1
            behaviour.keys.add(self.headers.get("Authorization", ""))
            if behaviour.status != 200:
                self._send(behaviour.status, b'{"error": {"message": "no such luck"}}')
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for word in behaviour.words:
                time.sleep(behaviour.delay)
                self._event({"choices": [{"text": word}]})
            if behaviour.broken:
                self._event({"error": {"message": "the engine died"}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, event: dict[str, object]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
