"""What the engine's tests share: a small configuration, a tiny model, and a stand-in for a compile route."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.models.model import Model
from vllm_neuron.models.registry import build_model
from vllm_neuron.routes.route import CPU, Executable, PyTree

CONFIG = ResolvedConfig(
    backend="neuron_native",
    cpu_mode=True,
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_batched_tokens_buckets=(16, 32),
    num_seqs_buckets=(1, 2, 4),
    decode_context_length_buckets=(128, 256),
    kv_segment_size=None,
    block_size=16,
    enable_prefix_caching=True,
    v2_model_runner=False,
    disable_warmup_compile=False,
    disable_nki_kernels=True,
)

NUM_BLOCKS = 40

SMALL = replace(CONFIG, num_batched_tokens_buckets=(32,), num_seqs_buckets=(1,), decode_context_length_buckets=(256,))
"""Three graphs only."""


def config(**changes: Any) -> ResolvedConfig:
    return replace(CONFIG, **changes)


def tiny_model(**changes: Any) -> Model:
    """A Llama of two layers and 96 tokens; the configuration is a plain object, which spares importing transformers."""
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }
    return build_model(SimpleNamespace(**{**sizes, **changes}))


def random_weights(model: Model, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator) * 0.3 for name, spec in model.weight_table.items()}


@dataclass
class StandInExecutable:
    """Runs the step eagerly; `save` names the graph, which any stand-in route of this process can load."""

    name: str
    digest: str
    step: Callable[..., Any]

    def __call__(self, weights: PyTree, kv_cache: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        if kv_cache is None:
            raise RuntimeError("a KV cache that was given away is used again")
        return self.step(weights, kv_cache, inputs)

    def save(self) -> bytes:
        return json.dumps({"name": self.name, "digest": self.digest}).encode()


@dataclass
class StandInLowered:
    name: str
    code: str
    step: Callable[..., Any]
    route: "StandInRoute"

    def text(self) -> str:
        return self.code

    def arguments(self) -> tuple[str, ...]:
        return tuple(self.code.splitlines()[:1])

    def kernel_packages(self) -> tuple[str, ...]:
        return ()

    def lower(self) -> "StandInLowered":
        return self

    def compile(self) -> Executable:
        self.route.compiled.append(self.name)
        if self.route.failure is not None:
            raise self.route.failure
        digest = hashlib.sha256(self.code.encode()).hexdigest()
        executable = StandInExecutable(self.name, digest, self.step)
        StandInRoute.saved[digest] = executable
        return executable


class StandInRoute:
    """A stand-in for a compile route: traces for real, runs eagerly, and counts what it is asked to do."""

    name = "neuron_native"
    target = CPU
    modules = ("vllm_neuron.routes.capture",)
    saved: ClassVar[dict[str, StandInExecutable]] = {}

    def __init__(self, version: str = "1") -> None:
        self.version = version
        self.traced: list[str] = []
        self.compiled: list[str] = []
        self.failure: Exception | None = None

    def versions(self) -> dict[str, str]:
        return {"stand-in": self.version}

    def flags(self) -> tuple[str, ...]:
        return ()

    def trace(self, name: str, step: Callable[..., Any], *arguments: PyTree) -> StandInLowered:
        self.traced.append(name)
        leaves, tree = pytree.tree_flatten(arguments)
        assert all(leaf.is_meta for leaf in leaves)
        assert len({id(leaf) for leaf in leaves}) == len(leaves), "one tensor object for two arguments"
        graph = make_fx(lambda *flat: step(*pytree.tree_unflatten(flat, tree)))(*leaves)
        shapes = [f"{tuple(leaf.shape)} {leaf.stride()} {leaf.dtype}" for leaf in leaves]
        return StandInLowered(name, "\n".join([*shapes, graph.code]), step, self)

    def load(self, blob: bytes) -> Executable:
        return self.saved[json.loads(blob)["digest"]]

    def place_weights(self, weights: PyTree) -> PyTree:
        return weights

    def allocate_kv_cache(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> PyTree:
        return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for shape in shapes]
