"""A bound on how long a server that was told to stop waits for its open requests."""

from functools import partialmethod
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
