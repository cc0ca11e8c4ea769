"""The queue of a device: jobs run one after the other, in the order in which they were submitted.

The device should not wait between two jobs that are both there. Whoever waits for the result of the first wakes as soon
as it is known and wants Python's lock. If the thread of the queue lets go of the lock before the second has reached the
device, it gets it back when the other has done all its work, which is milliseconds. So in between it calls as little
as possible, nothing that is known to let go of the lock, and no tensor dies in it, which would do that too.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

R = TypeVar("R")

_Item = tuple[Callable[[], Any], "Future[Any]"]

_HELD = 3
"""Jobs of which nothing may die in the thread: one that has just been done, one that runs, and one that waits."""


class DeviceQueue:
    """Runs jobs in order, without autograd.

    Args:
        asynchronous: jobs run in one thread of their own, while the caller goes on; otherwise `submit` returns when the
            job is done. It is always the same thread, because each that runs kernels has helper threads of its own.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._held: deque[_Item] = deque(maxlen=_HELD)
        if asynchronous:
            self._jobs: SimpleQueue[_Item | None] = SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._jobs,), name="neuron-device", daemon=True)
            thread.start()
            # Also at the interpreter's end, which must not come while a job runs.
            self._end = weakref.finalize(self, _end, self._jobs, thread)

    def submit(self, job: Callable[[], R]) -> "Future[R]":
        """What ``job`` returns or raises, once it has run after all jobs submitted before it.

        Raises:
            RuntimeError: the queue is closed.
        """
        future: Future[R] = Future()
        # Nobody can cancel it any more.
        future.set_running_or_notify_cancel()
        if not self.asynchronous:
            with torch.inference_mode():
                _run(job, future, Exception)
            return future
        if not self._end.alive:
            raise RuntimeError("The device's queue is closed: nothing can be submitted any more.")
        self._held.append((job, future))
        self._jobs.put((job, future))
        return future

    def run(self, job: Callable[[], R]) -> R:
        """What ``job`` returns, after all jobs submitted before it."""
        return self.submit(job).result()

    def close(self) -> None:
        """Run what was submitted, and end the thread."""
        if self.asynchronous:
            self._end()
            self._held.clear()


def _work(jobs: "SimpleQueue[_Item | None]") -> None:
    # A setting of the thread, not of the process.
    with torch.inference_mode():
        while (item := jobs.get()) is not None:
            _run(*item, BaseException)
            # Nothing dies yet, and nothing is kept from dying where the queue is idle.
            del item


def _run(job: Callable[[], R], future: "Future[R]", caught: type[BaseException]) -> None:
    try:
        result = job()
    except caught as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _end(jobs: "SimpleQueue[_Item | None]", thread: threading.Thread) -> None:
    jobs.put(None)
    # The last job's end may be what lets go of the queue.
    if thread is not threading.current_thread():
        thread.join()
