"""The compile route of a configuration, and whether it can work here."""

from vllm_neuron.config import ResolvedConfig
from vllm_neuron.plugin.hardware import compile_target
from vllm_neuron.routes.route import Route
from vllm_neuron.routes.select import select_route


def require_packages(config: ResolvedConfig) -> None:
    """Check that the packages of the route are installed. Imports none of them, so any process may ask.

    Raises:
        RuntimeError: some are missing, or the devices of this machine are of no known kind.
    """
    _require(config, select_route(config.backend, compile_target(config)).missing())


def working_route(config: ResolvedConfig) -> Route:
    """The route, after it has shown that it works in this process.

    Raises:
        RuntimeError: it does not.
    """
    route = select_route(config.backend, compile_target(config))
    probe = route.probe()
    _require(config, None if probe.works else probe.reason)
    return route


def _require(config: ResolvedConfig, fault: str | None) -> None:
    if fault is not None:
        raise RuntimeError(
            f"VLLM_NEURON_BACKEND={config.backend} does not work here: {fault} "
            "(docs/troubleshooting.md#the-compile-route-does-not-work-here)"
        )
