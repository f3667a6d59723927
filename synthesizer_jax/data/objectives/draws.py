"""Random numbers for objectives: a small interface, and its implementation by counters."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from synthesizer_jax.data.task_streams import random_bits


class Draws(Protocol):
    """A generator whose successive calls return independent random numbers."""

    def uniform(self, count: int) -> np.ndarray:
        """Returns float32 numbers in [0, 1), ``[count]``."""
        ...

    def integers(self, count: int, *, low: int, high: int) -> np.ndarray:
        """Returns integers in [low, high), ``[count]``."""
        ...

    def permutation(self, count: int) -> np.ndarray:
        """Returns the numbers 0 to ``count - 1`` in random order."""
        ...

    def fork(self, part: int) -> Draws:
        """Returns the generator of a part, which is independent of all calls of this one."""
        ...


class CounterDraws:
    """Random numbers that depend on a seed, a place and the number of the call alone.

    They are the same in every version of NumPy (`task_streams.random_bits`).

    Args:
      seed: of the stream.
      place: of the numbers in the stream, such as epoch, group and segment.
    """

    def __init__(self, seed: np.random.SeedSequence, *place: int):
        self._seed, self._place, self._num_calls = seed, place, 0

    def uniform(self, count: int) -> np.ndarray:
        """Returns float32 multiples of 2⁻²⁴ in [0, 1), ``[count]``."""
        return (self._bits(count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)

    def integers(self, count: int, *, low: int, high: int) -> np.ndarray:
        """Returns integers in [low, high), ``[count]``; the bias is below 2⁻³² for 32-bit ranges."""
        return low + (self._bits(count) % np.uint64(high - low)).astype(np.int64)

    def permutation(self, count: int) -> np.ndarray:
        """Returns the numbers 0 to ``count - 1`` in random order."""
        return np.argsort(self._bits(count), kind="stable")

    def fork(self, part: int) -> CounterDraws:
        """Returns the generator of a part, which is independent of all calls of this one."""
        return CounterDraws(self._seed, *self._place, part)

    def _bits(self, count: int) -> np.ndarray:
        self._num_calls += 1
        return random_bits(self._seed, *self._place, self._num_calls - 1, count=count)
