"""Tiny seeded Hugging Face checkpoints, and transformers in float32 as the oracle of what they compute.

    folder = checkpoint("llama")                    written once per process, shared, never to be changed
    write_checkpoint(tmp_path, "qwen2", shards=3)   your own, with your own configuration
    greedy_oracle(folder, [1, 5, 9], 32)            32 greedy token ids
    embeddings_oracle(folder, embeddings, 32)       the same after a prompt of embeddings
    logits_oracle(folder, [1, 5, 9])                [3, V] float32

Nothing is downloaded. Each checkpoint is a whole folder: configuration, weights, generation configuration and a
byte-level tokenizer with a chat template whose every id decodes to text.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 512
PAD, BOS, EOS = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"head_dim": 16}),
    "llama3": (LlamaConfig, {"head_dim": 16, "tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE}),
    "mistral": (MistralConfig, {"sliding_window": 12}),
    "qwen2": (Qwen2Config, {"rope_theta": 1000000.0}),
    "qwen2-windows": (
        Qwen2Config,
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32, "rope_theta": 1000000.0}),
}
"""Every kind to its configuration class and what it sets besides the common sizes."""

_folders: list[TemporaryDirectory[str]] = []


@cache
def checkpoint(kind: str = "llama") -> Path:
    """A float32 checkpoint of this kind, made when first asked for and removed when the process ends."""
    folder = TemporaryDirectory(prefix=f"tiny-{kind}-")
    _folders.append(folder)
    return write_checkpoint(Path(folder.name), kind)


def write_checkpoint(
    folder: Path,
    kind: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a checkpoint into `folder` (made if absent) and return it.

    Args:
        folder: where to.
        kind: one of KINDS.
        dtype: dtype of the stored weights.
        shards: at least this many safetensors files, with an index if more than one.
        seed: of the weights.
        overrides: values of the configuration, over those of the kind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(kind, seed, **overrides)
    torch.nn.Module.to(model, dtype)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=size + 1 if shards == 1 else size // shards)
    tokenizer(model.config.vocab_size).save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False})
    )
    return folder


def make_model(kind: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The float32 transformers model of a kind, with weights scaled so that greedy decoding does not repeat itself."""
    config_class, settings = KINDS[kind]
    config = config_class(**{**_SIZES, **settings, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                gain = 1.0 if "embed" in name else WEIGHT_GAIN
                parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(1 + noise * 0.2)
    return model


WEIGHT_GAIN = 2.0
"""Standard deviation of a matrix times the root of its inputs; at 1 greedy decoding falls into short loops."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products this small only lose by being split, and lose much when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def oracle_model(folder: Path) -> PreTrainedModel:
    """transformers' own model of `folder` in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits_oracle(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits [T, V] in float32 after each of `token_ids`."""
    with torch.no_grad(), _one_thread():
        return oracle_model(Path(folder)).forward(torch.tensor([token_ids]), use_cache=False).logits[0]


def greedy_oracle(folder: Path, prompt_ids: list[int], n: int) -> list[int]:
    """The n token ids that greedy decoding appends to `prompt_ids`. End-of-sequence does not stop.

    With transformers' own KV cache, whose tokens tests/models/test_checkpoints.py holds against those without.
    """
    return list(_greedy(Path(folder), tuple(prompt_ids), n))


@cache
def _greedy(folder: Path, prompt_ids: tuple[int, ...], n: int) -> tuple[int, ...]:
    model, step, past, tokens = oracle_model(folder), list(prompt_ids), None, []
    with torch.no_grad(), _one_thread():
        for _ in range(n):
            output = model.forward(torch.tensor([step]), past_key_values=past, use_cache=True)
            step, past = [int(output.logits[0, -1].argmax())], output.past_key_values
            tokens += step
    return tuple(tokens)


def embeddings_oracle(folder: Path, embeddings: torch.Tensor, n: int) -> list[int]:
    """The n token ids that transformers' greedy `generate` puts after a prompt of embeddings [T, H].

    T is at least 2: after a single embedding `generate` repeats its first token.
    """
    assert len(embeddings) > 1
    model = oracle_model(Path(folder))
    mask = torch.ones(1, len(embeddings), dtype=torch.int64)
    with torch.no_grad(), _one_thread():
        (tokens,) = model.generate(
            inputs_embeds=embeddings[None],
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=n,
            eos_token_id=VOCAB_SIZE,
        )
    return tokens.tolist()


def embedding_rows(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """What the model of `folder` makes of these token ids [T] before its first layer: [T, H] float32."""
    return oracle_model(Path(folder)).get_input_embeddings().weight.detach()[token_ids]


def random_embeddings(length: int, seed: int = 0) -> torch.Tensor:
    """Embeddings [length, H] of no tokens."""
    return torch.randn(length, _SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))


def prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """`length` seeded token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: special tokens, the 256 bytes, and letter pairs that only ever come out of a model."""
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = (first + second + third for third in ["", *letters] for first in letters for second in letters)
    names += [next(words) for _ in range(vocab_size - len(names))]
    core = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )
