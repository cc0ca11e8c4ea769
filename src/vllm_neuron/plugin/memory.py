"""How many blocks the KV cache gets: asked by a worker that serves, and by `vllm-neuron compile` in its place."""

from typing import TYPE_CHECKING, NamedTuple

from vllm_neuron.engine.memory import (
    bytes_set_by_hand,
    kv_budget_on_cpu,
    kv_budget_on_neuron,
    kv_cache_bytes,
    plenty_on_cpu,
    weight_bytes,
)
from vllm_neuron.kv_cache.budget import KVBudget, host_memory_available
from vllm_neuron.models.model import Model
from vllm_neuron.plugin.hardware import memory_per_core
from vllm_neuron.plugin.kv_specs import kv_cache_specs, require_groups
from vllm_neuron.plugin.settings import model_dtype, resolved_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class BlockCount(NamedTuple):
    """How many blocks the KV cache of a server would have.

    Attributes:
        num_blocks: NB, the null block included.
        measured: it follows from the memory that was free on this host, so another start may get another number.
    """

    num_blocks: int
    measured: bool


def kv_budget(vllm_config: "VllmConfig", model: Model, weights_loaded: bool) -> KVBudget:
    """The KV cache budget of one worker.

    Args:
        vllm_config: vLLM's configuration.
        model: the model.
        weights_loaded: the weights are in memory already; otherwise room for them is left.

    Raises:
        RuntimeError: the devices do not tell how much memory they have.
    """
    config, dtype = resolved_config(vllm_config), model_dtype(vllm_config)
    if not config.cpu_mode:
        return kv_budget_on_neuron(config, model, dtype, memory_per_core(config))
    to_load = 0 if weights_loaded else weight_bytes(model, dtype)
    available = max(host_memory_available() - to_load, 0)
    return kv_budget_on_cpu(config, available, vllm_config.parallel_config.local_world_size)


def expected_blocks(vllm_config: "VllmConfig", model: Model) -> BlockCount:
    """The number of blocks that a server of this configuration will have, without loading or allocating anything.

    With num_gpu_blocks_override the memory of this machine is not asked: another one may be meant to serve.

    Raises:
        KVBudgetError: too little memory, or too few blocks, for one request of max_model_len.
        RuntimeError: the devices do not tell how much memory they have.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    config, dtype = resolved_config(vllm_config), model_dtype(vllm_config)
    override = config.num_gpu_blocks_override
    if override is not None:
        num_bytes = bytes_set_by_hand(config, model, dtype, override)
    else:
        num_bytes = kv_cache_bytes(config, model, dtype, kv_budget(vllm_config, model, weights_loaded=False))
    specs = kv_cache_specs(model, config.block_size, dtype)
    kv_cache_config = get_kv_cache_configs(vllm_config, [specs], [num_bytes])[0]
    require_groups(kv_cache_config, model)
    measured = config.cpu_mode and override is None and num_bytes != plenty_on_cpu(config, model, dtype)
    return BlockCount(kv_cache_config.num_blocks, measured)
