"""From a launch of NxD Inference to one of this plugin: `vllm-neuron migrate`."""

from vllm_neuron.migration.forms.detect import Form
from vllm_neuron.migration.launch import Launch, LaunchError, Option, Row, Verdict
from vllm_neuron.migration.migrate import Migrated, Migration, migrate

__all__ = ["Form", "Launch", "LaunchError", "Migrated", "Migration", "Option", "Row", "Verdict", "migrate"]
