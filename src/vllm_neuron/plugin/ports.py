"""Refuses a port that another server listens on already."""

import multiprocessing

import psutil

from vllm_neuron.plugin.processes import addresses_to_listen_on

ANY_HOST = ("0.0.0.0", "::")


class PortInUseError(RuntimeError):
    """Another process listens on the server's port."""


def refuse_shared_port() -> None:
    """Check that nobody listens on the address that this process has taken, before it listens itself.

    vLLM opens its port in such a way that a second server can take the same one, and the kernel would then hand each of
    them a part of the connections.

    Raises:
        PortInUseError: somebody does; the text has the port and, where it may be known, the process.
    """
    if multiprocessing.parent_process() is not None:
        # One of several API servers of one `vllm serve`, which share a port.
        return
    addresses = addresses_to_listen_on()
    listeners = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN] if addresses else []
    for host, port in addresses:
        for listener in listeners:
            if listener.laddr.port == port and (host == listener.laddr.ip or {host, listener.laddr.ip} & {*ANY_HOST}):
                owner = f"process {listener.pid}" if listener.pid else "another process"
                raise PortInUseError(
                    f"--port={port}: {owner} listens on it already, and each of the two servers would get a part of "
                    "the requests. Stop that one, or choose another --port."
                )
