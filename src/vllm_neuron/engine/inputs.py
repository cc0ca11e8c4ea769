"""The one builder of step inputs: warm-up and real steps both get theirs here.

Each graph has one set of buffers that is filled in place step after step, so shapes, strides, dtypes and the identity
of every argument never change. Padding cannot disturb anything live: padding rows write to slot 0, which belongs to
the null block, and nothing live reads their results.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_neuron.engine.graphs import GraphSpec
from vllm_neuron.engine.kv_tables import GroupTables
from vllm_neuron.models.model import PromptEmbeddings, StepInputs

NOT_FED = -1
"""In place of a row of an earlier step: the host knows the token."""


class RowSampling(NamedTuple):
    """How one request's next token is sampled on the device; see `SamplingInputs`.

    Attributes:
        temperature: 0 is greedy.
        top_k: number of candidates; 0 and below mean all.
        top_p: mass of the candidates, in (0, 1].
        uniform: the random number, in [0, 1).
        mask: [ceil(V / 32)] int32 of bits, the tokens allowed; None allows all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    uniform: float = 0.0
    mask: np.ndarray | None = None


GREEDY = RowSampling()


class Row(NamedTuple):
    """What one request adds to a step.

    Attributes:
        token_ids: [n] integers, the tokens to compute: many in a prefill step, one in a decode step.
        start: position of the first of them, which is also the number of tokens whose KV is in the cache already.
        block_ids: per KV group the request's physical blocks in order, integers; more than the step needs is fine, and
            what lies before a sliding window is not read.
        wants_logits: whether the step returns logits for the last token, or a token to follow it.
        embeddings: [m, H] floating point, what the first m of the tokens are instead of their ids; None if all are ids.
        sampling: how that token is sampled; of no effect where the host samples.
        fed_from: in a decode step, the row of an earlier step whose sampled token is to be computed instead of
            `token_ids`; NOT_FED otherwise.
    """

    token_ids: np.ndarray
    start: int
    block_ids: tuple[np.ndarray, ...]
    wants_logits: bool = True
    embeddings: torch.Tensor | None = None
    sampling: RowSampling = GREEDY
    fed_from: int = NOT_FED

    @property
    def end(self) -> int:
        """Length of the request's context after the step."""
        return self.start + len(self.token_ids)


