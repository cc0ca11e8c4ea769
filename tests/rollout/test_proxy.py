"""The proxy's configuration, and the proxy itself where it is installed."""

import shutil
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.rollout.servers import StandIn, serving
from tests.server.harness import free_port
from vllm_neuron.rollout.measure import measure
from vllm_neuron.rollout.proxy import Split, SplitError, address, haproxy_configuration, read_split

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "host:8000"),
        ("http://host/", "host:80"),
        ("https://host/v1", "host:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_addresses(url: str, expected: str) -> None:
    assert address(url) == expected


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "http://host/a/b", "http://host:x", "http://h?a=b"]
)
def test_what_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(SplitError):
        address(url)


@pytest.mark.parametrize(
    ("old", "new", "percent", "port"),
    [("http://a", "http://b", 101, 1), ("http://a", "http://b", -1, 1), ("http://a", "http://b", 1, 0),
     ("http://a", "http://a:80/v1", 1, 1)],
)  # fmt: skip
def test_splits_that_make_no_sense_are_refused(old: str, new: str, percent: int, port: int) -> None:
    with pytest.raises(SplitError):
        Split(old, new, percent, port)


def test_a_configuration_says_what_it_was_written_for() -> None:
    split = Split("http://old:8000", "https://new", 5, 9000)
    text = haproxy_configuration(split)
    assert read_split(text) == split
    assert "server old old:8000 weight 95\n" in text
    assert "server new new:443 weight 5 ssl verify required" in text
    assert "bind :9000\n" in text


@pytest.mark.parametrize("text", ["", "global\n", "# vllm-neuron rollout: {}\n", "# vllm-neuron rollout: [\n"])
def test_files_of_others_are_not_taken_for_ours(text: str) -> None:
    with pytest.raises(SplitError, match="not a configuration"):
        read_split(text)


if HAPROXY:

    def test_real_proxy_splits_as_written_and_leaves_out_a_dead_end(tmp_path: Path) -> None:
        port, file = free_port(), tmp_path / "haproxy.cfg"
        proxy_url = f"http://127.0.0.1:{port}"
        old, new = StandIn(), StandIn(words=(" four", " five"))
        with serving(old) as old_url, serving(new) as new_url, httpx.Client(base_url=proxy_url) as client:
            file.write_text(haproxy_configuration(Split(old_url, new_url, 25, port)))
            proxy = subprocess.Popen([HAPROXY, "-f", file], stdout=subprocess.DEVNULL)
            try:
                _wait_until_open(port)
                served = Counter(_served_by(client) for _ in range(40))
                # What measures a server measures one behind the proxy too: streams pass.
                (through,) = measure([proxy_url], ("a", "b"), rounds=2)
                new.healthy = False
                _wait_until_left_out(client)
                later = {_served_by(client) for _ in range(8)}
            finally:
                proxy.terminate()
                proxy.wait(10)
        assert served == {"old": 30, "new": 10}
        assert not through.fault and not through.failures and len(through.ttft) == 4
        assert later == {"old"}

    def test_real_proxy_takes_encrypted_ends_and_shares_of_none(tmp_path: Path) -> None:
        for percent in (0, 100):
            (tmp_path / "haproxy.cfg").write_text(
                haproxy_configuration(Split("http://127.0.0.1:1", "https://127.0.0.1:2", percent))
            )
            subprocess.run([HAPROXY, "-c", "-f", tmp_path / "haproxy.cfg"], check=True, capture_output=True)


def _served_by(client: httpx.Client) -> str:
    """The end that answers a request, by the header."""
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    return client.post("/v1/completions", json=body).raise_for_status().headers["x-served-by"]


def _wait_until_open(port: int) -> None:
    deadline = time.monotonic() + 30
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline, "the proxy does not listen"
            time.sleep(0.05)


def _wait_until_left_out(client: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while "new" in [_served_by(client) for _ in range(4)]:
        assert time.monotonic() < deadline, "the proxy goes on with an end that is not healthy"
        time.sleep(0.2)
