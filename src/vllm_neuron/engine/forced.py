"""Given sequences through the graphs that serve: every position's logits, and what each layer leaves."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.inputs import Row
from vllm_neuron.kv_cache.blocks import blocks_for
from vllm_neuron.kv_cache.layout import num_groups
from vllm_neuron.models.model import LayerOutputs, Model


class ForcedRun:
    """Runs sequences whose tokens are all known, as requests of one batch.

    Args:
        executor: of graphs from `graphs_for_validation`, warmed up.
        model: the model.
        config: the resolved configuration.
        sequences: token ids of each.
    """

    def __init__(
        self, executor: GraphExecutor, model: Model, config: ResolvedConfig, sequences: Sequence[Sequence[int]]
    ) -> None:
        self._executor, self._step = executor, config.max_num_batched_tokens
        self._sequences = [np.asarray(tokens, dtype=np.int64) for tokens in sequences]
        self._groups = num_groups(model.kv_layers)
        # Each KV group has blocks of its own. Block 0 is the null block.
        counts = [blocks_for(len(s), config.block_size) for s in sequences for _ in range(self._groups)]
        ends = np.cumsum([0, *counts]) + 1
        self._blocks = [np.arange(start, end) for start, end in pairwise(ends)]

    @torch.inference_mode()
    def logits(self, prompt_tokens: Sequence[int]) -> list[torch.Tensor]:
        """[T, V] float32 per sequence: of the prompts by prefill graphs, of what follows by decode graphs.

        Args:
            prompt_tokens: how many tokens of each sequence are its prompt; all have the same number of further ones.
        """
        rows: list[list[torch.Tensor]] = []
        for index, count in enumerate(prompt_tokens):
            chunks = (self._row(index, *chunk) for chunk in self._chunks(count))
            rows.append([self._executor.prompt_logits(self._executor.run_prefill(row).hidden) for row in chunks])
        further = {len(s) - count for s, count in zip(self._sequences, prompt_tokens, strict=True)}
        for step in range(max(further)):
            starts = [count + step for count in prompt_tokens]
            batch = [self._row(index, start, start + 1) for index, start in enumerate(starts)]
            for produced, logits in zip(rows, self._executor.run_decode(batch).logits, strict=True):
                produced.append(logits[None])
        return [torch.cat(produced) for produced in rows]

    @torch.inference_mode()
    def layers(self) -> list[LayerOutputs]:
        """What each layer leaves, per sequence, all of it computed by "layers" graphs."""
        found = []
        for index, sequence in enumerate(self._sequences):
            parts = []
            for chunk in self._chunks(len(sequence)):
                outputs = self._executor.run_layers(self._row(index, *chunk))
                parts.append([*outputs.residuals, outputs.hidden, outputs.logits])
            *residuals, hidden, logits = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
            found.append(LayerOutputs(tuple(residuals), hidden, logits))
        return found

    def _chunks(self, tokens: int) -> list[tuple[int, int]]:
        return [(start, min(start + self._step, tokens)) for start in range(0, tokens, self._step)]

    def _row(self, index: int, start: int, end: int) -> Row:
        blocks = self._blocks[index * self._groups : (index + 1) * self._groups]
        return Row(self._sequences[index][start:end], start, tuple(blocks))
