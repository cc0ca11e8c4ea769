"""The cores that run one kernel together: what they share and how they wait for each other."""

import threading
from typing import Any

import numpy as np

from vllm_neuron.kernels.simulator.errors import Broken
from vllm_neuron.kernels.simulator.storage import Storage


class Team:
    """One or two cores.

    Attributes:
        size: number of cores, i.e. the LNC of the launch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._arrivals = threading.Condition()
        self._waiting = self._meetings = 0
        self._left = False
        self._lock = threading.Lock()
        self._shared: dict[int, tuple[tuple[Any, ...], Storage]] = {}
        self._mail: dict[tuple[int, int, int], np.ndarray] = {}

    def meet(self, where: str) -> None:
        """Wait until all cores are here.

        Raises:
            Broken: another core has finished or failed, so that it will never come.
        """
        with self._arrivals:
            meeting = self._meetings
            self._waiting += 1
            if self._waiting == self.size:
                self._waiting, self._meetings = 0, meeting + 1
                self._arrivals.notify_all()
                return
            self._arrivals.wait_for(lambda: self._left or self._meetings != meeting)
            if self._meetings == meeting:
                raise Broken(f"the other core did not come to this {where}: all cores must take the same path")

    def leave(self) -> None:
        """A core is done, or failed: nobody waits for it any more."""
        with self._arrivals:
            self._left = True
            self._arrivals.notify_all()

    def shared(self, number: int, what: tuple[Any, ...], make: Any) -> Storage:
        """The storage of the n-th allocation in shared HBM, which all cores get alike.

        Args:
            number: of the allocation, counted by each core.
            what: shape and type, which must agree.
            make: makes the storage when the first core comes.

        Raises:
            Broken: the cores ask for different tensors.
        """
        with self._lock:
            if number not in self._shared:
                self._shared[number] = (what, make())
            known, storage = self._shared[number]
        if known != what:
            raise Broken(f"allocation {number} in shared_hbm is {known} on one core and {what} on the other")
        return storage

    def exchange(self, rank: int, to: int, source: int, pipe: int, values: np.ndarray) -> np.ndarray:
        """Give values to a core and take what another one gave.

        Raises:
            Broken: the other core did not come.
        """
        with self._lock:
            self._mail[(pipe, rank, to)] = values
        self.meet("sendrecv")
        with self._lock:
            received = self._mail.get((pipe, source, rank))
        if received is None:
            raise Broken(f"core {source} sent nothing to core {rank} on pipe {pipe}")
        self.meet("sendrecv")
        with self._lock:
            self._mail.pop((pipe, rank, to), None)
        return received
