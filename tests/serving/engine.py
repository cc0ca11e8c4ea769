"""Runs vLLM's own `LLM` on the plugin, in CPU mode."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BACKENDS = ("neuron_native", "vllm_neuron")

TINY_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
    "seed": 0,
    "additional_config": {
        "neuron_config": {"num_batched_tokens_buckets": [128, 256], "num_seqs_buckets": [1, 4]},
    },
}
"""Small enough to start in seconds; long prompts are split, and 64 blocks hold two requests of full length."""


@contextmanager
def running_llm(path: Path, backend: str, **engine_args: Any) -> Iterator[Any]:
    """An `LLM` on the checkpoint through one route, in this process: one of its own would import vLLM once more.

    Args:
        path: checkpoint folder.
        backend: value of VLLM_NEURON_BACKEND.
        engine_args: what differs from `TINY_ENGINE`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NEURON_BACKEND", backend)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        try:
            llm = LLM(model=str(path), **{**TINY_ENGINE, **engine_args})
            try:
                yield llm
            finally:
                llm.llm_engine.engine_core.shutdown()
                del llm
        finally:
            gc.collect()
            cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: list[list[int]], max_tokens: int | list[int], **sampling: Any) -> list[list[int]]:
    """Token ids of each prompt's first completion; greedy and blind to EOS unless told otherwise."""
    from vllm import SamplingParams

    counts = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
    defaults = {"temperature": 0.0, "ignore_eos": True}
    params = [SamplingParams(max_tokens=count, **{**defaults, **sampling}) for count in counts]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompt(length: int, seed: int = 0, vocab_size: int = 512) -> list[int]:
    """A pseudo-random prompt: the same seed gives the same ids, and shorter ones are prefixes of longer ones."""
    state = 1_000_003 * (seed + 1)
    ids = []
    for _ in range(length):
        state = (1_103_515_245 * state + 12_345) % 2**31
        ids.append(10 + (state >> 8) % (vocab_size - 10))
    return ids


def statistics(llm: Any) -> dict[str, Any]:
    """The worker's graph counters."""
    return llm.collective_rpc("graph_statistics")[0]


def metric(llm: Any, name: str) -> float:
    """Sum of one of vLLM's own counters over its labels."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)
