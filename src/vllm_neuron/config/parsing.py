"""From the dictionary the user gave to typed options, collecting every fault on the way."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_neuron.config import legacy
from vllm_neuron.config.faults import Fault
from vllm_neuron.config.options import EncoderNeuronConfig, NeuronConfig, OnDeviceSamplingConfig
from vllm_neuron.config.resolved import Notice

ROOT = "additional_config"
NEURON = f"{ROOT}.neuron_config"
ENCODER = f"{ROOT}.encoder_neuron_config"
SAMPLING = f"{NEURON}.on_device_sampling_config"
LANGUAGE_MODEL_ONLY = "mm_language_model_only"

_TOP_LEVEL = ("neuron_config", "encoder_neuron_config", LANGUAGE_MODEL_ONLY)
_PLACES: Mapping[str, tuple[str, ...]] = {
    ROOT: _TOP_LEVEL,
    NEURON: tuple(NeuronConfig.model_fields),
    ENCODER: tuple(EncoderNeuronConfig.model_fields),
    SAMPLING: tuple(OnDeviceSamplingConfig.model_fields),
}
"""Every valid key by the path of the group it belongs to."""

_TYPE_RULES = {
    "int_type": "must be an integer (not a string, not true or false)",
    "float_type": "must be a number",
    "bool_type": "must be true or false, without quotes",
    "string_type": "must be a string",
    "model_type": "must be a dictionary of options",
    "model_attributes_type": "must be a dictionary of options",
    "tuple_type": "must be a list of integers, such as [128, 256]",
}

_CLOSE = 0.75
"""Likeness from which on a key is taken for a mistyped or misplaced one."""

Options = TypeVar("Options", bound=BaseModel)


@dataclass
class Parsed:
    """Typed options and what was found while reading them. An option with a fault has its default here.

    Attributes:
        neuron: `neuron_config`.
        encoder: `encoder_neuron_config`.
        language_model_only: top-level `mm_language_model_only`.
        given: paths of the valid options that the user set to something other than null.
        faulty: values by path of the options that are not usable.
    """

    neuron: NeuronConfig = NeuronConfig()  # noqa: RUF009 - frozen
    encoder: EncoderNeuronConfig = EncoderNeuronConfig()  # noqa: RUF009 - frozen
    language_model_only: bool = False
    given: set[str] = field(default_factory=set)
    faulty: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


def parse(additional_config: Any) -> Parsed:
    """Read `additional_config`, which is left unchanged. Never raises: what is wrong is in the result."""
    parsed = Parsed()
    if additional_config is None:
        return parsed
    if not isinstance(additional_config, Mapping):
        parsed.faults.append(_not_a_dictionary(ROOT, additional_config))
        return parsed
    known = _known(parsed, ROOT, additional_config)
    parsed.neuron = _options(parsed, NeuronConfig, NEURON, known.get("neuron_config"))
    parsed.encoder = _options(parsed, EncoderNeuronConfig, ENCODER, known.get("encoder_neuron_config"))
    flag = known.get(LANGUAGE_MODEL_ONLY)
    if isinstance(flag, bool):
        parsed.language_model_only = flag
        parsed.given.add(f"{ROOT}.{LANGUAGE_MODEL_ONLY}")
    elif flag is not None:
        parsed.faults.append(Fault(f"{ROOT}.{LANGUAGE_MODEL_ONLY}", flag, _TYPE_RULES["bool_type"], "Correct it."))
    return parsed


def _known(parsed: Parsed, path: str, group: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries of a group whose keys are valid there and whose value is not null; faults for the other keys."""
    known = {}
    for key, value in group.items():
        if key in _PLACES[path]:
            if value is not None:
                known[key] = value
        elif key == LANGUAGE_MODEL_ONLY:
            text = f"{path}.{key}={value!r} has no effect here. Move it to the top level of {ROOT}: {ROOT}.{key}."
            parsed.notices.append(Notice(logging.WARNING, text))
        else:
            parsed.faults.extend(_unknown(path, str(key), value))
    return known


