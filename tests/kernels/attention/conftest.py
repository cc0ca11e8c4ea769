"""The kernels run in the simulator here."""

from tests.kernels.simulated import simulated

__all__ = ["simulated"]
