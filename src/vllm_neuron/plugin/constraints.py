"""Constraints of structured outputs that must not reach the engine."""

from typing import Any


def check_constraint(constraint: Any) -> None:
    """Refuse what vLLM's front end takes for no constraint, and its engine for a broken one.

    Args:
        constraint: a request's StructuredOutputsParams, or None.

    Raises:
        ValueError: it is empty text, or json_object is false.
    """
    if constraint is None:
        return
    for name in ("json", "regex", "grammar", "structural_tag"):
        value = getattr(constraint, name)
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"structured_outputs.{name} is empty. Leave it out, or give the constraint.")
    if constraint.json_object is False:
        raise ValueError("structured_outputs.json_object is false, which constrains nothing. Leave it out.")
