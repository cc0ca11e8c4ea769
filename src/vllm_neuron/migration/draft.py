"""A new launch while it is made: rules read the old one and write here."""

from dataclasses import dataclass, field
from typing import Any

from vllm_neuron.migration.launch import Launch, Option, Row, Verdict
from vllm_neuron.migration.values import whole_number


@dataclass
class Draft:
    """What the new launch has so far.

    Attributes:
        old: the launch it comes from.
        keep_tuning: keep the size of KV blocks and their number.
        fields: settings of the old NeuronConfig, wherever they stood.
        options: vLLM's options by name.
        environment: variables.
        neuron: `neuron_config`.
        encoder: `encoder_neuron_config`.
        additional: the rest of `additional_config`.
        rows: what became of each old setting.
    """

    old: Launch
    keep_tuning: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Option] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    neuron: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)
    additional: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def set(self, name: str, value: Any) -> None:
        """Give one of vLLM's options a value that the source does not have."""
        self.options[name] = Option(name, value)

    def keep(self, name: str) -> None:
        """Take an option over as it is."""
        self.options[name] = self.old.options[name]

    def number(self, name: str) -> int | None:
        """An option that is a whole number and known, of the new launch or else of the old one."""
        option = self.options.get(name) or self.old.options.get(name)
        return whole_number(option.value) if option is not None and option.known else None

    def add(self, place: str, old: str, verdict: Verdict, new: str, reason: str) -> None:
        """Note what became of a setting."""
        self.rows.append(Row(place, old, verdict, new, reason))
