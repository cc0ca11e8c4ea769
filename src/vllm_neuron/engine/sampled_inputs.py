"""Inputs of the graphs that sample: those of the model, and how each row is to be sampled."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.inputs import NOT_FED, InputBuilder, Row
from vllm_neuron.kv_cache.layout import group_windows
from vllm_neuron.models.model import Model, StepInputs
from vllm_neuron.sampling import ALLOW_ALL, GreedyInputs, SamplingInputs, mask_words


class FedTokens(NamedTuple):
    """Tokens that the step before has sampled, as it returned them: they need not have been on the host.

    Attributes:
        token_ids: [P] int32, what the step before returned, whichever graph it ran.
        rows: [B] int32: which of them a row takes, or NOT_FED for the token id that the host gives.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor


class SampledInputs(NamedTuple):
    """All that varies from step to step in a graph that samples.

    Attributes:
        step: of the model.
        sampling: how each of the B requests is sampled.
        fed: where a decode graph may take tokens from; empty for prefill, whose tokens the host always knows.
    """

    step: StepInputs
    sampling: SamplingInputs | GreedyInputs
    fed: FedTokens | tuple[()]


class SampledInputBuilder:
    """Fills the inputs of one graph that samples; see `InputBuilder`.

    Padding rows are greedy and free, so that whatever they compute is finite; nobody reads their tokens.

    Args:
        graph: a prefill or decode graph whose `sampling` is not "host".
        block_size: BS, tokens per KV block.
        windows: per KV group of the model how many tokens its layers look back on; None is all.
        vocab_size: V.
        hidden_size: H, of graphs that take embeddings.
        dtype: of those embeddings.
    """

    def __init__(
        self,
        graph: GraphSpec,
        block_size: int,
        windows: Sequence[int | None],
        vocab_size: int,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.graph = graph
        self._builder = InputBuilder(graph, block_size, windows, hidden_size, dtype)
        rows = graph.requests
        mask = torch.full((rows, mask_words(vocab_size)), ALLOW_ALL, dtype=torch.int32)
        self._mask = mask.numpy()
        self._masked: set[int] = set()
        fed_rows = torch.full((rows,), NOT_FED, dtype=torch.int32)
        self._fed_rows = fed_rows.numpy()
        temperature, top_p = torch.zeros(rows), torch.ones(rows)
        top_k, uniforms = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
        self._parameters = tuple(tensor.numpy() for tensor in (temperature, top_k, top_p, uniforms))
        sampling: SamplingInputs | GreedyInputs = SamplingInputs(temperature, top_k, top_p, uniforms, mask)
        if graph.sampling == "greedy":
            sampling, self._parameters = GreedyInputs(mask), ()
        nothing = torch.zeros(graph.hands_on, dtype=torch.int32)
        fed = FedTokens(nothing, fed_rows) if graph.kind == "decode" else ()
        self._inputs = SampledInputs(self._builder.inputs, sampling, fed)

    def build(self, rows: Sequence[Row]) -> SampledInputs:
        """Inputs of a step with these live rows, at most B; none at all is a warm-up step.

        Rows that say `fed_from` have no token before `feed`.

        Raises:
            ValueError: the rows do not fit the graph, a mask has another width than the vocabulary, or a row takes a
                token that no step hands on.
        """
        self._builder.build(rows)
        self._fill_parameters(rows)
        self._fill_masks(rows)
        fed = self._inputs.fed
        if not isinstance(fed, FedTokens):
            return self._inputs
        self._fed_rows[:] = NOT_FED
        for index, row in enumerate(rows):
            if row.fed_from != NOT_FED:
                if not 0 <= row.fed_from < self.graph.hands_on:
                    raise ValueError(f"{self.graph.name}: row {index} takes token {row.fed_from} of no earlier step")
                self._fed_rows[index] = row.fed_from
        return self._inputs

    def _fill_parameters(self, rows: Sequence[Row]) -> None:
        if not self._parameters:
            return
        temperature, top_k, top_p, uniforms = self._parameters
        for index, row in enumerate(rows):
            temperature[index], top_k[index], top_p[index], uniforms[index], _ = row.sampling
        temperature[len(rows) :] = 0.0

    def _fill_masks(self, rows: Sequence[Row]) -> None:
        """Masks are wide and seldom there: only rows that have one, or had one in the last step, are written."""
        masks = {index: row.sampling.mask for index, row in enumerate(rows) if row.sampling.mask is not None}
        for index in self._masked - masks.keys():
            self._mask[index] = ALLOW_ALL
        for index, mask in masks.items():
            if mask.shape != self._mask.shape[1:]:
                raise ValueError(f"{self.graph.name}: a mask of shape {mask.shape}, rows have {self._mask.shape[1:]}")
            self._mask[index] = mask
        self._masked = set(masks)


def feed(inputs: SampledInputs, token_ids: torch.Tensor) -> SampledInputs:
    """The inputs of a decode step whose rows may take their tokens from ``token_ids`` [P] int32, which the step before
    has sampled."""
    assert isinstance(inputs.fed, FedTokens)
    return inputs._replace(fed=inputs.fed._replace(token_ids=token_ids))


def input_builder(
    graph: GraphSpec, block_size: int, model: Model, dtype: torch.dtype
) -> InputBuilder | SampledInputBuilder:
    """What fills the inputs of a model's prefill or decode graph; ``dtype`` is that of embeddings."""
    windows = group_windows(model.kv_layers)
    if graph.sampling == "host":
        return InputBuilder(graph, block_size, windows, model.hidden_size, dtype)
    return SampledInputBuilder(graph, block_size, windows, model.vocab_size, model.hidden_size, dtype)
