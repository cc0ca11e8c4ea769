"""What is wrong with a configuration, and the one error that reports all of it together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_LONGEST_VALUE = 160


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        option: full path of the option, e.g. "additional_config.neuron_config.num_seqs_buckets", or a variable's name.
        value: what it is set to.
        rule: what must hold; for a missing capability, its name.
        remedy: what to do, as a sentence.
        later: the rule names a capability that is not supported yet.
    """

    option: str
    value: Any
    rule: str
    remedy: str
    later: bool = False

    def __str__(self) -> str:
        value = repr(self.value)
        if len(value) > _LONGEST_VALUE:
            value = f"{value[:_LONGEST_VALUE]}..."
        if self.later:
            return f"not supported yet: {self.rule} ({self.option}={value}). {self.remedy}"
        return f"{self.option}={value}: {self.rule}. {self.remedy}"


class ConfigurationError(ValueError):
    """The configuration has faults. Raised before any weight is read and before anything is compiled.

    Attributes:
        faults: all of them, in the order of the message's lines.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        lines = "".join(f"\n  - {fault}" for fault in self.faults)
        super().__init__(f"The configuration of vllm-neuron has {count} (docs/configuration.md):{lines}")

    def __reduce__(self) -> tuple[type, tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)
