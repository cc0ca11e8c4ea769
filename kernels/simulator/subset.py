"""The language that NKI's compiler accepts, which is a part of Python."""

from collections.abc import Callable
from typing import Any


def check_language(function: Callable[..., Any]) -> None:
    """Raises:
    Violation: the kernel uses Python that the compiler rejects.
    """
