"""The device's queue: order, errors, its end, and where what a job holds dies."""

import gc
import threading
from typing import Any

import pytest
import torch

from vllm_neuron.engine.queue import DeviceQueue


@pytest.fixture(params=[False, True], ids=["in-step", "ahead"])
def queue(request: pytest.FixtureRequest) -> Any:
    made = DeviceQueue(request.param)
    yield made
    made.close()


def test_jobs_run_in_order_without_autograd(queue: DeviceQueue) -> None:
    seen: list[tuple[int, bool]] = []
    futures = [queue.submit(lambda i=i: seen.append((i, torch.is_inference_mode_enabled()))) for i in range(20)]
    assert [future.result() for future in futures] == [None] * 20
    assert seen == [(i, True) for i in range(20)]
    assert not torch.is_inference_mode_enabled()


def test_a_job_that_fails_fails_alone(queue: DeviceQueue) -> None:
    failed, after = queue.submit(lambda: 1 // 0), queue.submit(lambda: "done")
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert after.result() == queue.run(lambda: "done")


def test_what_is_submitted_cannot_be_cancelled(queue: DeviceQueue) -> None:
    go = threading.Event()
    if not queue.asynchronous:
        go.set()
    queue.submit(go.wait)
    waiting = queue.submit(lambda: "done")
    assert not waiting.cancel()
    go.set()
    assert waiting.result() == "done"


def test_closing_runs_what_was_submitted_and_takes_nothing_more() -> None:
    queue = DeviceQueue(True)
    go = threading.Event()
    futures = [queue.submit(go.wait), queue.submit(lambda: True)]
    go.set()
    queue.close()
    queue.close()
    assert [future.result(0) for future in futures] == [True, True]
    with pytest.raises(RuntimeError, match="closed"):
        queue.submit(lambda: None)


def test_a_queue_that_nobody_has_any_more_leaves_no_thread() -> None:
    before = threading.active_count()
    queue = DeviceQueue(True)

    def job(owner: DeviceQueue = queue) -> threading.Thread:
        return threading.current_thread()

    assert queue.run(job).name == "neuron-device"
    assert threading.active_count() == before + 1
    del queue, job
    gc.collect()
    assert threading.active_count() == before


def test_nothing_dies_in_the_thread_while_jobs_follow_each_other() -> None:
    """There the death of a tensor would let go of Python's lock between two jobs."""
    died: list[threading.Thread] = []

    class Held:
        def __del__(self) -> None:
            died.append(threading.current_thread())

        def __call__(self) -> "Held":
            return Held()

    queue = DeviceQueue(True)
    for _ in range(10):
        # Two at a time, as steps are submitted: one runs, one waits.
        first, second = queue.submit(Held()), queue.submit(Held())
        first.result()
        second.result()
    del first, second
    queue.close()
    assert len(died) >= 14 and set(died) == {threading.current_thread()}
