"""Turns the scheduler's steps into graph calls, and logits into tokens."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.models.model import Model
from vllm_neuron.plugin.batch import Batch, with_embeddings
from vllm_neuron.plugin.requests import RequestStates
from vllm_neuron.plugin.sampling import PromptLogprobs, apply_grammar

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class _Step:
    """A step whose graph has run and whose tokens are not sampled yet.

    `logits` is [R, V] for the R rows of the batch, or [0, V] if the step only computes a part of a prompt.
    """

    output: SchedulerOutput
    batch: Batch
    logits: torch.Tensor
    prompt_logprobs: dict[str, LogprobsTensors | None] = field(default_factory=dict)


class NeuronModelRunner:
    """Serves both of vLLM's scheduler protocols; see `RequestStates` for how they differ.

    Args:
        vllm_config: vLLM's configuration.
        executor: runs the graphs.
        model: the model.
        num_groups: G, KV groups.
    """

    def __init__(self, vllm_config: "VllmConfig", executor: GraphExecutor, model: Model, num_groups: int) -> None:
        self._executor = executor
        self._sampler = Sampler(vllm_config.model_config.logprobs_mode)
        self._vocab_size = model.vocab_size
        self.states = RequestStates()
        self.prefill_batch = Batch(vllm_config, 1, num_groups)
        self.decode_batch = Batch(vllm_config, vllm_config.scheduler_config.max_num_seqs, num_groups)
        self._prompt_logprobs = PromptLogprobs(executor, self._sampler, model.vocab_size)
        self._step: _Step | None = None

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's graph.

        Returns:
            None: `sample_tokens` must be called next; or an empty output if the step computes nothing.

        Raises:
            RuntimeError: the step is of a form that the scheduler must never produce.
        """
        if self._step is not None:
            raise RuntimeError("The tokens of the step before have not been sampled.")
        restarted = self.states.update(output)
        for req_id in output.finished_req_ids:
            self._prompt_logprobs.discard(req_id)
        self.prefill_batch.discard(output.finished_req_ids)
        self.decode_batch.discard(output.finished_req_ids)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if self._is_prefill(output, restarted):
            self._step = self._run_prefill(output, restarted)
        else:
            self._step = self._run_decode(output, restarted)
        return None

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample one token for each row of the step; none for a step that computes only a part of a prompt."""
        if self._step is None:
            raise RuntimeError("There is no step to sample tokens of.")
        step, self._step = self._step, None
        batch = step.batch
        result = ModelRunnerOutput(
            req_ids=list(batch.req_ids),
            req_id_to_index=dict(batch.input_batch.req_id_to_index),
            sampled_token_ids=[[] for _ in batch.req_ids],
            prompt_logprobs_dict=step.prompt_logprobs,
        )
        if not len(step.logits):
            return result
        if grammar is not None:
            apply_grammar(grammar, step.output, batch, step.logits)
        sampled = self._sampler(step.logits, batch.sampling_metadata)
        result.sampled_token_ids = sampled.sampled_token_ids.tolist()
        for index, (token_id,) in enumerate(result.sampled_token_ids):
            batch.append_token(index, self.states[batch.req_ids[index]], token_id)
        if sampled.logprobs_tensors is not None:
            result.logprobs = sampled.logprobs_tensors.tolists()
        return result

    def warm_up_sampler(self) -> None:
        """Sample once from each batch with everything turned on, so that no request waits for a first trace."""
        for batch, sizes in ((self.prefill_batch, (1,)), (self.decode_batch, (1, 2))):
            for size in sizes:
                if size <= batch.input_batch.max_num_reqs:
                    self._sample_anything(batch, size)

    def _sample_anything(self, batch: Batch, size: int) -> None:
        params = SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, logprobs=1, repetition_penalty=1.1)
        groups = len(batch.input_batch.block_table.block_tables)
        for index in range(size):
            blocks: tuple[list[int], ...] = tuple([] for _ in range(groups))
            batch.input_batch.add_request(CachedRequestState(f"warm-up-{index}", [0], [], params, None, blocks, 0, []))
        batch.input_batch.refresh_metadata()
        with torch.inference_mode():
            self._sampler(torch.zeros(size, self._vocab_size), batch.sampling_metadata)
        batch.sync((), self.states, {}, ())

    def _is_prefill(self, output: SchedulerOutput, restarted: set[str]) -> bool:
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

    def _run_prefill(self, output: SchedulerOutput, restarted: set[str]) -> _Step:
        ((req_id, count),) = output.num_scheduled_tokens.items()
        state, batch = self.states[req_id], self.prefill_batch
        self.decode_batch.discard((req_id,))
        batch.sync((req_id,), self.states, _new_blocks(output), restarted)
        start = state.num_computed_tokens
        row = batch.row(0, count, wants_logits=start + count == state.num_tokens)
        outputs = self._executor.run_prefill(with_embeddings(row, state))
        step = _Step(output, batch, outputs.logits)
        logprobs = self._prompt_logprobs.add(state, start, outputs.hidden)
        if logprobs is not None:
            step.prompt_logprobs[req_id] = logprobs
        return step

    def _run_decode(self, output: SchedulerOutput, restarted: set[str]) -> _Step:
        batch = self.decode_batch
        self.prefill_batch.discard(output.num_scheduled_tokens)
        batch.sync(output.num_scheduled_tokens, self.states, _new_blocks(output), restarted)
        rows = [batch.row(index, 1) for index in range(len(batch.req_ids))]
        return _Step(output, batch, self._executor.run_decode(rows).logits)


def _new_blocks(output: SchedulerOutput) -> dict[str, tuple[list[int], ...] | None]:
    cached = output.scheduled_cached_reqs
    return dict(zip(cached.req_ids, cached.new_block_ids, strict=True))


def _refuse(output: SchedulerOutput, what: str) -> NoReturn:
    raise RuntimeError(
        f"The scheduler has made a step of {what}: {output.num_scheduled_tokens}. A step must be one prefill, or one "
        "token of each of any number of requests. This is a fault of the scheduler that scheduler_cls names."
    )
