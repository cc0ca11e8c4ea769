"""Writes the tables of documents that follow from code.

python -m tests.documentation.generate
"""

from collections.abc import Callable

from tests.documentation.configuration import option_table, parameter_table, variable_table
from tests.documentation.support import support_table
from tests.documentation.tables import DOCS, replaced
from vllm_neuron.config import EncoderNeuronConfig, NeuronConfig, OnDeviceSamplingConfig

TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("configuration.md", "neuron_config table"): lambda: option_table(NeuronConfig),
    ("configuration.md", "on_device_sampling_config table"): lambda: option_table(OnDeviceSamplingConfig),
    ("configuration.md", "encoder_neuron_config table"): lambda: option_table(EncoderNeuronConfig),
    ("configuration.md", "parameter table"): parameter_table,
    ("configuration.md", "variable table"): variable_table,
    ("support-matrix.md", "support table"): support_table,
}
"""(document, name of the table) -> its text."""


def generated(document: str) -> str:
    """The text of a document with all of its tables made anew."""
    text = (DOCS / document).read_text()
    for (place, name), make in TABLES.items():
        if place == document:
            text = replaced(text, name, make())
    return text


if __name__ == "__main__":
    for name in sorted({document for document, _ in TABLES}):
        (DOCS / name).write_text(generated(name))
