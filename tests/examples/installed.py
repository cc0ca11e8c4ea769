"""Installs a package of examples/ where this process finds it, as `pip install` would, and nothing else does."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def install_example(name: str, folder: Path) -> Path:
    """Build and install examples/`name` into `folder`, without its dependencies; returns the folder."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", folder]
    # A copy, because building leaves its files beside the sources.
    source = folder.parent / f"{folder.name}-source"
    subprocess.run(["cp", "-R", EXAMPLES / name, source], check=True)
    subprocess.run([*pip, *options, source], check=True)
    return folder
