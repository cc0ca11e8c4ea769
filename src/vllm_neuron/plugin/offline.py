"""A model on its graphs without vLLM's engine around it, from the flags of `vllm serve`. For validation."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vllm_neuron.config import ResolvedConfig
from vllm_neuron.engine.compiler import open_cache
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.graphs import graphs_for_validation
from vllm_neuron.kv_cache.layout import blocks_for
from vllm_neuron.models.model import Model
from vllm_neuron.models.registry import build_model
from vllm_neuron.plugin.compile import CompileFaultsError, engine_config, require_platform, working_route
from vllm_neuron.plugin.settings import model_dtype, resolved_config
from vllm_neuron.plugin.weights import checkpoint_folder, load_model_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig


@dataclass(frozen=True)
class OfflineModel:
    """What `vllm serve` would serve.

    Attributes:
        model: functions and weight table.
        config: the resolved configuration.
        dtype: of weights, activations and KV cache.
        folder: of the checkpoint.
        tokenizer: folder or name of the tokenizer.
    """

    vllm_config: "VllmConfig"
    model: Model
    config: ResolvedConfig
    dtype: torch.dtype
    folder: str
    tokenizer: str

    def check(self, sequences: Sequence[int], requests: int) -> None:
        """Check that sequences of these lengths fit into the configuration.

        Raises:
            CompileFaultsError: one is too long, or they are too many.
        """
        config = self.config
        faults = []
        if max(sequences) > config.max_model_len:
            faults.append(
                f"--max-model-len={config.max_model_len}: the longest prompt and its continuation are "
                f"{max(sequences)} tokens. Raise it, or lower --tokens."
            )
        if requests > config.max_num_seqs:
            faults.append(
                f"--max-num-seqs={config.max_num_seqs}: {requests} prompts are decoded together. Raise it, or give "
                "fewer prompts."
            )
        if faults:
            raise CompileFaultsError(faults)

    @contextmanager
    def running(self, prompts: Sequence[int], sequences: Sequence[int]) -> "Iterator[GraphExecutor]":
        """An executor of the graphs that these prompts and sequences, given by their lengths, need.

        The KV cache has as many blocks as a server's, so that its compiled graphs are found.

        Raises:
            CompileFaultsError: the compile route does not work here.
            CheckpointError: the checkpoint is not readable, or does not fit the model.
        """
        from vllm_neuron.plugin.memory import expected_blocks

        config = replace(self.config, on_device_sampling=None, async_scheduling=False)
        try:
            route = working_route(config)
            cache = open_cache(config, route)
            blocks = expected_blocks(self.vllm_config, self.model).num_blocks
        except (RuntimeError, ValueError, OSError) as error:
            raise CompileFaultsError([str(error)]) from error
        needed = 1 + sum(blocks_for(tokens, config.block_size) for tokens in sequences)
        step = config.max_num_batched_tokens
        chunks = {min(step, tokens - start) for tokens in (*prompts, *sequences) for start in range(0, tokens, step)}
        graphs = graphs_for_validation(config, chunks, len(prompts))
        weights = load_model_weights(self.vllm_config, self.model)
        executor = GraphExecutor(self.model, config, route, cache, weights, self.dtype, graphs)
        del weights
        try:
            executor.allocate_kv_cache(max(blocks, needed))
            executor.warm_up()
            yield executor
        finally:
            executor.close()


def open_offline(arguments: Sequence[str]) -> OfflineModel:
    """The model that a command line of `vllm serve` names. Reads no weight yet.

    Raises:
        CompileFaultsError: the flags, the configuration or the environment do not allow it.
    """
    require_platform()
    vllm_config = engine_config(arguments)
    config = resolved_config(vllm_config)
    if config.cpu_compile:
        raise CompileFaultsError(["VLLM_NEURON_CPU_COMPILE=1 only compiles, and nothing can be run. Unset it."])
    model = build_model(vllm_config.model_config.hf_text_config, config.max_model_len)
    names = vllm_config.model_config
    return OfflineModel(
        vllm_config, model, config, model_dtype(vllm_config), str(checkpoint_folder(vllm_config)), names.tokenizer
    )
