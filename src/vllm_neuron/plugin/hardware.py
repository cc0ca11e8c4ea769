"""What has to be known of Neuron devices, those of this machine and those that are only compiled for.

What asks the devices of this machine has not been run on hardware yet.
"""

import json
import re
import subprocess
from pathlib import Path

from vllm_neuron.config import ResolvedConfig
from vllm_neuron.kv_cache.budget import GIB
from vllm_neuron.routes.neuronx_cc import logical_cores
from vllm_neuron.routes.route import CPU, Target

PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""Where an EC2 instance has its own type, such as trn2.48xlarge."""

_CHIP_GIB = {"trn2": 96, "trn3": 144}
_CORES_PER_CHIP = 8
_ELSEWHERE = (
    "Neuron devices are supported on EC2 instances of the families trn2 and trn3. Set VLLM_NEURON_CPU_MODE=1 to run on "
    "the CPU, or VLLM_NEURON_CPU_COMPILE=1 and NEURON_PLATFORM_TARGET_OVERRIDE to compile for such an instance."
)


def compile_target(config: ResolvedConfig) -> Target:
    """What a configuration's graphs are compiled for.

    Raises:
        RuntimeError: it asks for the devices of this machine, which are of no known kind.
    """
    if config.cpu_mode:
        return CPU
    if config.platform_target is not None:
        return Target(config.platform_target, compile_only=True)
    return Target(device_target())


def device_target(product_name: Path = PRODUCT_NAME) -> str:
    """Kind of the Neuron devices of this machine, "trn2" or "trn3", from its EC2 instance type.

    Raises:
        RuntimeError: the instance type is not known, or is of another family.
    """
    try:
        instance_type = product_name.read_text().strip()
    except OSError as error:
        raise RuntimeError(
            f"{product_name}, which names the EC2 instance type, cannot be read ({error.strerror}). {_ELSEWHERE}"
        ) from error
    family = re.match(r"(trn[23])[a-z]*\.", instance_type)
    if family is None:
        raise RuntimeError(f"{product_name} says {instance_type!r}. {_ELSEWHERE}")
    return family[1]


def documented_memory_per_core(target: str) -> int:
    """Bytes of device memory that one logical Neuron core of a target has.

    From the pages "Trainium2 Architecture" and "Trainium3 Architecture" of AWS's Neuron documentation: 8 cores a chip,
    96 GiB on Trainium2 and 144 GiB on Trainium3. A logical core is two of them, or one if NEURON_LOGICAL_NC_CONFIG=1.

    Args:
        target: "trn2" or "trn3".

    Raises:
        CompilerError: NEURON_LOGICAL_NC_CONFIG has a bad value.
    """
    return _CHIP_GIB[target] * GIB // _CORES_PER_CHIP * logical_cores()


def memory_per_core(config: ResolvedConfig) -> int:
    """Bytes of device memory of one logical core: of the devices here, or of the target that is compiled for.

    Raises:
        RuntimeError: the devices do not tell.
    """
    if config.platform_target is not None:
        return documented_memory_per_core(config.platform_target)
    return device_memory_per_core()


def device_memory_per_core() -> int:
    """Bytes of device memory that one Neuron core of this machine has, as Neuron's own tool `neuron-ls` tells.

    Raises:
        RuntimeError: the tool is not there, fails, or finds no device.
    """
    command = ["neuron-ls", "--json-output"]
    try:
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        devices = json.loads(listed)
        return min(int(device["memory_size"]) // int(device["nc_count"]) for device in devices)
    except (OSError, subprocess.CalledProcessError, ValueError, KeyError) as error:
        raise RuntimeError(
            f"{' '.join(command)} does not tell how much memory the Neuron devices have ({error}). Install "
            "aws-neuronx-tools, or set VLLM_NEURON_CPU_MODE=1 to run without devices."
        ) from error
