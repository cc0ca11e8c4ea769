import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import vllm_neuron
from vllm_neuron.cli import render, report
from vllm_neuron.cli.main import app
from vllm_neuron.cli.versions import package
from vllm_neuron.kernels.dispatch import Choice


def test_placeholder_from_pypi_is_told_from_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(name: str, files: list[str]) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))

    install("nki", ["nki/__init__.py", "nki-1.0.dist-info/METADATA"])
    install("torch-neuronx", ["torch_neuronx/__init__.py", "torch_neuronx/core.py", "torch_neuronx/lib.so"])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (package("nki").version, package("nki").stub) == ("1.0", True)
    assert (package("torch-neuronx").version, package("torch-neuronx").stub) == ("1.0", False)
    assert package("no-such-package").version is None
    assert package("vllm").version == "0.16.0"


def test_help_answers_without_heavy_imports() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "doctor" in result.stdout
    assert "demo-model" in result.stdout


def test_platform_says_what_the_plugin_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        logging.getLogger("vllm_neuron.plugin").info("no devices here")
        warnings.warn("staying out", UserWarning, stacklevel=1)

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(vllm_neuron, "register", register, raising=False)
    found = report.platform()
    assert not found.active
    assert found.reasons == ("no devices here", "staying out")


def test_platform_reports_why_the_plugin_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", "1")
    found = report.platform()
    assert not found.active
    assert any("VLLM_NEURON_CPU_COMPILE" in reason for reason in found.reasons)


def test_platform_without_devices_or_a_mode_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PLUGINS", "VLLM_NEURON_CPU_MODE", "VLLM_NEURON_CPU_COMPILE"):
        monkeypatch.delenv(name, raising=False)
    found = report.platform()
    assert (found.active, found.mode) == (False, "neuron")
    assert any("VLLM_NEURON_CPU_MODE=1" in reason for reason in found.reasons)


@pytest.mark.parametrize("value", ["", "other"])
def test_platform_that_vllm_may_not_load(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    found = report.platform()
    assert not found.active
    assert "VLLM_PLUGINS" in found.reasons[0]


def test_cache_folder_is_sized_up_and_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "absent"))
    found = report.cache_folder()
    assert (found.exists, found.entries, found.num_bytes, found.writable) == (False, 0, 0, True)
    assert not (tmp_path / "absent").exists()

    entry = Path(found.path) / "neuron_native" / "key"
    entry.mkdir(parents=True)
    (entry / "manifest.json").write_text("{}")
    (entry / "blob").write_bytes(b"x" * 1000)
    found = report.cache_folder()
    assert (found.exists, found.entries, found.num_bytes) == (True, 1, 1002)


def test_bad_and_unknown_variables_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "perhaps")
    monkeypatch.setenv("VLLM_NEURON_REMOTE_CACHE", "x")
    texts = report.environment_warnings()
    assert any("VLLM_NEURON_CPU_MODE='perhaps'" in text for text in texts)
    assert any("NEURON_LIBTORCH_REMOTE_CACHE" in text for text in texts)


@pytest.mark.parametrize(
    ("variables", "name", "why"),
    [
        ({}, "C++ kernel", "CPU mode"),
        ({"NKI_SIMULATOR": "1"}, "NKI kernel", "NKI_SIMULATOR=1"),
        ({"VLLM_NEURON_DISABLE_NKI_KERNELS": "1"}, "torch twin", "VLLM_NEURON_DISABLE_NKI_KERNELS=1"),
        ({"VLLM_NEURON_BACKEND": "vllm_neuron"}, "C++ kernel", "CPU mode"),
    ],
)
def test_each_op_is_computed_by_what_the_engine_chooses(
    variables: dict[str, str], name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NKI_SIMULATOR", "VLLM_NEURON_BACKEND", "VLLM_NEURON_DISABLE_NKI_KERNELS"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"VLLM_NEURON_CPU_MODE": "1", **variables}.items():
        monkeypatch.setenv(variable, value)
    (found,) = (choice for choice in report.kernels() if choice.op == "rms_norm")
    assert found.implementation == name
    assert why in found.why


def test_routes_of_a_machine_without_devices_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_target() -> str:
        raise RuntimeError("no Neuron instance")

    for name in ("VLLM_NEURON_CPU_MODE", "VLLM_NEURON_CPU_COMPILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("vllm_neuron.plugin.hardware.device_target", device_target)
    assert {(route.works, route.reason) for route in report.routes()} == {(False, "no Neuron instance")}


def test_routes_in_cpu_compile_mode_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE", raising=False)
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", "1")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setenv("PATH", str(tmp_path))
    native, xla = report.routes()
    assert not native.works and "torch-neuronx" in native.reason
    assert not xla.works and "there is no neuronx-cc" in xla.reason


def a_report(**changes: Any) -> report.Report:
    values: dict[str, Any] = {
        "platform": report.Platform(True, "cpu", ("CPU mode",)),
        "packages": (),
        "routes": (
            report.RouteReport("neuron_native", True, True, "all there", {}),
            report.RouteReport("vllm_neuron", False, False, "torch_xla [missing]", {}),
        ),
        "devices": (),
        "kernels": (Choice("rms_norm", "C++ kernel", "because [of this]"),),
        "cache": report.CacheFolder("/somewhere", True, False, 3, 2**20),
        "environment": (),
        "warnings": ("something [odd]",),
    }
    return report.Report(**{**values, **changes})


def test_only_the_selected_route_has_to_work() -> None:
    assert a_report().healthy
    broken = report.RouteReport("neuron_native", True, False, "no compiler", {})
    assert not a_report(routes=(broken,)).healthy
    assert not a_report(platform=report.Platform(False, "neuron", ())).healthy


def test_report_for_people_says_it_all() -> None:
    console = Console(record=True, width=120)
    render.show(a_report(), console)
    text = console.export_text()
    for part in (
        "rms_norm",
        "C++ kernel",
        "because [of this]",
        "torch_xla [missing]",
        "something [odd]",
        "no /dev/neuron*",
        "3 graphs, 1.0 MiB",
        "(selected)",
    ):
        assert part in text


@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 1)])
def test_exit_code_tells_whether_the_selected_route_works(
    works: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = report.RouteReport("neuron_native", True, works, "", {})
    monkeypatch.setattr(report, "gather", lambda: a_report(routes=(route,)))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout)["healthy"] is works
    assert CliRunner().invoke(app, ["doctor"]).exit_code == code
