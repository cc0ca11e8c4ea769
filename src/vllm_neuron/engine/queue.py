"""The queue of a device: jobs run one after the other, in the order in which they were submitted."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

R = TypeVar("R")


class DeviceQueue:
    """Runs jobs in order.

    Args:
        asynchronous: jobs run in one thread of their own, while the caller goes on; otherwise `submit` returns when the
            job is done. It is always the same thread, because each that runs kernels has helper threads of its own.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="neuron-device") if asynchronous else None

    def submit(self, job: Callable[[], R]) -> "Future[R]":
        """What ``job`` returns or raises, once it has run after all jobs submitted before it."""
        if self._thread is not None:
            return self._thread.submit(_without_autograd, job)
        future: Future[R] = Future()
        try:
            future.set_result(_without_autograd(job))
        except Exception as error:
            future.set_exception(error)
        return future

    def run(self, job: Callable[[], R]) -> R:
        """What ``job`` returns, after all jobs submitted before it."""
        return self.submit(job).result()

    def close(self) -> None:
        """Let the thread end when it has run what was submitted."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _without_autograd(job: Callable[[], R]) -> R:
    # A setting of the thread, not of the process.
    with torch.inference_mode():
        return job()
