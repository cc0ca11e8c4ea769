"""Random numbers of requests, each known from the server's seed, the request and the position alone."""

import numpy as np

_BLOCK = 64
"""Numbers drawn at a time: one alone would cost more than the rest of a row's preparation."""


class Uniforms:
    """One request's numbers, uniform in [0, 1), by position.

    A counter-based generator (Philox 4x64) gives any position without those before, so a number depends neither on
    which requests share a step nor on how often a position is computed: a request that is preempted and comes back, or
    a step that is prepared ahead, gets the same ones.

    Args:
        seed: the server's, of any size and sign.
        number: the request's, below 2^64.
    """

    def __init__(self, seed: int, number: int) -> None:
        # As numbers of 64 bits: of plain integers numpy makes floats where they need all of these.
        self._key = np.array([seed % 2**64, number], np.uint64)
        self._block = -1
        self._numbers: list[float] = []

    def __getitem__(self, position: int) -> float:
        block, offset = divmod(position, _BLOCK)
        if block != self._block:
            counter = np.array([0, 0, 0, block], np.uint64)
            generator = np.random.Generator(np.random.Philox(key=self._key, counter=counter))
            self._numbers = generator.random(_BLOCK, dtype=np.float32).tolist()
            self._block = block
        return self._numbers[offset]
