"""Which form a launch is written in."""

import ast
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import PurePath

from vllm_neuron.migration.forms import dockerfile, manifest, overrides, python_source, shell
from vllm_neuron.migration.launch import CALLS, Change


class Form(StrEnum):
    """How a launch is written."""

    SHELL = "shell"
    PYTHON = "python"
    DOCKERFILE = "dockerfile"
    MANIFEST = "manifest"
    OVERRIDES = "overrides"


REWRITE: dict[Form, Callable[[str, Change], str]] = {
    Form.SHELL: shell.rewrite,
    Form.PYTHON: python_source.rewrite,
    Form.DOCKERFILE: dockerfile.rewrite,
    Form.MANIFEST: manifest.rewrite,
    Form.OVERRIDES: overrides.rewrite,
}

_SUFFIXES = {".sh": Form.SHELL, ".py": Form.PYTHON, ".yaml": Form.MANIFEST, ".yml": Form.MANIFEST}
_DOCKER = re.compile(r"^[ \t]*(?:CMD|ENTRYPOINT)[ \t]", re.MULTILINE)
_MANIFEST = re.compile(r"^[ \t]*(?:-[ \t]+)?(?:apiVersion|services|containers|command|args|entrypoint):", re.MULTILINE)
_CALL = re.compile(rf"\b(?:{'|'.join(CALLS)})\s*\(")


def form_of(text: str, name: str = "") -> Form:
    """The form of a text.

    Args:
        text: the launch.
        name: of the file it is from, if it is from one.
    """
    path = PurePath(name)
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    if path.name.lower().startswith(("dockerfile", "containerfile")) or _DOCKER.search(text):
        return Form.DOCKERFILE
    if text.lstrip().startswith("{"):
        return Form.OVERRIDES
    if _CALL.search(text) and _is_python(text):
        return Form.PYTHON
    return Form.MANIFEST if _MANIFEST.search(text) else Form.SHELL


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
