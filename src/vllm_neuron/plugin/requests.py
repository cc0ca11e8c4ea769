"""What the worker knows of each request, kept up to date by either of vLLM's two scheduler protocols.

They differ in how a preempted request comes back. In the first it is among the cached requests, marked as resumed; in
the second among the new ones, with the tokens it has generated behind its prompt.
"""

from collections.abc import Iterator

import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState

BlockIds = tuple[list[int], ...]


class RequestStates:
    """Every request that the scheduler has started and not yet finished, by id."""

    def __init__(self) -> None:
        self._states: dict[str, CachedRequestState] = {}

    def __getitem__(self, req_id: str) -> CachedRequestState:
        return self._states[req_id]

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def update(self, output: SchedulerOutput) -> set[str]:
        """Follow one scheduler step.

        Returns:
            ids of the requests that start or resume in this step: nothing that is known of their blocks holds on.
        """
        # First, because a finished id may be in use again.
        for req_id in output.finished_req_ids:
            self._states.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self._states[new.req_id] = self._start(new)
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            self._advance(self._states[req_id], cached, index)
        return {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids

    def _start(self, new: NewRequestData) -> CachedRequestState:
        if new.sampling_params is None:
            raise RuntimeError(f"Request {new.req_id} has no sampling parameters.")
        # The scheduler goes on using its own lists.
        prompt = None if new.prompt_token_ids is None else list(new.prompt_token_ids)
        length = length_from_prompt_token_ids_or_embeds(prompt, new.prompt_embeds)
        return CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=prompt,
            prompt_embeds=new.prompt_embeds,
            mm_features=[],
            sampling_params=new.sampling_params,
            generator=self._generator(new.req_id, new.sampling_params),
            block_ids=new.block_ids,
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=list(new.prefill_token_ids or ())[length:],
        )

    def _generator(self, req_id: str, params: SamplingParams) -> torch.Generator | None:
        """The request's own source of random numbers. One that comes back goes on where it was."""
        if params.sampling_type != SamplingType.RANDOM_SEED or params.seed is None:
            return None
        known = self._states.get(req_id)
        if known is not None and known.sampling_params is not None and known.sampling_params.seed == params.seed:
            return known.generator
        return torch.Generator().manual_seed(params.seed)

    def _advance(self, state: CachedRequestState, cached: CachedRequestData, index: int) -> None:
        state.num_computed_tokens = cached.num_computed_tokens[index]
        blocks = cached.new_block_ids[index]
        if state.req_id in cached.resumed_req_ids:
            assert blocks is not None
            state.block_ids = blocks
            state.output_token_ids = cached.all_token_ids[state.req_id][state.num_prompt_tokens :]
        elif blocks is not None:
            for known, added in zip(state.block_ids, blocks, strict=True):
                known.extend(added)
