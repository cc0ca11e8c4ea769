"""The form of a row of the mapping tables."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_neuron.migration.draft import Draft
from vllm_neuron.migration.launch import Verdict


class Outcome(NamedTuple):
    """What a rule did with a value; where it has no text of its own, the rule's holds."""

    verdict: Verdict
    new: str = ""
    reason: str = ""


Apply = Callable[[Draft, Any], Outcome | None]
"""Writes what becomes of a value into the draft; None stands for the rule's own verdict."""


@dataclass(frozen=True)
class Rule:
    """One old name.

    Attributes:
        old: the name.
        verdict: what becomes of it, for the example at least.
        new: where it goes, or "".
        reason: why, and what it depends on.
        example: a value that the verdict holds for.
        apply: what to write into the draft; None for nothing.
        takes_expressions: it can do so with a value that is only known when the launch runs. For other rules such a
            value needs a decision.
    """

    old: str
    verdict: Verdict
    new: str
    reason: str
    example: Any
    apply: Apply | None = None
    takes_expressions: bool = False


def dropped(reason: str, **examples: Any) -> Iterator[Rule]:
    """Rules that drop names for one reason."""
    for name, example in examples.items():
        yield Rule(name, Verdict.DROPPED, "", reason, example)


def undecided(reason: str, **examples: Any) -> Iterator[Rule]:
    """Rules that leave names to a person, unless they are switched off."""
    for name, example in examples.items():
        yield Rule(name, Verdict.DECIDE, "", reason, example, _unless_off)


def unsupported(reason: str, **examples: Any) -> Iterator[Rule]:
    """Rules that refuse names, unless they are switched off."""
    for name, example in examples.items():
        yield Rule(name, Verdict.UNSUPPORTED, "", reason, example, _unless_off)


def _unless_off(draft: Draft, value: Any) -> Outcome | None:
    return Outcome(Verdict.DROPPED, "", "It was off.") if value in (False, None, 0, "", "false", "False") else None


def table(*rules: Rule) -> dict[str, Rule]:
    """Rules by name, each name once."""
    by_name = {rule.old: rule for rule in rules}
    assert len(by_name) == len(rules), "a name has two rules"
    return by_name
