"""Executables as bytes: a line of JSON that says what they are for, then what the route has to remember, pickled."""

import importlib.metadata
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

_MAGIC = b"vllm-neuron executable 2\n"


def pack(route: str, platform: str, versions: Mapping[str, str], body: object) -> bytes:
    """An executable for a platform and these versions of packages."""
    header = {"route": route, "platform": platform, "versions": dict(versions)}
    return _MAGIC + json.dumps(header).encode() + b"\n" + pickle.dumps(body)


def unpack(blob: bytes, route: str, platform: str, versions: Mapping[str, str]) -> Any:
    """The body that `pack` was given. It is unpickled only if the header is right.

    Raises:
        ValueError: it is not an executable, or one for another route, platform or versions, or it is damaged.
    """
    if not blob.startswith(_MAGIC):
        raise ValueError("not an executable of this plugin")
    header, _, body = blob[len(_MAGIC) :].partition(b"\n")
    expected = {"route": route, "platform": platform, "versions": dict(versions)}
    found = json.loads(header)
    if found != expected:
        raise ValueError(f"compiled for {found}, but this is {expected}")
    try:
        return pickle.loads(body)
    except (EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, TypeError) as error:
        raise ValueError(f"a damaged executable: {error}") from error


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Version of each package; "absent" where one is not installed."""
    return {package: package_version(package) for package in packages}


def package_version(package: str) -> str:
    """Version of a package, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
