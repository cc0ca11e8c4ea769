"""Registers of the engines' sequencers."""

from typing import Any

from vllm_neuron.kernels.simulator.errors import Broken
from vllm_neuron.kernels.simulator.machine import running


class VirtualRegister:
    """A 32-bit register. Its value is known at run time only, so kernels cannot compute with it.

    Attributes:
        value: what it holds; None before the first write.
        frozen: it is the variable of a device loop, which nothing can write.
    """

    def __init__(self, value: int | None = None, frozen: bool = False) -> None:
        self.value, self.frozen = value, frozen

    def read(self) -> int:
        """What it holds.

        Raises:
            Broken: nothing was written to it.
        """
        if self.value is None:
            raise Broken("read of a register that nothing was written to")
        return self.value

    def write(self, value: Any) -> None:
        """Set it, as a signed 32-bit number.

        Raises:
            Broken: it is the variable of a device loop.
        """
        if self.frozen:
            raise Broken("write to the variable of a device loop")
        self.value = (int(value) + 2**31) % 2**32 - 2**31

    def _python(self, use: str) -> int:
        machine = running()
        if machine is not None and machine.strict:
            raise TypeError(f"a register has no value while the kernel is built: it cannot be used {use}")
        return self.read()

    def __bool__(self) -> bool:
        return self._python("as a condition") != 0

    def __index__(self) -> int:
        return self._python("as a Python integer")

    __int__ = __index__

    def __add__(self, other: int) -> int:
        return self._python("in Python arithmetic") + int(other)

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return self._python("in Python arithmetic") - int(other)

    def __rsub__(self, other: int) -> int:
        return int(other) - self._python("in Python arithmetic")

    def __mul__(self, other: int) -> int:
        return self._python("in Python arithmetic") * int(other)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"register {self.value}"
