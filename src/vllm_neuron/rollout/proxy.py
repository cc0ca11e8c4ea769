"""The configuration of HAProxy that splits traffic between two servers."""

import json
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

MARK = "# vllm-neuron rollout: "


class SplitError(ValueError):
    """The ends or the percentage are not usable, or a file is not one of ours."""


@dataclass(frozen=True)
class Split:
    """Who gets which share.

    Attributes:
        old, new: base URLs of the two servers, without /v1.
        percent: share of requests that `new` gets, 0 to 100.
        port: that the proxy listens on.
    """

    old: str
    new: str
    percent: int
    port: int = 8080

    def __post_init__(self) -> None:
        if not 0 <= self.percent <= 100:
            raise SplitError(f"percent={self.percent}: must be 0 to 100.")
        if not 1 <= self.port <= 65535:
            raise SplitError(f"port={self.port}: must be 1 to 65535.")
        if address(self.old) == address(self.new):
            raise SplitError(f"old and new are the same server, {address(self.old)}: name two.")


def address(url: str) -> str:
    """host:port of a server's URL.

    Raises:
        SplitError: it is no http or https URL of a server's root.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SplitError(f"{url!r}: {error}.") from error
    if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/", "/v1", "/v1/") or parts.query:
        raise SplitError(f"{url!r}: must be a server's root, such as http://localhost:8000.")
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port or (443 if parts.scheme == 'https' else 80)}"


def haproxy_configuration(split: Split) -> str:
    """The text of haproxy.cfg.

    Requests are dealt out in turn by weight, so the share is exact. An end whose /health is not 200 gets nothing until
    it is again, and a request whose connection is refused goes to the other end, unless that has weight 0. Each answer
    says in the header x-served-by which end gave it.
    """
    return f"""\
{MARK}{json.dumps(asdict(split))}
# Written by `vllm-neuron rollout`, which reads the line above: change it there.
global
    maxconn 4096
    log stdout format raw local0

defaults
    mode http
    log global
    option httplog
    option forwardfor
    option http-no-delay
    option redispatch
    retries 2
    retry-on conn-failure
    timeout connect 5s
    timeout client 1h
    timeout server 1h

frontend openai
    bind :{split.port}
    default_backend servers

backend servers
    balance roundrobin
    option httpchk GET /health
    http-check expect status 200
    http-response set-header x-served-by %[srv_name]
    default-server check inter 2s fall 2 rise 2
    {_server("old", split.old, 100 - split.percent)}
    {_server("new", split.new, split.percent)}
"""


def _server(name: str, url: str, weight: int) -> str:
    tls = " ssl verify required ca-file @system-ca" if urlsplit(url).scheme == "https" else ""
    return f"server {name} {address(url)} weight {weight}{tls}"


def read_split(text: str) -> Split:
    """The split that a configuration was written for.

    Raises:
        SplitError: it was not written by `haproxy_configuration`, or its mark was changed.
    """
    line = text.partition("\n")[0]
    try:
        if not line.startswith(MARK):
            raise ValueError("its first line does not say so")
        return Split(**json.loads(line.removeprefix(MARK)))
    except (ValueError, TypeError) as error:
        raise SplitError(f"not a configuration that `vllm-neuron rollout write` has written: {error}.") from error
