"""What is raised when a kernel breaks a rule of the hardware or of NKI."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
"""The simulator's own folder, whose lines are not the kernel's."""


class NkiValidationError(Exception):
    """A documented constraint is violated, as `nki.isa.NkiValidationError`."""


class Violation(NkiValidationError):
    """A violated rule, with its place.

    Attributes:
        instruction: the instruction, e.g. "nc_matmul".
        rule: the rule, in words, with the offending values.
        operands: the tensors of the instruction, in words.
        line: "file:line" of the kernel.
    """

    def __init__(self, instruction: str, rule: str, operands: str, line: str) -> None:
        parts = [f"{instruction}: {rule}", *([f"operands: {operands}"] if operands else []), f"at {line}"]
        super().__init__("\n  ".join(parts))
        self.instruction, self.rule, self.operands, self.line = instruction, rule, operands, line

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.instruction, self.rule, self.operands, self.line)


class Broken(Exception):
    """A violated rule whose instruction and place the caller adds. Never leaves the simulator."""


def require(holds: bool, rule: str) -> None:
    """Raises:
    Broken: unless `holds`.
    """
    if not holds:
        raise Broken(rule)


def kernel_line() -> str:
    """ "file:line" of the innermost frame outside the simulator, i.e. of the kernel that is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
