"""A server that is told to stop does so: in warm-up at once, later after a bounded wait for its open requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partialmethod
from typing import Any

GRACE_SECONDS = 5


def bound_graceful_shutdown() -> None:
    """Give uvicorn a limit, where it is given none: vLLM stops the engine first, then waits for requests without end.

    What asks for a limit of its own still gets it.
    """
    import uvicorn

    config: Any = uvicorn.Config
    if "timeout_graceful_shutdown" not in getattr(config.__dict__["__init__"], "keywords", {}):
        config.__init__ = partialmethod(config.__init__, timeout_graceful_shutdown=GRACE_SECONDS)


@cache
def end_when_interrupted_in_warm_up() -> None:
    """Let SIGTERM and SIGINT end a server that waits for its engine to become ready.

    vLLM makes a KeyboardInterrupt of either, and swallows it in the context of the socket on which it waits.
    """
    from vllm.v1.engine import utils

    swallowing = utils.zmq_socket_ctx

    @contextmanager
    def passing(*args: Any, **kwargs: Any) -> Iterator[Any]:
        interrupt = None
        with swallowing(*args, **kwargs) as opened:
            try:
                yield opened
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    utils.zmq_socket_ctx = passing
