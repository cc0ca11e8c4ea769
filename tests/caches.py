"""Folders for VLLM_CACHE_ROOT."""

from contextlib import suppress
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[1] / "build" / "test-cache"
"""Outlives a run: what lies here is named after everything it depends on."""

NO_GRAPHS = ("neuron/kernels", "modelinfos")
"""The C++ kernels, and vLLM's notes on model classes: a minute of work that has nothing to do with graphs."""


def new_cache(folder: Path) -> Path:
    """Make `folder` a cache without a single graph. Building kernels and inspecting classes is not repeated in it."""
    for part in NO_GRAPHS:
        (SHARED / part).mkdir(parents=True, exist_ok=True)
        link = folder / part
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(SHARED / part, target_is_directory=True)
    return folder


def cache_of_the_session(factory: pytest.TempPathFactory, worker: str) -> Path:
    """The cache that all tests of a run share which do not ask what is compiled: it starts empty, and lasts as long.

    Args:
        factory: pytest's folders for temporary files.
        worker: pytest-xdist's name of this process, or "master" without pytest-xdist.
    """
    root = factory.getbasetemp()
    folder = (root if worker == "master" else root.parent) / "cache"
    made = new_cache(factory.mktemp("cache"))
    with suppress(OSError):  # the other process was first, or another test of this one
        made.rename(folder)
    return folder
