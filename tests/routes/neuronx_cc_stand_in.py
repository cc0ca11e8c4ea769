"""A stand-in for Neuron's compiler: an executable `neuronx-cc` that notes what it is asked, and fails when told to."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BEHAVIOUR = "STAND_IN_BEHAVIOUR"
"""Variable that tells the stand-in what to do: "exit 70", "signal 9", "hang" or "no neff", for every graph or, as in
"decode_b1_ctx256: exit 70", for one."""

VERSION = "2.99.7.0+standin"

_PROGRAM = """#!{python} -IS
import hashlib, json, os, sys, time
if sys.argv[1:] == ["--version"]:
    print("NeuronX Compiler version {version}\\n")
    sys.exit()
module = sys.argv[2]
graph = module.partition(".")[0]
with open(module, "rb") as file:
    hlo = file.read()
with open({folder!r} + "/" + graph + ".hlo_module.pb", "wb") as file:
    file.write(hlo)
with open({folder!r} + "/calls.jsonl", "a") as file:
    file.write(json.dumps({{"graph": graph, "arguments": sys.argv[1:], "pid": os.getpid()}}) + "\\n")
for number in range(30):
    print("line", number, "about", graph, file=(sys.stdout, sys.stderr)[number % 2], flush=True)
only, _, behaviour = os.environ.get({variable!r}, "").rpartition(": ")
behaviour = behaviour if only in ("", graph) else ""
if behaviour.startswith("exit"):
    sys.exit(int(behaviour.split()[1]))
if behaviour.startswith("signal"):
    os.kill(os.getpid(), int(behaviour.split()[1]))
if behaviour == "hang":
    time.sleep(600)
output = next(a.partition("=")[2] for a in sys.argv if a.startswith("--output="))
if behaviour != "no neff":
    with open(output, "wb") as file:
        file.write(b"NEFF " + hashlib.sha256(hlo).digest())
"""


@dataclass(frozen=True)
class Call:
    """One run of the stand-in: name of the graph, command line without the executable, process id."""

    graph: str
    arguments: list[str]
    pid: int


@dataclass(frozen=True)
class StandIn:
    """The stand-in in a folder of its own."""

    folder: Path

    def calls(self) -> list[Call]:
        """Every run so far, in order."""
        noted = self.folder / "calls.jsonl"
        return [Call(**json.loads(line)) for line in noted.read_text().splitlines()] if noted.exists() else []

    def hlo(self, graph: str) -> bytes:
        """The module that it was given for a graph."""
        return (self.folder / f"{graph}.hlo_module.pb").read_bytes()


def install(folder: Path) -> StandIn:
    """Write the stand-in into a folder, which is to be put on PATH."""
    executable = folder / "neuronx-cc"
    text = _PROGRAM.format(python=sys.executable, folder=str(folder), variable=BEHAVIOUR, version=VERSION)
    executable.write_text(text)
    executable.chmod(0o755)
    return StandIn(folder)


def on_path(folder: Path, patch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, first on PATH of this process and of those it starts."""
    stand_in = install(folder)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return stand_in


def parsed(hlo: bytes) -> Any:
    """An HLO module as XLA itself parses and checks it: its text."""
    from jaxlib import xla_client

    return xla_client.XlaComputation(hlo).as_hlo_text()
