"""The bare value of `--override-neuron-config` or `--additional-config`; what comes of it are flags."""

from vllm_neuron.migration.forms.shell import render
from vllm_neuron.migration.launch import Change, Launch, LaunchError, Option
from vllm_neuron.migration.values import read_mapping, with_underscores

_GROUPS = ("override_neuron_config", "neuron_config", "encoder_neuron_config")


def rewrite(text: str, change: Change) -> str:
    """Flags that say the same, one a line.

    Raises:
        LaunchError: it is not a dictionary.
    """
    found = read_mapping(text)
    if found is None:
        raise LaunchError("This starts with a brace and is not a JSON object. Correct it, or give the whole command.")
    values = with_underscores(found[0])
    name = "additional_config" if any(group in values for group in _GROUPS) else "override_neuron_config"
    return render(change(Launch("", {name: Option(name, values)})), "\\\n") + "\n"
