"""Flags that the documents name are there: `vllm-neuron` has them, or another program does."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from tests.documentation.configuration import PARAMETERS
from tests.test_documentation import DOCUMENTS
from vllm_neuron.cli.main import app

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*[a-z]")
OF_VLLM = {
    *(flag.split()[0] for flag, *_ in PARAMETERS),
    *("--additional-config", "--config", "--disable-hybrid-kv-cache-manager", "--disable-sliding-window"),
    *("--enable-log-outputs", "--enable-log-requests", "--hf-overrides"),
    *("--load-format", "--logits-processors", "--logprobs-mode", "--override-generation-config", "--quantization"),
    *("--save-detailed", "--save-result", "--seed", "--served-model-name", "--structured-outputs-config"),
}
"""Of `vllm serve` and `vllm bench serve`."""
OF_OTHERS = {"--benchmark-disable", "--no-deps", "--only", "--peer"}
"""Of pytest-benchmark, pip, and scripts in benchmarks/."""
PAGES = [path for path in DOCUMENTS if path.name != "migration.md"]
"""All but the one whose tables are of old flags, and are written by code."""


def options(command: click.Command) -> Iterator[str]:
    """Every option of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_flags_of_a_page_are_there(page: Path) -> None:
    known = {*options(typer.main.get_command(app)), *OF_VLLM, *OF_OTHERS}
    assert set(FLAG.findall(page.read_text())) <= known
