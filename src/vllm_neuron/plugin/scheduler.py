"""vLLM's scheduler, restricted to steps that are all prefill or all decode.

A prefill step computes one request. Nothing is ever held back outside vLLM's own queues: for the time of one
`schedule` call the running list and two limits are set so that vLLM itself can only choose a step of one kind.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_neuron.plugin.grammars import Grammars
from vllm_neuron.plugin.settings import resolved_config

MAX_CONSECUTIVE_PREFILLS = 4
"""Prefill steps in a row while decodes wait. More would stall the running streams of a busy server for longer; fewer
would leave decode batches half empty while requests queue."""


def is_prefill(request: Request) -> bool:
    """Whether a running request needs a prefill step: part of its prompt, or more than one token, is not computed.

    The second is true of a request that was preempted and computes its output again. One outstanding token beyond the
    prompt is a decode, whichever way the request got there.
    """
    computed = request.num_computed_tokens
    # Tokens that steps under way will sample count like those that are known.
    tokens = request.num_tokens + request.num_output_placeholders
    return computed < request.num_prompt_tokens or tokens - computed > 1


class NeuronScheduler(Scheduler):
    """Prefill and decode never share a step; prefill goes first, but decodes never wait long."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_v2_model_runner = resolved_config(self.vllm_config).v2_model_runner
        self._consecutive_prefills = 0
        self._grammars = Grammars(self.structured_output_manager)
        self._failed: list[Request] = []

    def schedule(self) -> SchedulerOutput:
        """The next step; empty only if nothing at all can run."""
        for request in self._grammars.take_failed(self.requests):
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            self._failed.append(request)
        prefills = [request for request in self.running if is_prefill(request)]
        decodes = [request for request in self.running if not is_prefill(request)]
        if not self._prefill_is_due(prefills, decodes):
            return self._schedule_decodes(prefills, decodes)
        scheduled_before = set(self.prev_step_scheduled_req_ids)
        lookups_before = copy.copy(self.kv_cache_manager.prefix_cache_stats)
        output = self._schedule_prefill(prefills, decodes)
        if output.total_num_scheduled_tokens or not decodes:
            self._consecutive_prefills += 1 if decodes else 0
            return output
        # No blocks are free, or no grammar is ready: the decodes go on, as if this attempt had not been made.
        self.prev_step_scheduled_req_ids = scheduled_before
        self.kv_cache_manager.prefix_cache_stats = lookups_before
        still_prefilling = [request for request in prefills if request in self.running]
        return _merged(output, self._schedule_decodes(still_prefilling, decodes))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's, and word of the requests that failed before they could start."""
        results = super().update_from_output(scheduler_output, model_runner_output)
        for request in self._failed:
            output = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
            results.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        self._failed.clear()
        return results

    def _prefill_is_due(self, prefills: list[Request], decodes: list[Request]) -> bool:
        if decodes and self._consecutive_prefills >= MAX_CONSECUTIVE_PREFILLS:
            return False
        return bool(prefills) or (bool(self.waiting) and len(self.running) < self.max_num_running_reqs)

    def _schedule_prefill(self, prefills: list[Request], decodes: list[Request]) -> SchedulerOutput:
        """A chunk of the unfinished prefill, else the first waiting request that can start."""
        shown = prefills[:1]
        hidden = [request for request in self.running if request not in shown]
        with self._limits(running=1, tokens=self.max_num_scheduled_tokens):
            self.running = shown
            try:
                return super().schedule()
            finally:
                self.running = hidden + self.running

    def _schedule_decodes(self, prefills: list[Request], decodes: list[Request]) -> SchedulerOutput:
        """One token of each decoding request.

        An unfinished prefill stays in the list, so that it is the first to be preempted when blocks run out, but the
        decodes use the whole budget of tokens.
        """
        self._consecutive_prefills = 0
        self.running = decodes + prefills
        with self._limits(running=len(self.running), tokens=len(decodes)):
            return super().schedule()

    @contextmanager
    def _limits(self, running: int, tokens: int) -> Iterator[None]:
        saved = self.max_num_running_reqs, self.max_num_scheduled_tokens
        self.max_num_running_reqs, self.max_num_scheduled_tokens = running, tokens
        try:
            yield
        finally:
            self.max_num_running_reqs, self.max_num_scheduled_tokens = saved


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):
    """The same, one step ahead of the tokens."""


def _merged(empty: SchedulerOutput, output: SchedulerOutput) -> SchedulerOutput:
    """``output`` with the notifications that an earlier attempt of the same step has taken out of the scheduler."""
    output.finished_req_ids |= empty.finished_req_ids
    output.free_encoder_mm_hashes = [*empty.free_encoder_mm_hashes, *output.free_encoder_mm_hashes]
    output.preempted_req_ids = (empty.preempted_req_ids or set()) | (output.preempted_req_ids or set())
    return output
