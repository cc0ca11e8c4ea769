"""A g++ that gives out kernels that were built before: such builds cost nothing, and can be counted and held up."""

import os
from pathlib import Path

import pytest

from tests.server.harness import BIN
from vllm_neuron.kernels.cpu import build


class StandInCompiler:
    """For servers with `env` and a cache made by `new_cache`, which loses its kernels.

    Args:
        folder: for the compiler; made here.
        cache: value of the servers' VLLM_CACHE_ROOT.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CACHE_ROOT", str(cache))
            kernels = build.library().resolve()
        (cache / "neuron" / "kernels").unlink()
        folder.mkdir()
        self.held, self._log = folder / "held", folder / "log"
        compiler = folder / "g++"
        compiler.write_text(
            f'#!/bin/sh\necho built >> "{self._log}"\n[ -e "{self.held}" ] && exec sleep 1000\n'
            f'while [ "$1" != -o ]; do shift; done\nexec cp "{kernels}" "$2"\n'
        )
        compiler.chmod(0o755)
        self.env = {"PATH": f"{folder}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"}

    def builds(self) -> int:
        """How many were begun."""
        return len(self._log.read_text().splitlines())
