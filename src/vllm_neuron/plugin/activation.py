"""Whether this platform is the one to use in this process. Imports vLLM only once that is settled."""

import importlib
import logging
from importlib import metadata
from pathlib import Path

from vllm_neuron import envs
from vllm_neuron.plugin.last_words import repeat_at_exit
from vllm_neuron.plugin.logs import configure_logging
from vllm_neuron.plugin.processes import choose_start_method
from vllm_neuron.plugin.watchdog import watch_parent

logger = logging.getLogger(__name__)

PLATFORM = "vllm_neuron.plugin.platform.NeuronPlatform"
VLLM_SERIES = "0.16."
DEVICE_FOLDER = Path("/dev")


class ActivationError(RuntimeError):
    """The platform is asked for but cannot be used; the text has the cause and the remedy."""


def activate(device_folder: Path = DEVICE_FOLDER) -> str | None:
    """The platform's class if devices or the environment ask for it, else None.

    Args:
        device_folder: where Neuron devices would be, as files named neuron*.

    Raises:
        ActivationError: vLLM is of another version, variables contradict each other, or the platform's module cannot
            be imported.
        EnvironmentVariableError: a variable is not readable.
    """
    configure_logging()
    configure_logging(envs.VLLM_NEURON_LOG_LEVEL)
    cpu_mode, cpu_compile = envs.VLLM_NEURON_CPU_MODE, envs.VLLM_NEURON_CPU_COMPILE
    if not (cpu_mode or cpu_compile or any(device_folder.glob("neuron*"))):
        logger.info(
            "vllm-neuron stays out: there is no Neuron device (%s), and neither VLLM_NEURON_CPU_MODE=1 nor "
            "VLLM_NEURON_CPU_COMPILE=1 is set.",
            device_folder / "neuron*",
        )
        return None
    _require_consistent(cpu_mode, cpu_compile)
    require_vllm_version(metadata.version("vllm"))
    module = PLATFORM.rpartition(".")[0]
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ActivationError(
            f"importing {module} failed: {type(error).__name__}: {error}. Reinstall vllm-neuron with its "
            "dependencies, or deactivate it with VLLM_PLUGINS."
        ) from error
    choose_start_method(cpu_mode)
    repeat_at_exit()
    watch_parent()
    return PLATFORM


def _require_consistent(cpu_mode: bool, cpu_compile: bool) -> None:
    if cpu_mode and cpu_compile:
        raise ActivationError(
            "VLLM_NEURON_CPU_MODE=1 runs on the CPU and VLLM_NEURON_CPU_COMPILE=1 compiles for Neuron: unset one."
        )
    if cpu_compile and not envs.NEURON_PLATFORM_TARGET_OVERRIDE:
        targets = ", ".join(envs.TARGETS)
        raise ActivationError(
            f"VLLM_NEURON_CPU_COMPILE=1 needs NEURON_PLATFORM_TARGET_OVERRIDE: set it to one of {targets}."
        )


def require_vllm_version(version: str) -> None:
    """Refuse a vLLM whose internals this package does not know.

    Raises:
        ActivationError: ``version`` is not of the supported series.
    """
    if not version.startswith(VLLM_SERIES):
        raise ActivationError(
            f"vLLM {version} is installed, and this version of vllm-neuron supports vLLM >=0.16.0,<0.17. Install "
            "vllm==0.16.0, or the vllm-neuron of your vLLM's version."
        )
