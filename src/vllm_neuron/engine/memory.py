"""How much memory a worker's KV cache gets: the budget policy applied to this machine, model and configuration."""

import logging

import torch

from vllm_neuron.config.blocks import request_blocks
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.kv_cache.budget import (
    GIB,
    BudgetPolicy,
    KVBudget,
    KVBudgetError,
    cpu_budget,
    neuron_budget,
    require_blocks_for_one_request,
    require_minimum,
    require_one_request,
    steady,
)
from vllm_neuron.kv_cache.layout import block_bytes, cache_dtype, group_windows, num_groups
from vllm_neuron.models.model import Model

logger = logging.getLogger(__name__)

CPU_CACHE_MULTIPLE = 4
"""In CPU mode by default, KV for this many times max_num_seqs requests of max_model_len tokens, at most."""


def kv_budget_on_cpu(config: ResolvedConfig, host_available: int, local_workers: int) -> KVBudget:
    """Budget of one worker in CPU mode; ``host_available`` is measured after the weights are loaded."""
    return cpu_budget(host_available, local_workers, budget_policy(config))


def kv_budget_on_neuron(config: ResolvedConfig, model: Model, dtype: torch.dtype, total_hbm: int) -> KVBudget:
    """Budget of one worker on a device with ``total_hbm`` bytes. Weights are counted from the model's table."""
    return neuron_budget(total_hbm, weight_bytes(model, dtype), budget_policy(config))


def weight_bytes(model: Model, dtype: torch.dtype) -> int:
    """Bytes that the weights of a model take when it is served in ``dtype``."""
    return sum(spec.num_bytes(dtype) for spec in model.weight_table.values())


def kv_cache_bytes(config: ResolvedConfig, model: Model, dtype: torch.dtype, budget: KVBudget) -> int:
    """Bytes the KV cache is to take: the budget after all checks, or exactly num_gpu_blocks_override blocks.

    In CPU mode two things keep a development machine usable. The budget is rounded down (`steady`), so that a restart
    finds the graphs of the start before it. And unless a headroom is set, which asks for all there is, the cache is no
    larger than CPU_CACHE_MULTIPLE times what all requests can use at once: a tiny model would fill gigabytes with
    millions of blocks.

    Raises:
        KVBudgetError: below the configured minimum, too small for one request of max_model_len, or more blocks set by
            hand than there is memory.
    """
    require_minimum(budget)
    per_block = block_bytes(model.kv_layers, config.block_size, dtype)
    blocks = config.num_gpu_blocks_override
    if blocks is not None:
        num_bytes = bytes_set_by_hand(config, model, dtype, blocks)
        if num_bytes > budget.without_reserve:
            raise KVBudgetError(
                f"num_gpu_blocks_override={blocks} takes {num_bytes / GIB:.3f} GiB, and only "
                f"{budget.without_reserve / GIB:.3f} GiB are there for a worker. Set it to "
                f"{budget.without_reserve // per_block} or less, or leave it unset."
            )
        logger.info("%s", _report(config, model, dtype, budget, num_bytes, f"num_gpu_blocks_override={blocks}"))
        return num_bytes
    require_one_request(budget, per_block, lambda tokens: _blocks_of(config, model, tokens), config.max_model_len)
    num_bytes, reason = budget.num_bytes, "the whole budget"
    if config.cpu_mode:
        num_bytes = steady(num_bytes, max(_one_request(config, model, per_block), round(config.kv_minimum_gib * GIB)))
        reason = "the budget rounded down, so that the next start finds the same graphs"
        plenty = plenty_on_cpu(config, model, dtype)
        if plenty is not None and plenty < num_bytes:
            num_bytes = plenty
            reason = f"limited to {CPU_CACHE_MULTIPLE} times what max_num_seqs={config.max_num_seqs} requests can use"
    logger.info("%s", _report(config, model, dtype, budget, num_bytes, reason))
    return num_bytes


def _report(
    config: ResolvedConfig, model: Model, dtype: torch.dtype, budget: KVBudget, num_bytes: int, reason: str
) -> str:
    """The arithmetic from memory to tokens, a line per step."""
    per_block = block_bytes(model.kv_layers, config.block_size, dtype)
    blocks = num_bytes // per_block
    # Block 0 is the null block, which holds nothing.
    requests = (blocks - 1) / _blocks_of(config, model, config.max_model_len)
    groups = num_groups(model.kv_layers)
    shared = "" if groups == 1 else f", shared by {groups} groups of layers"
    stored = str(cache_dtype(model.kv_layers, dtype)).removeprefix("torch.")
    lines = (
        f"KV cache: {num_bytes / GIB:.3f} GiB per worker",
        f"  policy   {budget.policy.settings}",
        f"  budget   {budget.num_bytes / GIB:.3f} GiB = {budget.formula}",
        f"  minimum  {config.kv_minimum_gib:g} GiB (VLLM_NEURON_MIN_KV_BUDGET_GIB)",
        f"  taken    {num_bytes / GIB:.3f} GiB: {reason}",
        f"  blocks   {blocks} of {config.block_size} tokens and {per_block} bytes ({len(model.kv_layers)} layers in "
        f"{stored}{shared}), one of them for padding",
        f"  tokens   {(blocks - 1) // groups * config.block_size}, or {requests:.2f} requests of max_model_len="
        f"{config.max_model_len}",
    )
    return "\n".join(lines)


def bytes_set_by_hand(config: ResolvedConfig, model: Model, dtype: torch.dtype, blocks: int) -> int:
    """Bytes of ``blocks`` blocks, set with num_gpu_blocks_override, whether or not there is memory for them.

    Raises:
        KVBudgetError: too few for one request of max_model_len.
    """
    needed = _blocks_of(config, model, config.max_model_len)
    require_blocks_for_one_request(blocks, needed, config.block_size, config.max_model_len)
    return blocks * block_bytes(model.kv_layers, config.block_size, dtype)


def plenty_on_cpu(config: ResolvedConfig, model: Model, dtype: torch.dtype) -> int | None:
    """Bytes that the KV cache never exceeds in CPU mode; None where a headroom asks for all there is."""
    if config.kv_headroom_gib is not None:
        return None
    per_block = block_bytes(model.kv_layers, config.block_size, dtype)
    return CPU_CACHE_MULTIPLE * config.max_num_seqs * _one_request(config, model, per_block)


def _one_request(config: ResolvedConfig, model: Model, per_block: int) -> int:
    """Bytes of one request of max_model_len tokens, the null block included."""
    return (_blocks_of(config, model, config.max_model_len) + 1) * per_block


def _blocks_of(config: ResolvedConfig, model: Model, tokens: int) -> int:
    """Blocks that a request of ``tokens`` tokens holds at most at a time."""
    windows = group_windows(model.kv_layers)
    return request_blocks(windows, tokens, config.max_num_batched_tokens, config.block_size)


def budget_policy(config: ResolvedConfig) -> BudgetPolicy:
    """The configuration's settings that decide the budget."""
    return BudgetPolicy(
        memory_utilization=config.gpu_memory_utilization,
        cap_fraction=config.kv_cap_fraction,
        headroom_gib=config.kv_headroom_gib,
        minimum_gib=config.kv_minimum_gib,
    )
