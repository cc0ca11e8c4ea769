"""A model on its graphs without vLLM's engine around it, from the flags of `vllm serve`. For validation."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_neuron.config import ResolvedConfig
from vllm_neuron.engine.compiler import open_cache
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.graphs import graphs_for_validation
from vllm_neuron.kv_cache.blocks import blocks_for
from vllm_neuron.kv_cache.layout import num_groups
from vllm_neuron.models.model import Model
from vllm_neuron.models.registry import build_model
from vllm_neuron.plugin.compile import CompileFaultsError, engine_config, require_platform
from vllm_neuron.plugin.routes import working_route
from vllm_neuron.plugin.settings import model_dtype, resolved_config
from vllm_neuron.plugin.weights import checkpoint_folder, load_model_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig


class Lengths(NamedTuple):
    """Tokens of a prompt, and of the prompt and its continuation."""

    prompt: int
    whole: int


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

    def check(self, longest: int) -> None:
        """Check that a sequence of this many tokens fits into the configuration.

        Raises:
            CompileFaultsError: it does not.
        """
        if longest > self.config.max_model_len:
            raise CompileFaultsError(
                [
                    f"--max-model-len={self.config.max_model_len}: the longest prompt and its continuation are "
                    f"{longest} tokens. Raise it, or lower --tokens."
                ]
            )

    @contextmanager
    def running(self, batches: Sequence[Sequence[Lengths]], with_layers: bool) -> "Iterator[GraphExecutor]":
        """An executor of the graphs that these batches need.

        The KV cache has as many blocks as a server's, so that its compiled graphs are found.

        Args:
            batches: what is decoded together.
            with_layers: graphs that return what each layer leaves, too.

        Raises:
            CompileFaultsError: the compile route does not work here, or a batch is larger than any bucket.
            CheckpointError: the checkpoint is not readable, or does not fit the model.
        """
        from vllm_neuron.plugin.memory import expected_blocks

        config = replace(self.config, on_device_sampling=None, async_scheduling=False)
        step = config.max_num_batched_tokens
        counts = {count for batch in batches for lengths in batch for count in lengths}
        chunks = {min(step, count - start) for count in counts for start in range(0, count, step)}
        try:
            route = working_route(config)
            cache = open_cache(config, route)
            blocks = expected_blocks(self.vllm_config, self.model).num_blocks
            graphs = graphs_for_validation(config, chunks, {len(batch) for batch in batches}, with_layers)
        except (RuntimeError, ValueError, OSError) as error:
            raise CompileFaultsError([str(error)]) from error
        longest = max(sum(blocks_for(lengths.whole, config.block_size) for lengths in batch) for batch in batches)
        needed = longest * num_groups(self.model.kv_layers)
        weights = load_model_weights(self.vllm_config, self.model)
        executor = GraphExecutor(self.model, config, route, cache, weights, self.dtype, graphs=graphs)
        del weights
        try:
            # Block 0 is the null block.
            executor.allocate_kv_cache(max(blocks, 1 + needed))
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
