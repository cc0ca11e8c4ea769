"""From the words of a command line to options and back, without knowing which flags vLLM has."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_neuron.migration.launch import SERVE, Expression, Launch, Option

ALIASES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "q": "quantization",
    "O": "optimization_level",
    "cc": "compilation_config",
}
"""vLLM's short flags."""

_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_SCRIPT = re.compile(r"vllm/entrypoints/(?:openai/)?api_server\.py$")
_PYTHON = re.compile(r"(?:^|/)python[\d.]*$")
_DASHES = re.compile(r"^[-\u2010-\u2015]{1,2}(?=[A-Za-z])")
_TELLING = (
    *("override_neuron_config", "additional_config", "tensor_parallel_size", "max_model_len", "max_num_seqs"),
    *("device", "served_model_name", "speculative_config"),
)
"""Options by which a list of arguments without a program is known for vLLM's."""


class Word(NamedTuple):
    """A word of a command line: its value, and how it was written, if that is worth keeping."""

    text: str
    written: str | None = None


def find_program(words: Sequence[Word]) -> tuple[int, int, str] | None:
    """(first word, first word of the arguments, name) of the program that serves, or None."""
    texts = [word.text for word in words]
    for index, text in enumerate(texts):
        after = texts[index + 1] if index + 1 < len(texts) else ""
        if text.rsplit("/", 1)[-1] == "vllm" and after == "serve":
            return index, index + 2, f"{text} {after}"
        if text == "-m" and after in _MODULES:
            first = _interpreter(texts, index)
            return first, index + 2, f"{texts[first]} -m {after}"
        if _SCRIPT.search(text):
            first = _interpreter(texts, index)
            return first, index + 1, f"{texts[first]} {text}"
    return None


def _interpreter(texts: Sequence[str], index: int) -> int:
    """Index of the Python that runs what stands at ``index``, with flags of its own between."""
    first = index - 1
    while first > 0 and texts[first].startswith("-"):
        first -= 1
    return first if first >= 0 and _PYTHON.search(texts[first]) else index


def serve_command(program: str) -> str:
    """`vllm serve` in the place of the API server's module, from the folder of its Python if that is named."""
    if "api_server" not in program:
        return program
    python = re.match(r"(\S*/)?python[\d.]* ", program)
    return f"{(python and python[1]) or ''}{SERVE}"


def is_flag(text: str) -> bool:
    """Whether a word starts an option. Dashes that a word processor has made longer count as dashes."""
    return bool(_DASHES.match(text)) and not re.match(r"^-\d", text)


def read_options(words: Sequence[Word]) -> dict[str, Option]:
    """Options by name; what comes before the first flag is the model. Of a repeated option the last counts."""
    options: dict[str, Option] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not is_flag(word.text):
            options.setdefault("model", Option("model", _value([word]), word.written, positional=True))
            continue
        values = []
        name, equals, inline = _DASHES.sub("", word.text).partition("=")
        if equals:
            written = None if word.written is None else word.written.partition("=")[2]
            values.append(Word(type(word.text)(inline), written))
        while index < len(words) and not is_flag(words[index].text):
            values.append(words[index])
            index += 1
        option = _option(name, values, [word, *([] if equals else values)])
        options[option.name] = option
    return options


def _option(name: str, values: list[Word], words: list[Word]) -> Option:
    exact = words[0].text.isascii() and all(word.written is not None for word in words)
    written = " ".join(word.written for word in words if word.written) if exact else None
    name = ALIASES.get(name, name.replace("-", "_"))
    if name == "model" and len(values) == 1:
        return Option(name, _value(values), values[0].written)
    if not values and name.startswith("no_"):
        return Option(name.removeprefix("no_"), False, written)
    return Option(name, _value(values), written)


def _value(values: Sequence[Word]) -> Any:
    if not values:
        return True
    if any(isinstance(word.text, Expression) for word in values):
        return Expression(" ".join(word.text for word in values))
    texts = tuple(word.text for word in values)
    return texts[0] if len(texts) == 1 else texts


def looks_like_arguments(options: dict[str, Option]) -> bool:
    """Whether options without a program are vLLM's."""
    return any(name in options for name in _TELLING)


def as_words(option: Option, joined: bool = False) -> list[str]:
    """The words of an option on a command line, not quoted; flag and value in one word if ``joined``."""
    if option.positional:
        return [str(option.value)]
    match option.value:
        case bool():
            return [option.flag]
        case tuple():
            return [option.flag, *map(str, option.value)]
    value = as_json(option.value) if isinstance(option.value, dict | list) else str(option.value)
    return [f"{option.flag}={value}"] if joined else [option.flag, value]


def as_json(value: Any) -> str:
    """JSON in one line. What is only known at run time stays as text."""
    return json.dumps(value, ensure_ascii=False)


def command_words(launch: Launch, joined: bool = False) -> list[str]:
    """The whole command line of a launch, not quoted; the model is an argument of `vllm serve`.

    Args:
        launch: a command, or only options if it has no program.
        joined: write `--flag=value` in one word.
    """
    options = dict(launch.options)
    words = []
    if launch.program:
        model = options.pop("model", None)
        words = [*launch.program.split(), *([] if model is None else [str(model.value)])]
    return words + [word for option in options.values() for word in as_words(option, joined)]
