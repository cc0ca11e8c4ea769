"""Sampling inside the graphs: from vLLM's requests to the inputs of the sampler, and from its outputs to tokens."""

import hashlib
import re
from dataclasses import dataclass

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_neuron.engine.executor import GraphExecutor, SubmittedStep
from vllm_neuron.engine.inputs import Row, RowSampling
from vllm_neuron.plugin.batch import Batch
from vllm_neuron.plugin.step import Step, Tokens
from vllm_neuron.sampling import SampledWithLogprobs, Uniforms, mask_of, mask_words

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM puts behind every request id so that no two are the same; it is another one at each run."""


@dataclass(frozen=True)
class _Request:
    """What is kept of a request between its steps.

    Attributes:
        uniforms: its random numbers.
        allowed: mask of its allowed_token_ids, or None.
    """

    uniforms: Uniforms
    allowed: np.ndarray | None


class DeviceSampling:
    """See `Sampling`. A graph takes its masks as inputs, so it runs when these are known: as a step is finished.

    Args:
        executor: runs the graphs.
        vocab_size: V.
        seed: the server's.
        asynchronous: a step may have a row of a request that ends with the step before. Nobody reads its token.
    """

    def __init__(self, executor: GraphExecutor, vocab_size: int, seed: int, asynchronous: bool = False) -> None:
        self._asynchronous = asynchronous
        self._executor = executor
        self._vocab_size = vocab_size
        self._seed = seed
        self._requests: dict[str, _Request] = {}

    def discard(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def warm_up(self, prefill: Batch, decode: Batch) -> None:
        """Graphs that sample are warm already."""

    def begin(self, step: Step) -> None:
        """Nothing can run without the masks."""

    def finish(self, step: Step, grammar: GrammarOutput | None) -> Tokens:
        return self.collect(step, self.submit(step, grammar))

    def submit(self, step: Step, grammar: GrammarOutput | None, after: SubmittedStep | None = None) -> SubmittedStep:
        """Hand the step to its graph; ``after`` is the step that its rows may take tokens from."""
        rows, logprobs = self._with_sampling(step, grammar), step.num_logprobs is not None
        if step.is_prefill:
            return self._executor.submit_prefill(rows[0], logprobs=logprobs)
        return self._executor.submit_decode(rows, after, logprobs=logprobs)

    def collect(self, step: Step, submitted: SubmittedStep) -> Tokens:
        """The tokens of a step that was submitted, and the logprobs that its requests asked for."""
        if not step.wants_tokens:
            return Tokens([])
        sampled = submitted.collect()
        return Tokens(sampled.token_ids.tolist(), _logprobs(step, sampled))

    def _with_sampling(self, step: Step, grammar: GrammarOutput | None) -> list[Row]:
        masks = {} if grammar is None else _masks(grammar, self._vocab_size)
        return [
            row._replace(sampling=self._sampling(state, row, masks.get(state.req_id)))
            for state, row in zip(step.states, step.rows, strict=True)
        ]

    def _sampling(self, state: CachedRequestState, row: Row, mask: np.ndarray | None) -> RowSampling:
        params = state.sampling_params
        assert params is not None
        request = self._requests.get(state.req_id)
        if request is None:
            request = self._requests[state.req_id] = self._start(state.req_id, params)
        constraints = params.structured_outputs
        constrained = row.wants_logits and constraints is not None and not constraints.all_constraints_none()
        if mask is None and constrained and not self._asynchronous:
            raise RuntimeError(f"vLLM's grammars have made no mask for request {state.req_id}, which must obey one.")
        if request.allowed is not None:
            mask = request.allowed if mask is None else mask & request.allowed
        # The position of the token to come counts, not what has been seen of the answer.
        uniform = request.uniforms[row.end - state.num_prompt_tokens] if row.wants_logits else 0.0
        return RowSampling(params.temperature, params.top_k, params.top_p, uniform, mask)

    def _start(self, req_id: str, params: SamplingParams) -> _Request:
        allowed = params.allowed_token_ids
        return _Request(
            Uniforms(self._seed, request_number(req_id)),
            None if allowed is None else mask_of(allowed, self._vocab_size),
        )


def request_number(req_id: str) -> int:
    """A number of 64 bits that stands for a request's name as its client knows it.

    It does not depend on what else is served, unlike a count, which differs when another request is given up.
    """
    return int.from_bytes(hashlib.blake2b(_SUFFIX.sub("", req_id).encode(), digest_size=8).digest(), "little")


def _masks(grammar: GrammarOutput, vocab_size: int) -> dict[str, np.ndarray]:
    """Mask of each constrained request. Tokens of a tokenizer that the model does not have are left out.

    Raises:
        RuntimeError: there are not as many masks as requests, so that it is not known whose they are.
    """
    requests, masks = grammar.structured_output_request_ids, grammar.grammar_bitmask[:, : mask_words(vocab_size)]
    if len(requests) != len(masks):
        raise RuntimeError(f"vLLM's grammars have made {len(masks)} masks for {len(requests)} requests.")
    return dict(zip(requests, masks, strict=True))


def _logprobs(step: Step, sampled: object) -> LogprobsLists | None:
    """As many logprobs of each row as the most that a request of the batch asked for; vLLM leaves out the rest."""
    most = step.num_logprobs
    if most is None or not isinstance(sampled, SampledWithLogprobs):
        return None
    # Copies, because they are still read when the next step has the memory.
    ids, logprobs, ranks = (tensor.numpy().copy() for tensor in (sampled.logprob_ids, sampled.logprobs, sampled.ranks))
    return LogprobsLists(ids[:, : 1 + most], logprobs[:, : 1 + most], ranks)
