"""Neuron's compiler as a command: finds it, runs `neuronx-cc compile` on an HLO module and returns the NEFF.

Flags are those of the "Neuron Compiler CLI Reference Guide" and the target's value is the instance family, as there. It
runs in the process group of its caller, so whoever ends the group ends it too. Not run with the real compiler yet.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from vllm_neuron.compilation.hbm_signatures import hbm_signature
from vllm_neuron.routes import blob

NAME = "neuronx-cc"
PACKAGE = "neuronx-cc"
FLAGS_VARIABLE = "NEURON_CC_FLAGS"
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"

_SHOWN_LINES = 20


class CompilerError(RuntimeError):
    """neuronx-cc is not there, failed, or was ended. The first line names graph, cause and command."""


def find() -> Path | None:
    """The compiler of this Python environment, else the first on PATH; None if there is none."""
    beside = Path(sys.executable).with_name(NAME)
    found = shutil.which(beside) or shutil.which(NAME)
    return Path(found) if found else None


def fault() -> str | None:
    """Why nothing can be compiled here, with the remedy; None if all is well."""
    executable = find()
    if executable is None:
        return (
            f"there is no {NAME} (neither beside {sys.executable} nor on PATH): install the extra `neuron` from AWS's "
            f"package index (PyPI's {PACKAGE} is an empty placeholder), or put the folder of {NAME} on PATH"
        )
    try:
        logical_cores()
        _version_of(executable)
    except CompilerError as error:
        return str(error)
    return None


def version() -> str:
    """Version of the compiler that `find` finds, or else of the package; "absent" if neither tells."""
    executable = find()
    if executable is None:
        return blob.package_version(PACKAGE)
    try:
        return _version_of(executable)
    except CompilerError:
        return "absent"


@cache
def _version_of(executable: Path) -> str:
    installed = blob.package_version(PACKAGE)
    if executable.parent == Path(sys.executable).parent and installed != "absent":
        return installed
    try:
        answer = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"{executable} --version does not work ({error}): reinstall {PACKAGE}") from error
    found = re.search(r"\d+(?:\.\d+)+\S*", answer.stdout + answer.stderr)
    if found is None:
        raise CompilerError(f"{executable} --version names no version: reinstall {PACKAGE}")
    return found[0]


def logical_cores() -> int:
    """Physical cores that one logical core is made of: NEURON_LOGICAL_NC_CONFIG, as the runtime will have it.

    Raises:
        CompilerError: it is neither 1 nor 2.
    """
    text = os.environ.get(LNC_VARIABLE, "").strip() or "2"
    if text not in ("1", "2"):
        raise CompilerError(f"{LNC_VARIABLE}={text!r}: must be 1 or 2. Correct it, or unset it for 2.")
    return int(text)


def flags(target: str) -> tuple[str, ...]:
    """What the compiler is told beside the graph; NEURON_CC_FLAGS comes after it, and the last of a kind wins.

    Args:
        target: "trn2" or "trn3".

    Raises:
        CompilerError: NEURON_LOGICAL_NC_CONFIG has a bad value.
    """
    return (
        f"--target={target}",
        "--model-type=transformer",
        "--auto-cast=none",
        f"--logical-nc-config={logical_cores()}",
        "--optlevel=1",
    )


@contextmanager
def flags_in_environment(target: str) -> Iterator[None]:
    """Hand the same flags to a compiler that a framework runs: it reads them from NEURON_CC_FLAGS."""
    before = os.environ.get(FLAGS_VARIABLE)
    os.environ[FLAGS_VARIABLE] = " ".join((*flags(target), before or ""))
    try:
        yield
    finally:
        del os.environ[FLAGS_VARIABLE]
        if before is not None:
            os.environ[FLAGS_VARIABLE] = before


def compile_hlo(graph: str, hlo: bytes, target: str) -> bytes:
    """NEFF of a serialized HloModuleProto. What the compiler prints goes on to this process's stderr.

    Args:
        graph: name of the graph, for messages.
        hlo: the module.
        target: "trn2" or "trn3".

    Raises:
        CompilerError: the compiler is not there, failed, was ended by a signal, or has written no NEFF.
    """
    executable = find()
    if executable is None:
        raise CompilerError(f"{graph} cannot be compiled: {fault()}")
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as name:
        folder = Path(name)
        module, neff = folder / f"{graph}.hlo_module.pb", folder / f"{graph}.neff"
        module.write_bytes(hlo)
        command = [str(executable), "compile", module.name, "--framework=XLA", *flags(target)]
        command += [*shlex.split(os.environ.get(FLAGS_VARIABLE, "")), f"--output={neff.name}"]
        returncode, telling, tail = _run(command, folder)
        if returncode or not neff.exists():
            raise CompilerError(_failure(graph, command, returncode, telling, tail))
        return neff.read_bytes()


def _run(command: Sequence[str], folder: Path) -> tuple[int, list[str], list[str]]:
    """Exit code of a command, lines that tell of too little device memory, and the last lines that come after them.

    All that it prints goes to stderr meanwhile.
    """
    tail: deque[str] = deque(maxlen=_SHOWN_LINES)
    telling: list[str] = []
    print(f"+ {shlex.join(command)}", file=sys.stderr, flush=True)
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        try:
            for line in process.stdout or ():
                print(line, end="", file=sys.stderr, flush=True)
                if len(tail) == _SHOWN_LINES and hbm_signature(tail[0]):
                    telling.append(tail[0])
                tail.append(line.rstrip("\n"))
        except BaseException:
            process.kill()
            raise
    return process.returncode, telling[:_SHOWN_LINES], list(tail)


def _failure(graph: str, command: Sequence[str], returncode: int, telling: Sequence[str], tail: Sequence[str]) -> str:
    if returncode < 0:
        name = signal.Signals(-returncode).name
        cause = f"was ended by {name}" + (" (by hand, or for lack of memory)" if name == "SIGKILL" else "")
    elif returncode:
        cause = f"failed with exit code {returncode}"
    else:
        cause = "has written no NEFF, though it reports success"
    first = f"{NAME} {cause} on graph {graph}: {shlex.join(command)}"
    if not tail:
        return f"{first}\nIt printed nothing."
    earlier = ("Earlier it printed:", *telling) if telling else ()
    return "\n".join((first, *earlier, f"The last {len(tail)} lines it printed:", *tail))
