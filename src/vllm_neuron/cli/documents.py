"""JSON that every reader takes."""

import json
from math import isfinite
from typing import Any


def to_json(document: object) -> str:
    """Indented JSON. NaN and infinities, for which JSON has no words, become null."""
    return json.dumps(_finite(document), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
