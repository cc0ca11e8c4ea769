"""Async scheduling: steps that are under way while the next one is prepared.

The host learns the tokens of a step late. Until then a placeholder stands for each of them, and a decode step takes
them from where the step before has left them. That needs the same requests in both steps, if perhaps in other rows; a
step of other requests waits for the tokens, as without async scheduling.
"""

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm_neuron.engine.executor import SubmittedStep
from vllm_neuron.engine.inputs import Row
from vllm_neuron.plugin.batch import Batch
from vllm_neuron.plugin.requests import RequestStates
from vllm_neuron.plugin.step import Step

logger = logging.getLogger(__name__)

PLACEHOLDER = 0
"""In place of a token that is not known yet: any id of the vocabulary."""


@dataclass
class AsyncStatistics:
    """How often the next step did not wait.

    Attributes:
        async_steps: decode steps that were submitted before the host knew the tokens they compute.
        sync_fallback_steps: decode steps that waited for these tokens, because the batch's composition had changed.
    """

    async_steps: int = 0
    sync_fallback_steps: int = 0


@dataclass(frozen=True)
class _Pending:
    """A step whose tokens the host does not know.

    Attributes:
        step: what was submitted.
        submitted: how to get at its tokens.
        positions: per row, the token's place in the answer.
    """

    step: Step
    submitted: SubmittedStep
    positions: Sequence[int]

    def rows(self) -> dict[str, int]:
        """The row of each request whose token is sampled."""
        return {state.req_id: row for row, state in enumerate(self.step.states)} if self.step.wants_tokens else {}


class Pipeline:
    """The steps that are under way, and the tokens they owe.

    Args:
        states: of all requests.
        batches: hold copies of their tokens.
    """

    def __init__(self, states: RequestStates, batches: Collection[Batch]) -> None:
        self._states = states
        self._batches = batches
        self._pending: deque[_Pending] = deque()
        self.statistics = AsyncStatistics()

    def add(self, step: Step, submitted: SubmittedStep) -> None:
        """Keep the places of a step's tokens. Each of its requests has one more from now on."""
        positions = [len(state.output_token_ids) for state in step.states]
        self._pending.append(_Pending(step, submitted, positions))
        if step.wants_tokens:
            for row, state in enumerate(step.states):
                step.batch.append_token(row, state, PLACEHOLDER)

    def settle_finished(self) -> None:
        """Put the tokens of steps that are over in their places."""
        while self._pending and self._pending[0].submitted.sampled.done():
            self._settle(self._pending.popleft())

    def prepare_for(self, req_ids: Collection[str], is_prefill: bool) -> None:
        """Wait for tokens that a step of these requests can only take from the host."""
        owed = {req_id for pending in self._pending for req_id in pending.rows()}.intersection(req_ids)
        if not owed or (not is_prefill and self._pending[-1].rows().keys() == set(req_ids)):
            return
        logger.debug("batch composition changed: %d requests wait for the tokens of the step before", len(req_ids))
        self.statistics.sync_fallback_steps += 1
        while self._pending:
            self._settle(self._pending.popleft())

    def feed(self, rows: Sequence[Row], req_ids: Sequence[str]) -> list[Row]:
        """The rows of a decode step, those whose token the host does not know with where to take it from."""
        sources = self._pending[-1].rows() if self._pending else {}
        fed = [
            row._replace(fed_from=sources[req_id]) if req_id in sources else row
            for row, req_id in zip(rows, req_ids, strict=True)
        ]
        self.statistics.async_steps += bool(sources.keys() & set(req_ids))
        return fed

    @property
    def latest(self) -> SubmittedStep | None:
        """The step that `feed` takes tokens from."""
        return self._pending[-1].submitted if self._pending else None

    def _settle(self, pending: _Pending) -> None:
        if not pending.step.wants_tokens:
            return
        token_ids = pending.submitted.collect().token_ids.tolist()
        for state, position, token_id in zip(pending.step.states, pending.positions, token_ids, strict=True):
            state.output_token_ids[position] = token_id
            if state.req_id in self._states and self._states[state.req_id] is state:
                for batch in self._batches:
                    batch.replace_token(state.req_id, state.num_prompt_tokens + position, token_id)
