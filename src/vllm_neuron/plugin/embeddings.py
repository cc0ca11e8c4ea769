"""Prompts that are embeddings: how they are read, and what is refused.

vLLM hands them on almost as they come, so everything that would fail in the engine, where it hurts other requests too,
is checked here first: what a request of the completions API sends when it is read (`read_embeddings`), every request
before it goes to the engine (`usable_embeddings`).
"""

import base64
import zipfile
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What embeddings may come in. They are cast to the model's dtype."""

_FORM = (
    "It must be base64 of what torch.save writes for one dense floating-point tensor [number of tokens, hidden size]."
)


@dataclass(frozen=True)
class EmbeddingsForm:
    """What the embeddings of a prompt become.

    Attributes:
        hidden_size: H.
        dtype: the model's.
        max_model_len: prompt and answer together have no more tokens.
    """

    hidden_size: int
    dtype: torch.dtype
    max_model_len: int


def replace_reader() -> None:
    """Have vLLM read embeddings with `read_embeddings`. Doing this twice changes nothing.

    Its own reader answers most of what is wrong with status 500, and unfolds a sparse tensor of any size.
    """
    import vllm.renderers.protocol

    vllm.renderers.protocol.safe_load_prompt_embeds = read_embeddings


def read_embeddings(model_config: "ModelConfig", embed: bytes) -> torch.Tensor:
    """The tensor that a request has sent; its contents are not looked at, so that a false shape costs nothing.

    Args:
        model_config: vLLM's.
        embed: base64 of what torch.save wrote.

    Returns:
        [n, H] as it was sent; a leading dimension of 1 is dropped.

    Raises:
        VLLMValidationError: prompt embeddings are off, or it is no such tensor. HTTP status 400.
    """
    if not model_config.enable_prompt_embeds:
        raise _refusal("is off", "Start the server with --enable-prompt-embeds.")
    try:
        content = base64.b64decode(embed, validate=True)
    except ValueError as error:
        raise _refusal(f"is not base64 ({error})") from error
    try:
        compressed = _unpacked_bytes(content) > len(content)
        # A small file must not become a large tensor.
        tensor = None if compressed else torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a forged file may cause
        raise _refusal("cannot be read by torch.load with weights_only=True") from error
    if compressed:
        raise _refusal("is compressed", "Send what torch.save writes as it is.")
    if not isinstance(tensor, torch.Tensor):
        raise _refusal(f"holds no tensor but a {type(tensor).__name__}")
    _require_numbers(tensor)
    if tensor.untyped_storage().nbytes() > len(content):
        # A file can have torch.load make a tensor of any size, with what was in memory before.
        raise _refusal("claims to have more elements than it brings")
    if tensor.dim() == 3 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.dim() != 2:
        raise _refusal(f"has shape {list(tensor.shape)}")
    return tensor


def usable_embeddings(embeddings: torch.Tensor, params: Any, form: EmbeddingsForm) -> torch.Tensor:
    """Embeddings as the engine takes them: checked, and in the model's dtype.

    vLLM's prefix cache goes by their bytes, which only in one dtype for all stand for the same numbers.

    Args:
        embeddings: [n, H] as they came, on the host.
        params: the request's sampling parameters.
        form: what they must become.

    Returns:
        [n, H] in the model's dtype, contiguous, finite and without a gradient.

    Raises:
        VLLMValidationError: they cannot be used, or not with these parameters. HTTP status 400.
    """
    _require_numbers(embeddings)
    if embeddings.dim() != 2 or embeddings.shape[1] != form.hidden_size:
        rule = f"It must be [number of tokens, {form.hidden_size}]: {form.hidden_size} is the model's hidden size."
        raise _refusal(f"has shape {list(embeddings.shape)}", rule)
    if not len(embeddings):
        raise _refusal(f"has shape {list(embeddings.shape)}", "A prompt cannot be empty.")
    if len(embeddings) >= form.max_model_len:
        found = f"has {len(embeddings)} tokens and max_model_len is {form.max_model_len}"
        rule = f"That leaves no room for an answer: shorten the prompt to at most {form.max_model_len - 1} tokens."
        raise _refusal(found, rule)
    if getattr(params, "prompt_logprobs", None) is not None:
        raise _refusal(
            "cannot be combined with prompt_logprobs", "Embeddings have no token ids to score: leave it out."
        )
    cast = embeddings.detach().to(form.dtype).contiguous()
    finite = torch.isfinite(cast)
    if not finite.all():
        row, column = (~finite).nonzero()[0].tolist()
        dtype = str(form.dtype).removeprefix("torch.")
        raise _refusal(
            f"has {embeddings[row, column].item()} at [{row}, {column}]", f"Every value must be a finite {dtype}."
        )
    return cast


def _require_numbers(tensor: torch.Tensor) -> None:
    """Refuse what has no elements in memory, one after the other, that are floating-point numbers."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise _refusal(f"is a tensor of layout {'nested' if tensor.is_nested else tensor.layout}", "It must be dense.")
    if tensor.device.type != "cpu":
        raise _refusal(f"is a tensor on device {tensor.device}", "It must have contents.")
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise _refusal(f"has dtype {str(tensor.dtype).removeprefix('torch.')}", f"It must be one of {names}.")


def _unpacked_bytes(content: bytes) -> int:
    """Size of a zip file's entries once unpacked; 0 for what torch.load does not take for one."""
    if not content.startswith(b"PK\x03\x04"):
        return 0
    return sum(entry.file_size for entry in zipfile.ZipFile(BytesIO(content)).infolist())


def _refusal(found: str, rule: str = _FORM) -> VLLMValidationError:
    return VLLMValidationError(f"prompt_embeds {found}. {rule}", parameter="prompt_embeds")
