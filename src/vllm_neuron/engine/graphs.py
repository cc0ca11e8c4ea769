"""The one list of all graphs of a configuration."""

from dataclasses import dataclass
from typing import Literal

GraphKind = Literal["prefill", "decode", "prompt_logits"]


@dataclass(frozen=True)
class GraphSpec:
    """What a graph is specialised to.

    Attributes:
        kind: "prefill" (one request, many rows), "decode" (many requests, one row each) or "prompt_logits" (hidden
            states in, logits out, for prompt logprobs).
        tokens: T, rows of the step.
        requests: B, requests of the step.
        context: S, tokens that a request's block table spans; 0 for "prompt_logits".
    """

    kind: GraphKind
    tokens: int
    requests: int
    context: int

    @property
    def name(self) -> str:
        """Name in logs, metrics and cache manifests, e.g. "decode_b8_ctx4096"."""
        match self.kind:
            case "prefill":
                return f"prefill_t{self.tokens}_ctx{self.context}"
            case "decode":
                return f"decode_b{self.requests}_ctx{self.context}"
            case "prompt_logits":
                return f"prompt_logits_t{self.tokens}"
