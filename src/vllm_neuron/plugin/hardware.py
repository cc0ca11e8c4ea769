"""What has to be asked of Neuron devices. Not run on hardware yet."""

import json
import subprocess


def device_memory_per_core() -> int:
    """Bytes of device memory that one Neuron core has, as Neuron's own tool `neuron-ls` tells.

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
