"""Seeded choices, the same on every Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from synthesizer_jax.registry import JSON

T = TypeVar("T")

Row: TypeAlias = dict[str, JSON]
"""Strings and numbers by feature name."""


class Example(NamedTuple):
    """A generated row.

    Attributes:
      row: the features of the TFDS configuration that it imitates, without ``idx``.
      combination: words whose combination puts the row on the training or the held-out side.
    """

    row: Row
    combination: tuple[str, ...]


class Draw:
    """Random choices made of `random.Random.random` alone, whose sequence Python guarantees.

    Args:
      seed: a text; equal texts give equal choices.
      noise: share of labels that `noisy` replaces.
    """

    def __init__(self, seed: str, *, noise: float = 0.0):
        self._random = random.Random(seed)
        self._noise = noise

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self._random.random() < probability

    def below(self, count: int) -> int:
        """An integer in ``[0, count)``."""
        return int(self._random.random() * count)

    def one(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def other(self, options: Sequence[T], than: T) -> T:
        """One of the options that is not `than`."""
        return self.one([option for option in options if option != than])

    def two(self, options: Sequence[T]) -> tuple[T, T]:
        """Two different options."""
        first = self.one(options)
        return first, self.other(options, first)

    def some(self, count: int, of: int) -> list[bool]:
        """`of` truth values, `count` of them true."""
        chosen = [False] * of
        for _ in range(count):
            chosen[self.one([i for i, taken in enumerate(chosen) if not taken])] = True
        return chosen

    def noisy(self, label: int, count: int) -> int:
        """The label, or now and then another of the `count` ones: an annotator's slip."""
        if self.chance(self._noise):
            return self.other(range(count), label)
        return label
