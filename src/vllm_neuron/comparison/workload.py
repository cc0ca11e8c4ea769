"""What both sides of a comparison are asked."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

SAFE_VOCABULARY = 1000
"""Token ids below this are taken where the model's configuration is not at hand."""


@dataclass(frozen=True)
class Workload:
    """Requests that are timed, and prompts whose greedy tokens are compared.

    Attributes:
        requests: that are timed.
        concurrency: of them in flight at once.
        prompt_tokens: length of each prompt; every second one is half as long.
        output_tokens: tokens of each answer; end of sequence is ignored.
        vocabulary: token ids of timed prompts are below this.
        prompts: texts whose greedy continuations are compared, one request at a time.
        greedy_tokens: length of these continuations.
    """

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    vocabulary: int
    prompts: tuple[str, ...]
    greedy_tokens: int

    def timed_prompts(self) -> list[list[int]]:
        """Token ids of each timed prompt, the same each time; no two share a prefix that could be cached."""
        generator = random.Random(0)
        lengths = [max(1, self.prompt_tokens // (1 + index % 2)) for index in range(self.requests)]
        return [[generator.randrange(3, self.vocabulary) for _ in range(length)] for length in lengths]


def vocabulary_of(model: str) -> int:
    """Tokens of a local model's vocabulary; SAFE_VOCABULARY of a model that is not a local folder."""
    try:
        size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        return int(size)
    except (OSError, ValueError, KeyError):
        return SAFE_VOCABULARY
