"""Sampling on the host: vLLM's own sampler, grammar masks and prompt logprobs."""

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm.config.model import LogprobsMode
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.models.model import StepOutputs
from vllm_neuron.plugin.batch import Batch
from vllm_neuron.plugin.step import Step, Tokens
from vllm_neuron.sampling import mask_logits

if TYPE_CHECKING:
    from vllm.v1.sample.sampler import Sampler

PIECE_ROWS = 128
"""Prompt logprobs are computed for so many tokens at a time: a row of logits takes 4 bytes for every token there is."""


class HostSampling:
    """See `Sampling`. A step's graph runs when it is begun, and its logits are sampled when it is finished.

    Args:
        executor: runs the graphs.
        logprobs_mode: vLLM's.
        vocab_size: V.
    """

    def __init__(self, executor: GraphExecutor, logprobs_mode: LogprobsMode, vocab_size: int) -> None:
        self._executor = executor
        self._sampler = _vllm_sampler(logprobs_mode)
        self._vocab_size = vocab_size
        self._prompt_logprobs = PromptLogprobs(executor, self._sampler, vocab_size)
        self._outputs: StepOutputs | None = None
        self._of_prompts: dict[str, LogprobsTensors | None] = {}

    def discard(self, req_id: str) -> None:
        self._prompt_logprobs.discard(req_id)

    def begin(self, step: Step) -> None:
        self._of_prompts = {}
        if not step.is_prefill:
            self._outputs = self._executor.run_decode(step.rows)
            return
        (row,), (state,) = step.rows, step.states
        self._outputs = self._executor.run_prefill(row)
        logprobs = self._prompt_logprobs.add(state, row.start, self._outputs.hidden)
        if logprobs is not None:
            self._of_prompts[state.req_id] = logprobs

    def finish(self, step: Step, grammar: GrammarOutput | None) -> Tokens:
        assert self._outputs is not None
        outputs, self._outputs = self._outputs, None
        if not step.wants_tokens:
            return Tokens([], None, self._of_prompts)
        if grammar is not None:
            apply_grammar(grammar, step.batch, outputs.logits)
        sampled = self._sampler(outputs.logits, step.batch.sampling_metadata)
        logprobs = sampled.logprobs_tensors
        return Tokens(sampled.sampled_token_ids.flatten().tolist(), logprobs and logprobs.tolists(), self._of_prompts)

    def warm_up(self, prefill_batch: Batch, decode_batch: Batch) -> None:
        """Sample once from each batch with everything turned on, so that no request waits for a first trace."""
        for batch, sizes in ((prefill_batch, (1,)), (decode_batch, (1, 2))):
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
        batch.discard(list(batch.req_ids))
        batch.input_batch.condense()
        batch.input_batch.refresh_metadata()


def apply_grammar(grammar: GrammarOutput, batch: Batch, logits: torch.Tensor) -> None:
    """Set the logits [R, V] of tokens that a grammar forbids to -inf, in place.

    Not by vLLM's own function: for a row whose tokens are all allowed, xgrammar's kernel for the CPU writes one element
    past its end if V is no multiple of 32.
    """
    for req_id, mask in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True):
        index = batch.input_batch.req_id_to_index.get(req_id)
        if index is not None:
            row = logits[index : index + 1]
            row.copy_(mask_logits(row, torch.from_numpy(mask.copy())[None]))


def _vllm_sampler(logprobs_mode: LogprobsMode) -> "Sampler":
    """vLLM's sampler, imported without Inductor: three seconds, for a function that only another platform calls."""

    def uncompiled(*functions: Any, **_: Any) -> Any:
        return functions[0] if functions else uncompiled

    with patch.object(torch, "compile", uncompiled):
        from vllm.v1.sample.sampler import Sampler
    return Sampler(logprobs_mode)


class PromptLogprobs:
    """Collects the logprobs of prompts, which may be computed over several steps.

    Args:
        executor: turns hidden states into logits.
        sampler: turns logits into logprobs.
        vocab_size: V.
    """

    def __init__(self, executor: GraphExecutor, sampler: "Sampler", vocab_size: int) -> None:
        self._executor = executor
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._collected: dict[str, LogprobsTensors] = {}

    def discard(self, req_id: str) -> None:
        """Forget a request that is gone."""
        self._collected.pop(req_id, None)

    def add(self, state: CachedRequestState, start: int, hidden: torch.Tensor) -> LogprobsTensors | None:
        """Take the hidden states [n, H] of prompt tokens from position ``start`` on.

        Returns:
            The logprobs of all tokens but the first, once the prompt is complete; None before that, and for requests
            that have not asked for any or have theirs already.
        """
        params = state.sampling_params
        if params is None or params.prompt_logprobs is None or state.output_token_ids:
            return None
        wanted = self._vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
        prompt = state.prompt_token_ids or []
        collected = self._collected.get(state.req_id)
        if collected is None:
            collected = LogprobsTensors.empty_cpu(len(prompt) - 1, wanted + 1)
            self._collected[state.req_id] = collected
        # The last token of the prompt predicts the first one of the answer, which the sampler deals with.
        end = min(start + len(hidden), len(prompt) - 1)
        for first in range(start, end, PIECE_ROWS):
            last = min(first + PIECE_ROWS, end)
            logits = self._executor.prompt_logits(hidden[first - start : last - start])
            targets = torch.tensor(prompt[first + 1 : last + 1], dtype=torch.int64)
            piece = self._sampler.gather_logprobs(self._sampler.compute_logprobs(logits), wanted, targets)
            for whole, part in zip(collected[:3], piece[:3], strict=True):
                whole[first:last] = part
        if start + len(hidden) < len(prompt):
            return None
        return self._collected.pop(state.req_id)
