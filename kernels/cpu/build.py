"""Builds the C++ kernels once per machine, into a folder named after everything that the result depends on."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from vllm_neuron import envs

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
_REMEDY = (
    "Install g++ (on Debian or Ubuntu: apt install g++), or set VLLM_NEURON_DISABLE_NKI_KERNELS=1 to run the slower "
    "torch form of every operation."
)


class KernelBuildError(RuntimeError):
    """The kernels cannot be built; the text says why and what to do."""


@cache
def load() -> Path:
    """Register the operators `torch.ops.vllm_neuron_cpu.*`, after building them if no process did before.

    Returns:
        the library that has them, also where VLLM_CACHE_ROOT is another by now: a second one would end the process.

    Raises:
        KernelBuildError: there is no compiler, or it fails.
    """
    built = library()
    torch.ops.load_library(built)
    return built


def library() -> Path:
    """The shared library; built here if it is not there yet."""
    folder = Path(envs.VLLM_CACHE_ROOT) / "neuron" / "kernels" / _digest()
    built = folder / "kernels.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "build.lock"):
        if not built.exists():
            _build(built)
    return built


def fault() -> str | None:
    """Why the kernels cannot be had here, with the remedy; None if they can. Nothing is built."""
    return None if _compiler() is not None else f"no C++ compiler ({', '.join(_COMPILERS)}) was found. {_REMEDY}"


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _build(target: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise KernelBuildError(fault())
    logger.info("Building the CPU kernels with %s (once, about half a minute)", compiler)
    start = time.monotonic()
    packages = Path(torch.__file__).parent
    descriptor, aside = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    command = [compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{packages / 'include'}", str(_SOURCES / "ops.cpp"), "-o", aside]
    command += [f"-L{packages / 'lib'}", "-lc10", "-ltorch_cpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KernelBuildError(
                f"{' '.join(command)} failed with exit code {done.returncode}: {done.stderr.strip()[-2000:]} {_REMEDY}"
            )
        os.chmod(aside, 0o755)
        os.replace(aside, target)
    finally:
        Path(aside).unlink(missing_ok=True)
    logger.info("Built the CPU kernels in %.1f s: %s", time.monotonic() - start, target)


def _digest() -> str:
    """Of sources, flags, torch and the instructions of this CPU."""
    parts = [torch.__version__, *_FLAGS, platform.machine(), _cpu_flags()]
    parts += [path.read_text() for path in sorted(_SOURCES.glob("*.[ch]*"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu_flags() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
