"""What padding costs: one step of the same live rows in ever larger buckets, on the native route's CPU kernels.

    python -m pytest benchmarks/test_bucketing.py --benchmark-columns=min,median,rounds

The model is that of benchmarks/test_steps.py. On the CPU, work on padding is work; on a device a bucket costs
what its graph costs, however many rows are live. The second half is the search for bucket lists itself.
"""

from typing import Any

import pytest
import torch
from steps import BLOCK_SIZE, CONTEXT, SIZES, compiled_step, step_inputs

from vllm_neuron.advisor.partition import best_partitions
from vllm_neuron.models.model import StepInputs
from vllm_neuron.models.registry import build_model


def decode_inputs(live: int, bucket: int) -> StepInputs:
    """`live` requests at a context of 200 tokens, padded to `bucket`."""
    inputs = step_inputs(bucket, 1, 1, 200)
    inputs.token_ids[live:] = 0
    inputs.positions[live:] = 0
    inputs.block_tables[0][live:] = 0
    inputs.slot_mappings[0][live:] = 0
    return inputs


CASES = {f"prefill of 300 in {b}": (lambda b=b: step_inputs(1, b, 300, 0)) for b in (300, 512, 1024)}
CASES |= {f"decode of 3 in {b}": (lambda b=b: decode_inputs(3, b)) for b in (3, 4, 8)}


@pytest.mark.parametrize("name", CASES)
def test_step_in_a_bucket(benchmark: Any, name: str) -> None:
    torch.manual_seed(0)
    run = compiled_step("native", build_model(SIZES), CASES[name](), 1 + 8 * CONTEXT // BLOCK_SIZE)
    benchmark.pedantic(run, rounds=8, warmup_rounds=2)


@pytest.mark.parametrize("distinct", [64, 512])
def test_search_for_bucket_lists(benchmark: Any, distinct: int) -> None:
    sizes = {1 + 7 * index: 1 + index % 5 for index in range(distinct)}
    benchmark.pedantic(best_partitions, args=(sizes, 7 * distinct, 8), rounds=5)
