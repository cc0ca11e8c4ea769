"""Time of the compile cache: keeping a graph, and finding it again.

    python -m pytest benchmarks/test_cache.py --benchmark-columns=min,median,rounds

Blobs of 2 MB (a decode graph of SmolLM2 on the XLA route) and of 64 MB.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.compilation.key import GraphKey

ROUTE = "neuron_native"


def key_of(graph: str) -> GraphKey:
    return GraphKey(graph, (), ROUTE, "x86", {}, {"torch": "2.9.1"}, (), "", {})


@pytest.mark.parametrize("megabytes", [2, 64])
def test_keep(benchmark: Any, tmp_path: Path, megabytes: int) -> None:
    cache = CompileCache(CacheFolders(local=tmp_path), ROUTE)
    blob, numbers = bytes(megabytes * 10**6), itertools.count()

    def keep() -> None:
        key = key_of(f"graph {next(numbers)}")
        cache.get_or_compile(key, "decode_b1", "LlamaForCausalLM", bytes, lambda: (b"", blob))

    benchmark.pedantic(keep, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("megabytes", [2, 64])
def test_find(benchmark: Any, tmp_path: Path, megabytes: int) -> None:
    cache, key = CompileCache(CacheFolders(local=tmp_path), ROUTE), key_of("graph")
    blob = bytes(megabytes * 10**6)
    cache.get_or_compile(key, "decode_b1", "LlamaForCausalLM", bytes, lambda: (b"", blob))
    found = benchmark.pedantic(cache.fetch, args=(key.digest, len), rounds=5, warmup_rounds=1)
    assert found is not None and found.value == len(blob)
