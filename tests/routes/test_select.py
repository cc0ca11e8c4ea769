"""Which route a backend's name selects, and what is said about it."""

import logging
import os
import subprocess
import sys

import pytest

from vllm_neuron.routes import select
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select._WARNED, "")


@pytest.mark.parametrize("backend", ["neuron_native", "vllm_neuron"])
def test_a_route_is_selected_by_its_name(backend: str) -> None:
    assert select_route(backend, CPU).name == backend


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"VLLM_NEURON_BACKEND='xla': not one of neuron_native, vllm_neuron"):
        select_route("xla", CPU)


def test_the_xla_route_warns_once_and_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        select_route("vllm_neuron", CPU)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "deprecated" in record.message
    assert "Unset VLLM_NEURON_BACKEND" in record.message


WARN = "from vllm_neuron.routes.select import warn_deprecated; warn_deprecated()"


@pytest.mark.parametrize(("same_server", "warnings"), [(True, 0), (False, 1)])
def test_workers_of_a_server_that_warned_are_silent(same_server: bool, warnings: int) -> None:
    select.warn_deprecated()
    command = [sys.executable, "-c", WARN]
    run = subprocess.run(
        command, env=os.environ, start_new_session=not same_server, check=True, capture_output=True, text=True
    )
    assert run.stderr.count("deprecated") == warnings


def test_the_native_route_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    select_route("neuron_native", CPU)
    assert not caplog.records


IMPORT = """
import sys
import vllm_neuron
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route
select_route({backend!r}, CPU)
loaded = {{"torch_xla", "jax", "jaxlib"}} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize("backend", ["neuron_native", "vllm_neuron"])
def test_selecting_a_route_imports_no_compiler(backend: str) -> None:
    """The XLA route imports its packages only when it compiles, loads or probes."""
    subprocess.run([sys.executable, "-c", IMPORT.format(backend=backend)], check=True)
