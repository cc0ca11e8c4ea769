"""Folders for VLLM_CACHE_ROOT."""

from pathlib import Path

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
