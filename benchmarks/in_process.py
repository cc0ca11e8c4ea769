"""vLLM's engine in this process, driven step by step, so that single steps can be timed. No API server takes part."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BUCKETS = {"neuron_config": {"num_batched_tokens_buckets": [128, 256, 512, 1024], "num_seqs_buckets": [1, 8, 32]}}
"""additional_config of an engine for up to 32 requests and steps of 1024 tokens."""
WARM_STEPS = 10
"""Decode steps of a batch that are not timed."""


@dataclass(frozen=True)
class Times:
    """Seconds of one batch.

    Attributes:
        prefill: until every request had its first token.
        steps: of each decode step in which all requests took part.
    """

    prefill: float
    steps: tuple[float, ...]


@contextmanager
def engine(model: str, **arguments: Any) -> Iterator[Any]:
    """An `LLM` of these arguments; its memory is given back at the end of the block."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(model, seed=0, **arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def prompt(row: int, tokens: int) -> list[int]:
    """Token ids that every vocabulary of the benchmarks has, others for each row of a batch."""
    return [10 + (31 * row + 17 * i) % 400 for i in range(tokens)]


def core_of(llm: Any) -> Any:
    """The engine core: its scheduler and, below it, the worker."""
    return llm.llm_engine.engine_core.engine_core


def time_batch(llm: Any, prompts: Sequence[Sequence[int]], steps: int, **sampling: Any) -> Times:
    """Prefill these prompts and decode them together for `steps` timed steps; end of sequence is ignored.

    Raises:
        RuntimeError: the prompts leave too little room for answers below max_model_len.
    """
    from vllm import SamplingParams

    core, batch = core_of(llm), len(prompts)
    params = SamplingParams(max_tokens=None, ignore_eos=True, detokenize=False, **sampling)
    names = [f"{batch}-{index}" for index in range(batch)]
    for name, prompt in zip(names, prompts, strict=True):
        llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
    begin = last = time.perf_counter()
    seconds: list[float] = []
    prefill, tokens, full = 0.0, 0, 0
    while len(seconds) < steps:
        if not (core.scheduler.has_requests() or core.batch_queue):
            raise RuntimeError(f"{batch} requests ended after {len(seconds)} of {steps} steps: raise max_model_len")
        outputs, _ = core.step_fn()
        new = sum(len(output.new_token_ids) for output in outputs[0].outputs) if outputs else 0
        now, tokens = time.perf_counter(), tokens + new
        if not prefill and tokens >= batch:
            prefill = now - begin
        if new < batch:
            continue
        full += 1
        if full > WARM_STEPS:
            seconds.append(now - last)
        last = now
    llm.llm_engine.abort_request(names)
    while core.scheduler.has_requests() or core.batch_queue:
        core.step_fn()
    return Times(prefill, tuple(seconds))
