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
    windows: tuple[int | None, ...] | None = None,
) -> Model:
    """The dense decoder that `hf_config` describes, with the switches that its architecture sets.

    Args:
        hf_config: a transformers configuration.
        max_model_len: longest sequence that will be served; None is the model's own maximum.
        qkv_bias, out_bias, mlp_bias, qk_norm, windows: see `DenseConfig`; windows are those of `layer_windows` if None.

    Raises:
        UnsupportedModelError: the configuration asks for something that the dense decoder does not have.
    """
    if hf_config.hidden_act != "silu":
        raise UnsupportedModelError(f"not supported yet: hidden_act={hf_config.hidden_act!r} (supported: 'silu')")
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
        windows=tuple(_narrow(window, max_model_len) for window in windows or layer_windows(hf_config)),
    )
    return dense.build(architecture, config, rope)


def layer_windows(hf_config: Any) -> tuple[int | None, ...]:
    """Per layer how many tokens it looks back on, None for all: by `layer_types`, or the older pair of settings.

    Raises:
        UnsupportedModelError: a layer is of another kind than full or sliding-window attention.
    """
    layers, window = hf_config.num_hidden_layers, getattr(hf_config, "sliding_window", None)
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is None:
        uses_windows = getattr(hf_config, "use_sliding_window", False)
        first = getattr(hf_config, "max_window_layers", 0) if uses_windows else layers
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        raise UnsupportedModelError(
            f"not supported yet: layer_types of {len(kinds)} layers, {', '.join(unknown) or 'all known'} (supported: "
            f"one of 'full_attention' and 'sliding_attention' for each of num_hidden_layers={layers})"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _narrow(window: int | None, max_model_len: int | None) -> int | None:
    """The window, or None if it shows all of the longest sequence."""
    return None if window is None or (max_model_len is not None and window >= max_model_len) else window