class InputBuilder:
    """Fills the inputs of one graph.

    Args:
        graph: of any kind but "prompt_logits".
        block_size: BS, tokens per KV block; it divides the graph's context.
        windows: per KV group of the model how many tokens its layers look back on; None is all.
        hidden_size: H, of graphs that take embeddings.
        dtype: of those embeddings.
    """

    def __init__(
        self,
        graph: GraphSpec,
        block_size: int,
        windows: Sequence[int | None],
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.graph = graph
        self._groups = [GroupTables(graph, block_size, window) for window in windows]
        self.inputs = StepInputs(
            token_ids=torch.zeros(graph.tokens, dtype=torch.int32),
            positions=torch.zeros(graph.tokens, dtype=torch.int32),
            block_tables=tuple(group.block_table for group in self._groups),
            slot_mappings=tuple(group.slot_mapping for group in self._groups),
            logits_rows=torch.zeros(graph.requests, dtype=torch.int32),
            embeddings=PromptEmbeddings(
                values=torch.zeros(graph.tokens, hidden_size, dtype=dtype),
                mask=torch.zeros(graph.tokens, dtype=torch.bool),
            )
            if graph.embeddings
            else (),
            table_positions=tuple(group.positions for group in self._groups),
        )
        # The same memory seen by numpy, whose small assignments cost a fraction of torch's.
        self._token_ids = self.inputs.token_ids.numpy()
        self._positions = self.inputs.positions.numpy()
        self._logits_rows = self.inputs.logits_rows.numpy()

    def build(self, rows: Sequence[Row]) -> StepInputs:
        """Inputs of a step with these live rows; none at all is a warm-up step.

        The result is the builder's own buffers: it is valid until the next call.

        Raises:
            ValueError: the rows do not fit the graph, or a request has no block for a token. Nothing is clamped: a
                clamped index would make one request write into another's blocks.
        """
        self._check(rows)
        if self.graph.kind != "decode":
            self._fill_prefill(rows)
            self._fill_embeddings(rows)
        else:
            self._fill_decode(rows)
        return self.inputs

    def _check(self, rows: Sequence[Row]) -> None:
        name, context = self.graph.name, self.graph.context
        if len(rows) > self.graph.requests:
            raise ValueError(f"{name}: {len(rows)} requests in a step of {self.graph.requests}")
        tokens_per_request = self.graph.tokens // self.graph.requests
        for row in rows:
            if not 0 < len(row.token_ids) <= tokens_per_request:
                raise ValueError(f"{name}: {len(row.token_ids)} tokens of one request, {tokens_per_request} fit")
            if row.start < 0 or row.end > context:
                raise ValueError(f"{name}: positions {row.start} to {row.end - 1} in a context of {context} tokens")
            if row.embeddings is not None:
                self._check_embeddings(row.embeddings, len(row.token_ids))
            if len(row.block_ids) != len(self._groups):
                raise ValueError(f"{name}: {len(row.block_ids)} block lists for {len(self._groups)} KV groups")
            for group, (tables, block_ids) in enumerate(zip(self._groups, row.block_ids, strict=True)):
                if not tables.has_blocks(block_ids, row.start, row.end):
                    raise ValueError(
                        f"{name}: KV group {group} has blocks {block_ids.tolist()} for a request of {row.end} tokens, "
                        f"of which the last {len(row.token_ids)} are to be written"
                    )

    def _check_embeddings(self, given: torch.Tensor, tokens: int) -> None:
        if not self.inputs.embeddings:
            raise ValueError(f"{self.graph.name}: embeddings where the graph takes token ids only")
        hidden_size = self.inputs.embeddings.values.shape[1]
        if given.dim() != 2 or given.shape[1] != hidden_size or len(given) > tokens:
            form = list(given.shape)
            raise ValueError(f"{self.graph.name}: embeddings {form} for {tokens} tokens of hidden size {hidden_size}")

    def _fill_prefill(self, rows: Sequence[Row]) -> None:
        live = len(rows[0].token_ids) if rows else 0
        self._token_ids[live:] = 0
        self._logits_rows[0] = max(live - 1, 0)
        self._positions[live:] = rows[0].end - 1 if rows else 0
        for row in rows:
            self._token_ids[:live] = row.token_ids
            self._positions[:live] = np.arange(row.start, row.end, dtype=np.int32)
            for group, block_ids in zip(self._groups, row.block_ids, strict=True):
                group.fill(0, 0, block_ids, row.start, row.end)
        for group in self._groups:
            group.pad(len(rows), live, repeat=bool(rows))

    def _fill_embeddings(self, rows: Sequence[Row]) -> None:
        """What an earlier step left in rows outside the mask stays there: the graph does not read it."""
        if not self.inputs.embeddings:
            return
        values, mask = self.inputs.embeddings
        given = rows[0].embeddings if rows else None
        count = 0 if given is None else len(given)
        mask[:count] = True
        mask[count:] = False
        if given is not None:
            values[:count] = given
            self._token_ids[:count] = 0

    def _fill_decode(self, rows: Sequence[Row]) -> None:
        live = len(rows)
        for i, row in enumerate(rows):
            self._token_ids[i] = row.token_ids[0]
            self._positions[i] = row.start
            for group, block_ids in zip(self._groups, row.block_ids, strict=True):
                group.fill(i, i, block_ids, row.start, row.end)
        self._token_ids[live:] = 0
        self._positions[live:] = 0
        for group in self._groups:
            group.pad(live, live, repeat=False)
        self._logits_rows[:live] = np.arange(live)
        self._logits_rows[live:] = max(live - 1, 0)
