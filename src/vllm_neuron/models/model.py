"""What a model is: a weight table, constants, and two pure functions.

Shape letters: T tokens of a step, B requests, R rows whose logits are wanted, H hidden, V vocabulary, L layers,
G KV groups, S context tokens that a block table spans, BS block size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_neuron import nn
from vllm_neuron.kv_cache.layout import KVCache, KVLayerSpec
from vllm_neuron.models.errors import UnsupportedModelError
from vllm_neuron.weights.table import Weights, WeightTable


class PromptEmbeddings(NamedTuple):
    """Rows of a prefill step that are given as embeddings rather than as token ids.

    Attributes:
        values: [T, H] in the model's dtype; only the rows of the mask count.
        mask: [T] bool, true for the rows whose embedding is given. Their token id is 0.
    """

    values: torch.Tensor
    mask: torch.Tensor


class StepInputs(NamedTuple):
    """Everything that varies from step to step. A graph is specialised to the shapes only; what is not said otherwise
    is int32.

    A step holds B requests with T / B rows each: a prefill step has B = 1, a decode step one row per request.

    Attributes:
        token_ids: [T]; padding is 0.
        positions: [T], position of each row in its request. A row sees the cache at positions 0 .. its own, so this
            is the attention mask too. Padding rows repeat the last real position (prefill) or 0 (decode).
        block_tables: G tensors [B, S / BS]: physical block of each logical block; absent blocks are the null block.
            Those of groups with a sliding window have fewer columns: they begin where the window does.
        slot_mappings: G tensors [T]: the slot each row's keys and values are written to. Padding rows write to slots
            of the null block, never to a live one.
        logits_rows: [R]: the rows of T whose logits the step returns (R = B). Padding repeats the last row.
        embeddings: in prefill graphs where prompts may be embeddings, in no other.
        table_positions: per KV group [T], `positions` counted from the first block of the group's block table, or an
            empty tuple where those are the same. May be left out where they are the same for all groups.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    logits_rows: torch.Tensor
    # A tuple without tensors is no argument of a graph at all, which None would be.
    embeddings: PromptEmbeddings | tuple[()] = ()
    table_positions: tuple[torch.Tensor | tuple[()], ...] = ()

    def positions_in_table(self, group: int) -> torch.Tensor:
        """[T]: position of each row in the tokens that a KV group's block table spans. What attention takes."""
        positions = self.table_positions[group] if self.table_positions else ()
        return positions if isinstance(positions, torch.Tensor) else self.positions


class LayerOutputs(NamedTuple):
    """What a step computes on its way, to see where it goes wrong.

    Attributes:
        residuals: L + 1 of [T, H] in the model's dtype: before the first layer, and after each.
        hidden: [T, H] in the model's dtype, after the final norm.
        logits: [T, V] float32, of every row.
    """

    residuals: tuple[torch.Tensor, ...]
    hidden: torch.Tensor
    logits: torch.Tensor


class StepOutputs(NamedTuple):
    """What a step computes.

    Attributes:
        logits: [R, V] float32, for the rows asked for.
        hidden: [T, H] in the model's dtype, after the final norm (prompt logprobs and pooling are made from it).
    """

    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class Model:
    """One architecture at one configuration.

    Attributes:
        architecture: Hugging Face's name of it, e.g. "LlamaForCausalLM".
        vocab_size: V.
        hidden_size: H.
        weight_table: each weight once.
        constants: tensors computed from the configuration (rope frequencies); they join the weights, so that no
            graph holds a literal.
        kv_layers: one entry per attention layer; see `with_groups` where they differ in their window.
        forward: (weights, kv_cache, inputs) -> (hidden [T, H] after the final norm, new kv_cache).
        logits: (weights, hidden [R, H]) -> [R, V] float32.
        residual_stream: `forward`, with the residual [T, H] before the first layer and after each between its two
            results; no graph that serves returns it. None: the model's layers cannot be validated one by one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    weight_table: WeightTable
    constants: Mapping[str, torch.Tensor]
    kv_layers: tuple[KVLayerSpec, ...]
    forward: Callable[[Weights, KVCache, StepInputs], tuple[torch.Tensor, KVCache]]
    logits: Callable[[Weights, torch.Tensor], torch.Tensor]
    residual_stream: (
        Callable[[Weights, KVCache, StepInputs], tuple[torch.Tensor, tuple[torch.Tensor, ...], KVCache]] | None
    ) = None

    def step(self, weights: Weights, kv_cache: KVCache, inputs: StepInputs) -> tuple[StepOutputs, KVCache]:
        """The function every prefill and decode graph is made of."""
        hidden, kv_cache = self.forward(weights, kv_cache, inputs)
        rows = nn.embedding(inputs.logits_rows, hidden)
        return StepOutputs(self.logits(weights, rows), hidden), kv_cache

    def layers(self, weights: Weights, kv_cache: KVCache, inputs: StepInputs) -> tuple[LayerOutputs, KVCache]:
        """The function that graphs for validation are made of.

        Raises:
            UnsupportedModelError: the model does not tell what its layers leave.
        """
        if self.residual_stream is None:
            raise UnsupportedModelError(f"{self.architecture} has no residual_stream, so its layers cannot be seen")
        hidden, residuals, kv_cache = self.residual_stream(weights, kv_cache, inputs)
        return LayerOutputs(residuals, hidden, self.logits(weights, hidden)), kv_cache


def input_embeddings(inputs: StepInputs, table: torch.Tensor) -> torch.Tensor:
    """What the first layer reads [T, H]: rows of `table` [V, H] by token id, or those that the step brings along."""
    embedded = nn.embedding(inputs.token_ids, table)
    if not inputs.embeddings:
        return embedded
    return torch.where(inputs.embeddings.mask.unsqueeze(1), inputs.embeddings.values, embedded)
