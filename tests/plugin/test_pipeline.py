"""Async scheduling without processes: a step is submitted before the tokens of the one before it are known.

The next token of the simulation's "model" is a hash of all that its request has read, so a placeholder in the place of
a token, a token of another request, or one of a step that wanted none shows in the answer.
"""

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from tests.plugin.simulation import CachingExecutor, Simulation, Windows, answer, make_config, prompts
from vllm_neuron.engine.executor import SubmittedStep
from vllm_neuron.engine.inputs import Row
from vllm_neuron.plugin.model_runner import never_preempt
from vllm_neuron.plugin.scheduler import NeuronAsyncScheduler
from vllm_neuron.sampling import Sampled, SampledWithLogprobs

ON_DEVICE = {"neuron_config": {"on_device_sampling_config": {}}}


class LateTokens(Future[Sampled | SampledWithLogprobs]):
    """The tokens of a step that runs when somebody waits for them, after those before it."""

    def __init__(self, executor: "LateExecutor") -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> Sampled | SampledWithLogprobs:
        while not self.done():
            self._executor.run_next()
        return super().result(timeout)


class LateExecutor(CachingExecutor):
    """Reads its rows when they are submitted, as the real one does, and computes them later."""

    def __init__(self, num_blocks: int, windows: Windows) -> None:
        super().__init__(num_blocks, windows)
        self._submitted: deque[tuple[LateTokens, Sequence[Row], SubmittedStep | None]] = deque()

    def _sample(self, rows: Sequence[Row], after: SubmittedStep | None) -> SubmittedStep:
        kept = [
            row._replace(token_ids=row.token_ids.copy(), block_ids=tuple(blocks.copy() for blocks in row.block_ids))
            for row in rows
        ]
        tokens = LateTokens(self)
        self._submitted.append((tokens, kept, after))
        return SubmittedStep(len(rows), tokens)

    def run_next(self) -> None:
        tokens, rows, after = self._submitted.popleft()
        tokens.set_result(super()._sample(rows, after).sampled.result())


class Ahead(Simulation):
    """Steps as vLLM's engine core does with two batches under way."""

    scheduler_class = NeuronAsyncScheduler
    executor_class = LateExecutor

    def __init__(self, num_blocks: int = 64, **args: Any) -> None:
        super().__init__(make_config(additional_config=ON_DEVICE, **{"async_scheduling": True, **args}), num_blocks)
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput | AsyncModelRunnerOutput]] = deque()

    @property
    def is_busy(self) -> bool:
        return super().is_busy or bool(self._under_way)

    def step(self) -> Any:
        if self.scheduler.has_requests() or not self._under_way:
            output = self.scheduler.schedule()
            self.trace.preemptions += len(output.preempted_req_ids or ())
            submitted = self.runner.execute_model(output) or self.runner.sample_tokens(None)
            self._under_way.append((output, submitted))
            if output.total_num_scheduled_tokens and len(self._under_way) < 2:
                return
        output, result = self._under_way.popleft()
        # The batch has changed since this step was submitted.
        self._take(output, result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_right_under_joins_leaves_aborts_and_preemption(seed: int) -> None:
    rng = np.random.default_rng(seed)
    running, wanted, gone = Ahead(num_blocks=11 if seed % 2 else 40), {}, set()
    arriving = list(enumerate(prompts(rng.integers(1, 50, 25), seed)))
    while arriving or running.is_busy:
        if arriving and rng.random() < 0.4:
            index, prompt = arriving.pop()
            count = int(rng.integers(1, 14))
            running.add(str(index), prompt, count)
            wanted[str(index)] = answer(prompt, count)
        if wanted and rng.random() < 0.05:
            gone.add(name := str(rng.choice(list(wanted))))
            running.abort(name)
        if running.is_busy:
            running.step()
    running.run()
    for name, tokens in running.tokens.items():
        assert tokens == (wanted[name][: len(tokens)] if name in gone else wanted[name]), name
    statistics = running.runner.async_statistics
    assert statistics.async_steps and statistics.sync_fallback_steps
    assert bool(running.trace.preemptions) is bool(seed % 2)


def test_the_token_after_a_stop_token_is_dropped_and_its_row_goes_to_another() -> None:
    """The stop is seen one step late; the next request has a batch of the same size in the same row."""
    running = Ahead(max_num_seqs=1)
    first, second = prompts([9, 5])
    stop = answer(first, 8)[3]
    running.add("first", first, 8, stop_token_ids=[stop])
    running.add("second", second, 8)
    running.run()
    assert running.tokens["first"] == answer(first, 8)[: answer(first, 8).index(stop) + 1]
    assert running.tokens["second"] == answer(second, 8)


def test_answers_end_at_max_model_len_also_one_step_ahead() -> None:
    running = Ahead()
    for name, prompt in zip("ab", prompts([60, 63]), strict=True):
        running.add(name, prompt, 40)
    running.run()
    assert running.tokens == {n: answer(p, 64 - len(p)) for n, p in zip("ab", prompts([60, 63]), strict=True)}
    assert set(running.endings.values()) == {"length"}


def test_a_part_of_a_prompt_hands_on_no_token() -> None:
    """Three steps compute the prompt, each of one row, as the decode step after them."""
    running = Ahead()
    (prompt,) = prompts([40])
    running.add("a", prompt, 6)
    running.run()
    assert [kind for kind, _ in running.executor.steps[:4]] == ["prefill"] * 3 + ["decode"]
    assert running.tokens["a"] == answer(prompt, 6)


def test_the_thread_that_waits_for_tokens_takes_nobodys_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def policies() -> tuple[int, int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: (never_preempt(), found.append(os.sched_getscheduler(0))))
        thread.start()
        thread.join()
        never_preempt()
        return found[0], os.sched_getscheduler(0)

    assert policies() == (os.SCHED_BATCH, os.SCHED_OTHER)

    def forbidden(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert policies() == (os.SCHED_OTHER, os.SCHED_OTHER)
