"""Executables as bytes: what is refused, and why."""

import pytest
import torch

from vllm_neuron.routes import blob
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import CPU, Route
from vllm_neuron.routes.xla import XlaRoute

VERSIONS = {"torch": "1.0"}


def saved(route: str = "route", platform: str = "cpu", body: object = ("step", [1, 2])) -> bytes:
    return blob.pack(route, platform, VERSIONS, body)


def test_what_is_packed_comes_back() -> None:
    assert blob.unpack(saved(), "route", "cpu", VERSIONS) == ("step", [1, 2])


@pytest.mark.parametrize("foreign", [b"", b"something else", b"vllm-neuron native 1\n{}\n"])
def test_something_else_is_refused(foreign: bytes) -> None:
    with pytest.raises(ValueError, match="not an executable"):
        blob.unpack(foreign, "route", "cpu", VERSIONS)


@pytest.mark.parametrize(
    ("route", "platform", "versions"),
    [
        ("other", "cpu", VERSIONS),
        ("route", "neuron", VERSIONS),
        ("route", "cpu", {"torch": "2.0"}),
        ("route", "cpu", {}),
    ],
)
def test_another_route_platform_or_version_is_refused(route: str, platform: str, versions: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"compiled for .*1\.0.*, but this is"):
        blob.unpack(saved(), route, platform, versions)


@pytest.mark.parametrize("cut", [1, 5, 10, 20])
def test_a_truncated_body_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="damaged"):
        blob.unpack(saved()[:-cut], "route", "cpu", VERSIONS)


def test_an_absent_package_has_a_version_too() -> None:
    assert blob.package_versions(("torch", "no-such-package")) == {
        "torch": torch.__version__.split("+")[0],
        "no-such-package": "absent",
    }


@pytest.mark.parametrize(("route", "other"), [(NativeRoute(CPU), XlaRoute(CPU)), (XlaRoute(CPU), NativeRoute(CPU))])
def test_a_route_refuses_what_the_other_one_saved(route: Route, other: Route) -> None:
    with pytest.raises(ValueError, match="compiled for"):
        route.load(blob.pack(other.name, "cpu", other.versions(), ()))
