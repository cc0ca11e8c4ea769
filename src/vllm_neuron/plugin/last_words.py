"""Says in the last line of a server's log what its engine ended of.

The engine is another process. It logs the cause, but what vLLM's API server prints afterwards is long and names none.
"""

import atexit
import functools
import logging
import multiprocessing
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

_FILE = "_NEURON_LAST_WORDS"
"""Environment variable that hands the file's path to the engine, whether that is forked or spawned. The file exists
only once an engine has failed; nobody can guess its name."""

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def repeat_at_exit() -> None:
    """In the process that starts engines: repeat the cause of an engine's end when this process ends."""
    if multiprocessing.parent_process() is None:
        os.environ[_FILE] = str(Path(tempfile.gettempdir()) / f"vllm-neuron-{secrets.token_hex(16)}")
        atexit.register(_repeat, os.getpid())


def _repeat(pid: int) -> None:
    path = Path(os.environ[_FILE])
    if os.getpid() != pid:
        # A fork that ends as its parent would.
        return
    with suppress(FileNotFoundError):
        cause = path.read_text()
        path.unlink()
        logger.error("The engine has ended: %s", cause)


def leaving_last_words(method: Callable[P, R]) -> Callable[P, R]:
    """Keep the cause for `repeat_at_exit` if ``method`` raises in an engine's own process, and raise it anyway."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if multiprocessing.parent_process() is not None and _FILE in os.environ:
                _leave(f"{type(error).__name__}: {error}")
            raise

    return wrapped


def _leave(cause: str) -> None:
    # The first cause is kept: what fails after it follows from it.
    with suppress(OSError):
        descriptor = os.open(os.environ[_FILE], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w") as file:
            file.write(cause)
