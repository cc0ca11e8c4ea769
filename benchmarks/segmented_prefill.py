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
from types import SimpleNamespace

import numpy as np
import torch

from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.inputs import Row
from vllm_neuron.models.registry import build_model
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route

BLOCK_SIZE = 32
SIZES = SimpleNamespace(
    architectures=["LlamaForCausalLM"],
    hidden_act="silu",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=1 << 20,
    rope_theta=10000.0,
)


def executor(backend: str, tokens: int, segment: int, folder: Path) -> GraphExecutor:
    """For prompts of up to `tokens` tokens."""
    config = ResolvedConfig(
        backend=backend,
        cpu_mode=True,
        max_model_len=tokens,
        max_num_seqs=1,
        max_num_batched_tokens=segment,
        num_batched_tokens_buckets=(segment,),
        num_seqs_buckets=(1,),
        decode_context_length_buckets=(tokens,),
        kv_segment_size=segment,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        v2_model_runner=True,
        disable_warmup_compile=False,
        disable_nki_kernels=False,
    )
    model = build_model(SIZES)
    weights = {name: torch.randn(spec.shape) * 0.1 for name, spec in model.weight_table.items()}
    cache = CompileCache(CacheFolders(folder), backend)
    made = GraphExecutor(model, config, select_route(backend, CPU), cache, weights, torch.float32)
    made.allocate_kv_cache(1 + tokens // BLOCK_SIZE)
    return made


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
        made = executor(options.backend, options.tokens, options.segment, Path(folder))
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
