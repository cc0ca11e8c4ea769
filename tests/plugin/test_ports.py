import socket
from collections.abc import Iterator

import pytest

from vllm_neuron.plugin.ports import PortInUseError, refuse_shared_port


def shared(host: str, port: int = 0) -> socket.socket:
    """A socket as vLLM opens it: bound, not listening yet, and willing to share its port."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    opened.bind((host, port))
    return opened


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with shared("127.0.0.1") as other:
        other.listen()
        yield other


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_another_listens_on_is_refused(listener: socket.socket, host: str) -> None:
    port = listener.getsockname()[1]
    with shared(host, port), pytest.raises(PortInUseError, match=rf"--port={port}: process \d+ listens"):
        refuse_shared_port()


def test_a_port_that_another_listens_on_at_another_address_is_free(listener: socket.socket) -> None:
    with shared("127.0.0.2", listener.getsockname()[1]):
        refuse_shared_port()


def test_a_program_that_listens_for_itself_may_make_an_engine(listener: socket.socket) -> None:
    with shared("127.0.0.1"):
        refuse_shared_port()
