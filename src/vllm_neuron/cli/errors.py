"""The one error of the commands."""


class CommandError(RuntimeError):
    """A command cannot do what it was asked.

    Attributes:
        faults: what is wrong and what to do, a line each.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults
