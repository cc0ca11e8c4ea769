"""A launch of vLLM, free of the form it is written in: options, environment, and what becomes of each of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What becomes of a setting."""

    KEPT = "kept"
    RENAMED = "renamed"
    DROPPED = "dropped"
    DECIDE = "needs a decision"
    UNSUPPORTED = "not supported"

    @property
    def needs_a_person(self) -> bool:
        """Somebody has to look at it before the new launch can replace the old one."""
        return self in (Verdict.DECIDE, Verdict.UNSUPPORTED)


class Expression(str):
    """Source text whose value is only known when the launch runs: a Python expression, or shell text with variables."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Option:
    """One of vLLM's options.

    Attributes:
        name: vLLM's parameter, e.g. "max_model_len".
        value: text, several texts (a tuple), True or False of a command line; any literal of a Python call; an
            Expression if it is not known before the launch runs.
        written: how it stands in the source (flag and value of a command line, value of a Python call), to be written
            again as it is; None if it has to be written anew.
        positional: it stands without its name.
    """

    name: str
    value: Any
    written: str | None = None
    positional: bool = False

    @property
    def known(self) -> bool:
        """The value does not depend on what happens when the launch runs."""
        return not isinstance(self.value, Expression)

    @property
    def flag(self) -> str:
        """The flag, as it is written for this value."""
        return f"--{'no-' if self.value is False else ''}{self.name.replace('_', '-')}"


@dataclass(frozen=True)
class Launch:
    """What one command, call or container starts.

    Attributes:
        program: how it is started, e.g. "/venv/bin/vllm serve", "python -m vllm.entrypoints.openai.api_server" or
            "LLM"; "" where only its options are known.
        options: by name, in the order of the source. The model is the option "model".
        environment: variables that the source sets for it. A value may be an Expression.
    """

    program: str
    options: Mapping[str, Option]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What became of one setting.

    Attributes:
        place: what kind of setting it is: "program", "flag", "variable", "additional_config", "neuron config",
            "sampling" or "vision"; "check" for what the checks have to say.
        old: its name and value as they were.
        verdict: what became of it.
        new: where it is now, or "".
        reason: why.
    """

    place: str
    old: str
    verdict: Verdict
    new: str
    reason: str


class LaunchError(ValueError):
    """A text that is no launch, or one that cannot be read. The message says why and what to do."""


Change = Callable[[Launch], Launch]
"""Given an old launch, the new one. Every form's `rewrite` calls it once for each launch of a text."""

SERVE = "vllm serve"
"""The program that a command line of ours starts."""

CALLS = ("LLM", "EngineArgs", "AsyncEngineArgs")
"""Python's programs: classes of vLLM that take its options as keywords."""
