"""From the resolved value of VLLM_NEURON_BACKEND to a route."""

import logging
import os

from vllm_neuron.routes.route import Route, Target

logger = logging.getLogger(__name__)

_WARNED = "_XLA_ROUTE_WARNED_IN_PROCESS_GROUP"
"""Set in the environment to the process group that was warned: an engine's workers inherit it and stay silent."""


def select_route(backend: str, target: Target) -> Route:
    """The route of that name. Its compiler is imported only here, or later.

    Args:
        backend: "neuron_native" or "vllm_neuron".
        target: what to compile for.

    Raises:
        ValueError: there is no such route.
    """
    match backend:
        case "neuron_native":
            from vllm_neuron.routes.native import NativeRoute

            return NativeRoute(target)
        case "vllm_neuron":
            from vllm_neuron.routes.xla import XlaRoute

            warn_deprecated()
            return XlaRoute(target)
        case _:
            raise ValueError(f"VLLM_NEURON_BACKEND={backend!r}: not one of neuron_native, vllm_neuron")


def warn_deprecated() -> None:
    """Say that the XLA route is deprecated: once per process group, so once per server."""
    group = str(os.getpgrp())
    if os.environ.get(_WARNED) == group:
        return
    os.environ[_WARNED] = group
    logger.warning(
        "VLLM_NEURON_BACKEND=vllm_neuron selects the XLA route, which is deprecated and will be removed when torch_xla "
        "no longer supports vLLM's torch. Unset VLLM_NEURON_BACKEND (or set it to neuron_native) to use the native "
        "route; answers and options are the same."
    )
