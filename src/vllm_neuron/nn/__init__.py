"""The pure functions that models are made of.

Each op asks `kernels.dispatch` for its implementation: a kernel, or the torch twin that specifies it.

Shape letters: T tokens, B requests, H hidden, N query heads, K KV heads, D head size, I MLP width, V vocabulary,
S context tokens, NB blocks, BS block size. A step's T rows are B requests of T / B rows each, in order.
"""

from vllm_neuron.nn.attention import kv_write, paged_attention, rope, rope_tables
from vllm_neuron.nn.basic import add_rms_norm, embedding, linear, logits, rms_norm, silu_mul

__all__ = [
    "add_rms_norm",
    "embedding",
    "kv_write",
    "linear",
    "logits",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_tables",
    "silu_mul",
]
