"""A long prompt in segments: time and memory of each, on both routes in CPU mode, without vLLM around it.

    python benchmarks/segmented_prefill.py --backend vllm_neuron --tokens 65536

The model is small (two layers, four heads of 16, float32, random weights). Memory is the most that the process has had
since it started, above what that was after the first segment; the KV cache of 65536 tokens itself is 32 MiB.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from executors import BLOCK_SIZE, executor
from steps import SIZES

from vllm_neuron.engine.inputs import Row

SMALL = type(SIZES)(
    **{
        **vars(SIZES),
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1 << 20,
    }
)


def main() -> None:
    """Print a line per power of two of segments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("neuron_native", "vllm_neuron"), default="neuron_native")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--segment", type=int, default=2048)
    options = parser.parse_args()
    before = 0
    blocks = (np.arange(1, 1 + options.tokens // BLOCK_SIZE),)
    with tempfile.TemporaryDirectory() as folder:
        prefill = {
            "max_num_batched_tokens": options.segment,
            "num_batched_tokens_buckets": (options.segment,),
            "kv_segment_size": options.segment,
        }
        made = executor(options.backend, SMALL, torch.float32, Path(folder), 1, options.tokens, **prefill)
        print(f"{options.backend}: graphs of {sorted({graph.tokens for graph in made.graphs})} rows")
        start = time.monotonic()
        for index in range(options.tokens // options.segment):
            row = Row(np.full(options.segment, 7), index * options.segment, blocks, wants_logits=False)
            since = time.monotonic()
            made.run_prefill(row)
            now, most = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            before = before or most
            if (index + 1) & index == 0:
                grown = (most - before) / 1024
                print(f"{row.end:>7} tokens  {now - since:6.2f} s a segment  {now - start:7.2f} s  {grown:+7.1f} MiB")


if __name__ == "__main__":
    main()