def _options(parsed: Parsed, kind: type[Options], path: str, group: Any) -> Options:
    """The group as a model. Options with faults get their defaults, so that the others can still be checked."""
    if group is None:
        return kind()
    if not isinstance(group, Mapping):
        parsed.faults.append(_not_a_dictionary(path, group))
        return kind()
    known = _known(parsed, path, group)
    sampling = known.get("on_device_sampling_config")
    if isinstance(sampling, Mapping):
        known["on_device_sampling_config"] = _known(parsed, SAMPLING, sampling)
    try:
        options = kind.model_validate(known)
    except ValidationError as error:
        bad = set()
        for fault, key in _faults(error, path):
            parsed.faults.append(fault)
            bad.add(key)
        parsed.faulty |= {f"{path}.{key}": known[key] for key in bad}
        known = {key: value for key, value in known.items() if key not in bad}
        options = kind.model_validate(known)
    parsed.given |= {f"{path}.{key}" for key in known}
    return options


def _faults(error: ValidationError, path: str) -> Iterator[tuple[Fault, str]]:
    """(fault, top-level key of it) for each complaint of pydantic's."""
    for entry in error.errors():
        option = path
        for part in entry["loc"]:
            option += f"[{part}]" if isinstance(part, int) else f".{part}"
        rule = _TYPE_RULES.get(entry["type"])
        if entry["type"] == "value_error":
            rule = str(entry["ctx"]["error"])
        elif entry["type"] == "literal_error":
            rule = f"must be {entry['ctx']['expected']}"
        elif entry["type"] == "greater_than_equal":
            rule = f"must be at least {entry['ctx']['ge']}"
        fault = Fault(option, entry["input"], rule or entry["msg"], "Correct it or leave the option out.")
        yield fault, str(entry["loc"][0])


def _unknown(path: str, key: str, value: Any, group: str = "") -> Iterator[Fault]:
    """Faults of a key that does not belong where it stands, and of the keys below it if it is an old group.

    ``group`` is the group whose keys to suggest, if it is not the one at ``path``.
    """
    option = f"{path}.{key}"
    if key in legacy.CONTAINERS:
        new = legacy.CONTAINERS[key]
        yield Fault(option, value, "is the name of another release", f"Use {new}.")
        yield from _unknown_below(option, value, new)
        return
    renamed = legacy.SAMPLING if path.endswith("on_device_sampling_config") else legacy.OPTIONS
    if key in renamed:
        yield Fault(option, value, "is the name of another release", f"{renamed[key]}.")
    elif key in legacy.VLLM_PARAMETERS:
        flag = legacy.VLLM_PARAMETERS[key]
        remedy = f"Pass {flag} on the command line, or {key}=... to LLM(...)."
        yield Fault(option, value, "is a vLLM parameter and does not belong here", remedy)
    else:
        yield Fault(option, value, "is not an option", _suggestion(group or path, key))


def _unknown_below(option: str, values: Any, group: str) -> Iterator[Fault]:
    """Faults of the keys at ``option`` that ``group``, which takes its place, does not have."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        place = f"{group}.{key}"
        if key not in _PLACES[group]:
            yield from _unknown(option, str(key), value, group)
        elif place in _PLACES:
            yield from _unknown_below(f"{option}.{key}", value, place)


def _suggestion(path: str, key: str) -> str:
    """The closest valid key, wherever it belongs; if none is close, all keys of the group at ``path``."""

    def likeness(valid: str) -> float:
        return SequenceMatcher(None, key.lower().replace("-", "_"), valid).ratio()

    anywhere = [(likeness(valid), f"{place}.{valid}") for place, keys in _PLACES.items() for valid in keys]
    close, suggestion = max(anywhere, key=lambda scored: scored[0])
    if close >= _CLOSE:
        return f"Did you mean {suggestion}?"
    best = max(_PLACES[path], key=likeness)
    return f"The closest valid key is {path}.{best}; all of them: {', '.join(_PLACES[path])}."


def _not_a_dictionary(path: str, value: Any) -> Fault:
    return Fault(path, value, "must be a dictionary of options", 'Write it like {"neuron_config": {...}}.')
