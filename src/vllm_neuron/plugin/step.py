"""What the model runner and the two ways of sampling hand to each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_neuron.engine.inputs import Row
from vllm_neuron.plugin.batch import Batch


@dataclass(frozen=True)
class Step:
    """A step as the scheduler wants it: one prefill, or one token of each of several requests.

    Attributes:
        batch: holds the step's requests, in the order of the rows.
        states: of the requests, in the order of the rows.
        rows: what each request computes.
        is_prefill: whether it is a prefill.
        num_logprobs: the most logprobs that a request of the batch asks for, besides that of its token; None: no
            request asks for any.
    """

    batch: Batch
    states: Sequence[CachedRequestState]
    rows: Sequence[Row]
    is_prefill: bool
    num_logprobs: int | None

    @property
    def wants_tokens(self) -> bool:
        """Whether each row is followed by a new token; false of a step that computes only a part of a prompt."""
        return all(row.wants_logits for row in self.rows)


@dataclass(frozen=True)
class Tokens:
    """What came out of a step.

    Attributes:
        token_ids: one of each row, or none at all.
        logprobs: of these tokens, if any request asked for them.
        prompt_logprobs: by request, once its prompt is complete.
    """

    token_ids: list[int]
    logprobs: LogprobsLists | None = None
    prompt_logprobs: dict[str, LogprobsTensors | None] = field(default_factory=dict)


class Sampling(Protocol):
    """Where tokens come from. A step is begun and then finished; the next one begins only after that."""

    def warm_up(self, prefill: Batch, decode: Batch) -> None:
        """Do once what the first request would wait for."""
        ...

    def begin(self, step: Step) -> None:
        """Do what can be done before the grammar's masks are known."""
        ...

    def finish(self, step: Step, grammar: GrammarOutput | None) -> Tokens:
        """The tokens of the step that was begun."""
        ...

    def discard(self, req_id: str) -> None:
        """Forget a request that is gone."""
        ...
