"""Turns the scheduler's steps into graph calls, and what they return into tokens."""

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_neuron.engine.executor import GraphExecutor, SubmittedStep
from vllm_neuron.models.model import Model
from vllm_neuron.plugin.batch import Batch, with_embeddings
from vllm_neuron.plugin.device_sampling import DeviceSampling
from vllm_neuron.plugin.pipeline import AsyncStatistics, Pipeline
from vllm_neuron.plugin.requests import RequestStates
from vllm_neuron.plugin.settings import resolved_config
from vllm_neuron.plugin.step import Sampling, Step, Tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NeuronModelRunner:
    """Serves both of vLLM's scheduler protocols; see `RequestStates` for how they differ.

    Args:
        vllm_config: vLLM's configuration.
        executor: runs the graphs.
        model: the model.
        num_groups: G, KV groups.
    """

    def __init__(self, vllm_config: "VllmConfig", executor: GraphExecutor, model: Model, num_groups: int) -> None:
        self.states = RequestStates()
        self.prefill_batch = Batch(vllm_config, 1, num_groups)
        self.decode_batch = Batch(vllm_config, vllm_config.scheduler_config.max_num_seqs, num_groups)
        resolved = resolved_config(vllm_config)
        self._sampling: Sampling
        if resolved.on_device_sampling is None:
            # Imported where it is needed: vLLM's sampler brings a compiler with it, seconds of every start.
            from vllm_neuron.plugin.host_sampling import HostSampling

            self._sampling = HostSampling(executor, vllm_config.model_config.logprobs_mode, model.vocab_size)
        else:
            self._sampling = DeviceSampling(
                executor, model.vocab_size, vllm_config.model_config.seed, resolved.async_scheduling
            )
        self._step: Step | None = None
        self._pipeline: Pipeline | None = None
        if resolved.async_scheduling:
            self._pipeline = Pipeline(self.states, (self.prefill_batch, self.decode_batch))

    @property
    def async_statistics(self) -> AsyncStatistics:
        """All zero where scheduling is synchronous."""
        return AsyncStatistics() if self._pipeline is None else self._pipeline.statistics

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Begin the step.

        Returns:
            None: `sample_tokens` must be called next; or an empty output if the step computes nothing.

        Raises:
            RuntimeError: the step is of a form that the scheduler must never produce.
        """
        if self._step is not None:
            raise RuntimeError("The tokens of the step before have not been sampled.")
        if self._pipeline is not None:
            self._pipeline.settle_finished()
        restarted = self.states.update(output)
        for req_id in output.finished_req_ids:
            self._sampling.discard(req_id)
        self.prefill_batch.discard(output.finished_req_ids)
        self.decode_batch.discard(output.finished_req_ids)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step = self._prepare(output, restarted)
        self._sampling.begin(step)
        self._step = step
        return None

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample one token for each row of the step; none for a step that computes only a part of a prompt.

        With async scheduling the step has only been submitted when this returns.
        """
        if self._step is None:
            raise RuntimeError("There is no step to sample tokens of.")
        step, self._step = self._step, None
        if self._pipeline is not None and isinstance(self._sampling, DeviceSampling):
            submitted = self._sampling.submit(step, grammar, self._pipeline.latest)
            output = AsyncOutput(self._sampling, step, submitted)
            self._pipeline.add(step, submitted)
            return output
        tokens = self._sampling.finish(step, grammar)
        for index, token_id in enumerate(tokens.token_ids):
            step.batch.append_token(index, step.states[index], token_id)
        return model_output(step, tokens)

    def warm_up_sampler(self) -> None:
        """Make what samples on the host ready."""
        self._sampling.warm_up(self.prefill_batch, self.decode_batch)

    def _prepare(self, output: SchedulerOutput, restarted: Collection[str]) -> Step:
        """Bring the batch up to date and find out what each row computes."""
        is_prefill = self._is_prefill(output, restarted)
        batch, other = self.decode_batch, self.prefill_batch
        if is_prefill:
            batch, other = other, batch
        counts = output.num_scheduled_tokens
        if self._pipeline is not None:
            self._pipeline.prepare_for(counts, is_prefill)
        other.discard(counts)
        batch.sync(counts, self.states, _new_blocks(output), restarted)
        states = [self.states[req_id] for req_id in batch.req_ids]
        rows = []
        for index, state in enumerate(states):
            count = counts[state.req_id]
            is_last = not is_prefill or state.num_computed_tokens + count == state.num_tokens
            row = batch.row(index, count, wants_logits=is_last)
            rows.append(with_embeddings(row, state) if is_prefill else row)
        if self._pipeline is not None and not is_prefill:
            rows = self._pipeline.feed(rows, batch.req_ids)
        return Step(batch, states, rows, is_prefill, batch.input_batch.max_num_logprobs)

    def _is_prefill(self, output: SchedulerOutput, restarted: Collection[str]) -> bool:
        """Whether the step is one prefill, rather than decodes only."""
        if output.scheduled_spec_decode_tokens:
            _refuse(output, "speculated tokens")
        prefills = sum(
            req_id in restarted or count > 1 or state.num_computed_tokens < state.num_prompt_tokens
            for req_id, count in output.num_scheduled_tokens.items()
            for state in (self.states[req_id],)
        )
        if prefills and len(output.num_scheduled_tokens) > 1:
            _refuse(output, f"{prefills} prefills among {len(output.num_scheduled_tokens)} requests")
        return bool(prefills)


class AsyncOutput(AsyncModelRunnerOutput):
    """The tokens of a step that is under way; vLLM waits for them in a thread of its own.

    Args:
        sampling: gets at the tokens.
        step: the step.
        submitted: the same step, as it was handed to its graph.
    """

    def __init__(self, sampling: DeviceSampling, step: Step, submitted: SubmittedStep) -> None:
        self._sampling, self._step, self._submitted = sampling, step, submitted

    def get_output(self) -> ModelRunnerOutput:
        """What vLLM gets without async scheduling. Raises what the step has raised."""
        never_preempt()
        return model_output(self._step, self._sampling.collect(self._step, self._submitted))


def never_preempt() -> None:
    """Let the calling thread, unless it is the main one, wait for a core that no other thread runs on.

    The end of an execution wakes it, and Linux likes to run it at once, on the core and in place of the thread that is
    about to start the next execution: 0.25 ms in which the device does nothing.
    """
    if threading.current_thread() is not threading.main_thread() and hasattr(os, "SCHED_BATCH"):
        # A sandbox may forbid it.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def model_output(step: Step, tokens: Tokens) -> ModelRunnerOutput:
    """The tokens of a step as vLLM takes them."""
    req_ids = [state.req_id for state in step.states]
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[[token_id] for token_id in tokens.token_ids] or [[] for _ in req_ids],
        logprobs=tokens.logprobs,
        prompt_logprobs_dict=tokens.prompt_logprobs,
    )


def _new_blocks(output: SchedulerOutput) -> dict[str, tuple[list[int], ...] | None]:
    cached = output.scheduled_cached_reqs
    return dict(zip(cached.req_ids, cached.new_block_ids, strict=True))


def _refuse(output: SchedulerOutput, what: str) -> NoReturn:
    raise RuntimeError(
        f"The scheduler has made a step of {what}: {output.num_scheduled_tokens}. A step must be one prefill, or one "
        "token of each of any number of requests. This is a fault of the scheduler that scheduler_cls names."
    )
