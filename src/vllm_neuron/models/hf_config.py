"""What the dense decoders read from a Hugging Face configuration in the same way."""

from typing import Any

from vllm_neuron.models import dense
from vllm_neuron.models.errors import UnsupportedModelError
from vllm_neuron.models.model import Model
from vllm_neuron.models.rope_scaling import rope_table


def build_dense(
    architecture: str,
    hf_config: Any,
    max_model_len: int | None,
    *,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
) -> Model:
    """The dense decoder that `hf_config` describes, with the switches that its architecture sets.

    Raises:
        UnsupportedModelError: the configuration asks for something that the dense decoder does not have.
    """
    if hf_config.hidden_act != "silu":
        raise UnsupportedModelError(f"not supported yet: hidden_act={hf_config.hidden_act!r} (supported: 'silu')")
    _refuse_sliding_window(hf_config)
    heads = hf_config.num_attention_heads
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise UnsupportedModelError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    rope = rope_table(hf_config, head_dim, max_model_len)
    config = dense.DenseConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        mlp_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=hf_config.rms_norm_eps,
        rope_scale=rope.scale,
        tied_embeddings=bool(hf_config.tie_word_embeddings),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
    return dense.build(architecture, config, rope)


def _refuse_sliding_window(hf_config: Any) -> None:
    window, count = getattr(hf_config, "sliding_window", None), _sliding_layers(hf_config)
    if window is not None and count:
        raise UnsupportedModelError(
            f"not supported yet: sliding-window layers (sliding_window={window} on {count} of "
            f"{hf_config.num_hidden_layers} layers)"
        )


def _sliding_layers(hf_config: Any) -> int:
    """Layers that would look back on a window only: by `layer_types`, or by the older pair of settings."""
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is not None:
        return list(kinds).count("sliding_attention")
    if not getattr(hf_config, "use_sliding_window", False):
        return 0
    return max(0, hf_config.num_hidden_layers - getattr(hf_config, "max_window_layers", 0))
