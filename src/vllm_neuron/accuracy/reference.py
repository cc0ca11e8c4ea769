"""transformers as the reference: logits and the residual stream of a checkpoint, in any dtype.

Shape letters: T tokens, H hidden, V vocabulary, L layers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_neuron.models.model import LayerOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRUTH = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
"""Every dtype that is served, to the dtype whose results count as true."""


class ReferenceModelError(RuntimeError):
    """transformers cannot say what the checkpoint computes."""


def load_reference(folder: str | Path, dtype: torch.dtype) -> "PreTrainedModel":
    """transformers' model of a local folder, with eager attention.

    Raises:
        ReferenceModelError: transformers does not read the folder.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError, KeyError) as error:
        raise ReferenceModelError(f"transformers does not read {folder}: {error}") from error
    return model.eval()


@torch.inference_mode()
def greedy(model: "PreTrainedModel", prompt: Sequence[int], count: int) -> list[int]:
    """The `count` token ids that greedy decoding appends to a prompt. End-of-sequence does not stop it."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    past: Any = None
    produced: list[int] = []
    for _ in range(count):
        out = model.forward(ids, attention_mask=mask, past_key_values=past, use_cache=True)
        past, token = out.past_key_values, int(out.logits[0, -1].argmax())
        produced.append(token)
        ids, mask = torch.tensor([[token]]), torch.ones(1, mask.shape[1] + 1, dtype=mask.dtype)
    return produced


@torch.inference_mode()
def layer_outputs(model: "PreTrainedModel", token_ids: Sequence[int]) -> LayerOutputs:
    """What transformers computes of `token_ids` [T]: residuals L + 1 of [T, H], hidden [T, H] and logits [T, V].

    Raises:
        ReferenceModelError: the model's layers are not where decoders have them.
    """
    decoder = getattr(model, "model", None)
    layers = getattr(decoder, "layers", None)
    if decoder is None or layers is None:
        raise ReferenceModelError(f"{type(model).__name__} has no model.layers, so its residuals cannot be read")
    residuals: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []

    def keep(into: list[torch.Tensor]) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            into.append((output[0] if isinstance(output, tuple) else output)[0].clone())

        return hook

    handles = [layer.register_forward_hook(keep(residuals)) for layer in layers]
    handles += [decoder.embed_tokens.register_forward_hook(keep(residuals))]
    handles += [decoder.norm.register_forward_hook(keep(hidden))]
    try:
        logits = model.forward(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return LayerOutputs(tuple(residuals), hidden[0], logits)
