"""Arguments that a kernel does not take, each with the argument and the rule in the message."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_neuron.kernels.gated_mlp import gated_mlp
from vllm_neuron.kernels.kv_fp8 import kv_dequantize, kv_quantize
from vllm_neuron.kernels.kv_write import kv_write
from vllm_neuron.kernels.norm_qkv_rope import norm_qkv_rope
from vllm_neuron.kernels.output_projection import output_projection
from vllm_neuron.kernels.rms_norm import add_rms_norm, rms_norm
from vllm_neuron.kernels.rope import rope
from vllm_neuron.kernels.top_k import argmax, top_k


def z(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


HALF, WHOLE = torch.float16, torch.int64
LEGAL: dict[Callable[..., Any], dict[str, Any]] = {
    rms_norm: {"x": z(2, 8), "weight": z(8), "eps": 1e-5},
    add_rms_norm: {"x": z(2, 8), "residual": z(2, 8), "weight": z(8), "eps": 1e-5},
    rope: {"q": z(2, 3, 8), "k": z(2, 1, 8), "cos": z(2, 4), "sin": z(2, 4)},
    kv_write: {
        "k_cache": z(4, 2, 1, 8), "v_cache": z(4, 2, 1, 8), "k": z(2, 1, 8), "v": z(2, 1, 8),
        "slots": z(2, dtype=torch.int32),
    },
    gated_mlp: {"x": z(2, 8), "gate_up": z(8, 12), "down": z(6, 8)},
    norm_qkv_rope: {
        "x": z(2, 8), "gamma": z(8), "eps": 1e-5, "weight": z(8, 20), "cos": z(2, 2), "sin": z(2, 2), "heads": 3,
    },
    output_projection: {"x": z(2, 3, 4), "weight": z(12, 5)},
    top_k: {"logits": z(2, 64), "k": 4},
    argmax: {"logits": z(2, 64)},
    kv_quantize: {"x": z(2, 1, 8), "factor": z(1), "limit": z(1)},
    kv_dequantize: {"values": z(2, 1, 8, dtype=torch.float8_e4m3fn), "factor": z(1), "dtype": torch.float32},
}  # fmt: skip
ILLEGAL: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((kernel, {"lnc": 3}, "lnc must be 1 or 2, not 3") for kernel in LEGAL),
    (rms_norm, {"x": z(2, 8, dtype=HALF)}, "x must be float32 or bfloat16, not float16"),
    (rms_norm, {"x": z(0, 8)}, r"x must have rows \[\.\.\., H\]"),
    (rms_norm, {"weight": z(9)}, r"weight must have shape \[8\], not \(9,\)"),
    (rms_norm, {"weight": z(8, dtype=torch.bfloat16)}, "weight must be float32, not bfloat16"),
    (rms_norm, {"x": z(1, 8193), "weight": z(8193)}, "x must have rows of up to 32768 bytes"),
    (add_rms_norm, {"residual": z(3, 8)}, r"residual must have shape \[2, 8\]"),
    (add_rms_norm, {"x": z(1, 2, 8)}, r"x must have shape \[T, H\]"),
    (rope, {"q": z(2, 3, 7)}, r"k must have shape \[2, K, 7\]"),
    (rope, {"q": z(2, 3, 7), "k": z(2, 1, 7)}, "q must have an even head size of up to 1024, not 7"),
    (rope, {"q": z(2, 2000, 8)}, "q must have, with k, up to 8192 elements a token"),
    (rope, {"cos": z(2, 8)}, r"cos must have shape \[2, 4\]"),
    (rope, {"sin": z(2, 4, dtype=torch.bfloat16)}, "sin must be float32"),
    (kv_write, {"k_cache": z(8, 1, 8)}, r"k_cache must have shape \[NB, BS, K, D\]"),
    (kv_write, {"v_cache": z(5, 2, 1, 8)}, r"v_cache must have shape \[4, 2, 1, 8\]"),
    (kv_write, {"k": z(2, 1, 9)}, r"k must have shape \[T, 1, 8\]"),
    (kv_write, {"v": z(2, 1, 8, dtype=torch.bfloat16)}, "v must be float32, not bfloat16"),
    (kv_write, {"slots": z(2, dtype=WHOLE)}, "slots must be int32, not int64"),
    (kv_write, {"slots": z(3, dtype=torch.int32)}, r"slots must have shape \[2\]"),
    (gated_mlp, {"gate_up": z(8, 13)}, "gate_up must have as many columns for gate as for up, not 13"),
    (gated_mlp, {"down": z(6, 9)}, r"down must have shape \[6, 8\]"),
    (gated_mlp, {"x": z(2, 131), "gate_up": z(131, 12), "down": z(6, 131)}, "x must have a contracted dimension"),
    (gated_mlp, {"gate_up": z(8, 262), "down": z(131, 8)}, "down must have a contracted dimension"),
    (norm_qkv_rope, {"gamma": z(7)}, r"gamma must have shape \[8\]"),
    (norm_qkv_rope, {"weight": z(8, 18)}, r"weight must have \(N \+ 2 K\) \* 4 columns with N = 3, not 18"),
    (norm_qkv_rope, {"heads": 5}, r"weight must have \(N \+ 2 K\) \* 4 columns with N = 5, not 20"),
    (norm_qkv_rope, {"heads": 2}, r"weight must have \(N \+ 2 K\) \* 4 columns with N = 2, not 20"),
    (norm_qkv_rope, {"cos": z(2, 300), "sin": z(2, 300)}, "cos must be of heads of up to 512, not 600"),
    (norm_qkv_rope, {"cos": z(3, 2)}, r"cos must have shape \[2, D/2\]"),
    (output_projection, {"weight": z(11, 5)}, r"weight must have shape \[12, H\]"),
    (output_projection, {"x": z(2, 1, 131), "weight": z(131, 5)}, "x must have a contracted dimension"),
    (top_k, {"k": 0}, "k must be 1 to 64, not 0"),
    (top_k, {"k": 65}, "k must be 1 to 64, not 65"),
    (top_k, {"logits": z(1, 1000), "k": 257}, "k must be 1 to 256, not 257"),
    (top_k, {"logits": z(1, 16411)}, "logits must have a vocabulary of pieces of 8 to 16384 elements"),
    (argmax, {"logits": z(2, 7)}, "logits must have a vocabulary of pieces of 8"),
    (argmax, {"logits": z(7)}, r"logits must have shape \[T, V\]"),
    (kv_quantize, {"factor": z(2)}, r"factor must have shape \[1\]"),
    (kv_quantize, {"limit": z(2)}, r"limit must have shape \[1\]"),
    (kv_quantize, {"x": z(2, 8)}, r"x must have shape \[T, K, D\]"),
    (kv_dequantize, {"values": z(2, 1, 8)}, "values must be float8_e4m3fn, not float32"),
    (kv_dequantize, {"dtype": HALF}, "dtype must be float32 or bfloat16, not float16"),
]


@pytest.mark.parametrize(("kernel", "changes", "message"), ILLEGAL)
def test_an_illegal_argument_is_refused(kernel, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kernel(**LEGAL[kernel] | changes)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("kernel", LEGAL, ids=lambda kernel: kernel.__name__)
def test_what_is_left_is_taken_on_either_target(kernel, target, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    kernel(**LEGAL[kernel])
