"""The rows of a step, and the sampling parameters that go with them.

Prefill and decode have a batch each. A prefill step between two decode steps then leaves the decode batch as it is:
nothing is copied out and in again.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_neuron.engine.inputs import Row
from vllm_neuron.plugin.requests import BlockIds, RequestStates

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Batch:
    """Requests of one kind of step, in the order of the step's rows; wraps vLLM's InputBatch.

    Args:
        vllm_config: vLLM's configuration.
        max_num_reqs: most requests of a step.
        num_groups: G, KV groups.
    """

    def __init__(self, vllm_config: "VllmConfig", max_num_reqs: int, num_groups: int) -> None:
        model = vllm_config.model_config
        block_sizes: list[int] = [vllm_config.cache_config.block_size] * num_groups
        device = torch.device("cpu")
        processors = build_logitsprocs(vllm_config, device, False, False, model.logits_processors or ())
        self.input_batch = InputBatch(
            max_num_reqs=max_num_reqs,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            device=device,
            pin_memory=False,
            vocab_size=model.get_vocab_size(),
            block_sizes=block_sizes,
            kernel_block_sizes=block_sizes,
            logitsprocs=processors,
            logitsprocs_need_output_token_ids=bool(model.logits_processors),
        )

    @property
    def req_ids(self) -> list[str]:
        """Ids in the order of the rows."""
        return self.input_batch.req_ids

    @property
    def sampling_metadata(self) -> SamplingMetadata:
        """Sampling parameters in the order of the rows."""
        return self.input_batch.sampling_metadata

    def discard(self, req_ids: Collection[str]) -> None:
        """Forget requests that have finished, or that go on in the other batch."""
        for req_id in req_ids:
            index = self.input_batch.remove_request(req_id)
            if index is not None:
                # Otherwise they stay in memory until the row has embeddings again.
                self.input_batch.req_prompt_embeds.pop(index, None)

    def sync(
        self,
        scheduled: Collection[str],
        states: RequestStates,
        new_blocks: Mapping[str, BlockIds | None],
        restarted: Collection[str],
    ) -> None:
        """Hold exactly the requests of a step.

        Args:
            scheduled: their ids.
            states: what is known of them.
            new_blocks: blocks that this step adds, by id.
            restarted: ids whose blocks are all new.
        """
        batch = self.input_batch
        known = set(batch.req_id_to_index)
        self.discard([req_id for req_id in known if req_id not in scheduled or req_id in restarted])
        for req_id in scheduled:
            index = batch.req_id_to_index.get(req_id)
            if index is None:
                self._add(states[req_id])
                continue
            batch.num_computed_tokens_cpu[index] = states[req_id].num_computed_tokens
            blocks = new_blocks.get(req_id)
            if blocks is not None:
                batch.block_table.append_row(blocks, index)
        batch.condense()
        batch.refresh_metadata()

    def _add(self, state: CachedRequestState) -> None:
        batch = self.input_batch
        index = batch.add_request(state)
        if state.prompt_token_ids is None:
            # The sampler's penalties would count ids that the row's last request has left behind. This id is none.
            batch.token_ids_cpu[index, : state.num_prompt_tokens] = batch.vocab_size

    def row(self, index: int, count: int, wants_logits: bool = True) -> Row:
        """The next ``count`` tokens of the request in row ``index``."""
        batch = self.input_batch
        start = int(batch.num_computed_tokens_cpu[index])
        if start + count > batch.num_tokens_no_spec[index]:
            raise RuntimeError(
                f"Request {batch.req_ids[index]} is to compute tokens {start} to {start + count - 1}, and only "
                f"{batch.num_tokens_no_spec[index]} are known."
            )
        tables = batch.block_table.block_tables
        blocks = tuple(t.block_table.np[index, : t.num_blocks_per_row[index]] for t in tables)
        return Row(batch.token_ids_cpu[index, start : start + count], start, blocks, wants_logits)

    def replace_token(self, req_id: str, position: int, token_id: int) -> None:
        """Put a token in the place of another, counted from the start of the prompt, if the request is here."""
        index = self.input_batch.req_id_to_index.get(req_id)
        if index is not None:
            self.input_batch.token_ids_cpu[index, position] = token_id

    def append_token(self, index: int, state: CachedRequestState, token_id: int) -> None:
        """Note a sampled token."""
        batch = self.input_batch
        batch.token_ids_cpu[index, batch.num_tokens_no_spec[index]] = token_id
        batch.num_tokens_no_spec[index] += 1
        # The sampler's penalties read the same list.
        state.output_token_ids.append(token_id)


def with_embeddings(row: Row, state: CachedRequestState) -> Row:
    """The row with the embeddings of those of its tokens that have no ids. Generated tokens have ids."""
    if state.prompt_embeds is None or row.start >= len(state.prompt_embeds):
        return row
    return row._replace(embeddings=state.prompt_embeds[row.start : row.end])
