"""The mapping tables: every old name that is known, and what becomes of it."""

from vllm_neuron.migration.rules.fields import FIELDS
from vllm_neuron.migration.rules.flags import FLAGS
from vllm_neuron.migration.rules.nested import SAMPLING, VISION
from vllm_neuron.migration.rules.rule import Outcome, Rule
from vllm_neuron.migration.rules.variables import VARIABLES

__all__ = ["FIELDS", "FLAGS", "SAMPLING", "VARIABLES", "VISION", "Outcome", "Rule"]
