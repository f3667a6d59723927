"""Batches of rows of similar length, for models that cannot read packed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from synthesizer_jax.data.task_streams import DrawnExample, random_bits

GROUP = 16
"""Number of batches whose examples are sorted by length together."""


class LengthSorter:
    """Rows of one example, in groups of `GROUP` batches of similar length.

    The examples of a group are drawn together and sorted by the length of their inputs, or of their
    targets if they have no inputs; the first batch's worth of them makes one batch, and so on. The
    order of the batches is random, and the same for all virtual shards, so that
    short examples of all shards meet. Every example is used once, within its group.

    Args:
      take: returns the next examples, as many as it is asked for.
      rows: number of rows of a batch.
      seed: of the order of batches; equal for all shards.
    """

    def __init__(self, take: Callable[[int], list[DrawnExample]], *, rows: int, seed: int):
        self._take, self._rows = take, rows
        self._seed = np.random.SeedSequence(seed, spawn_key=(2**32 - 1,))
        self.restore([])

    @property
    def pending(self) -> list[DrawnExample]:
        """The examples that were taken and are in no row yet, in the order of their rows."""
        return self._pending[::-1]

    def restore(self, pending: Sequence[DrawnExample], *, draws: int = 0) -> None:
        """Replaces the pending examples.

        Args:
          pending: what `pending` returned.
          draws: number of examples that have been taken.
        """
        self._group = draws // (GROUP * self._rows)
        self._pending = list(pending)[::-1]

    def next_row(self) -> list[DrawnExample]:
        """Returns the example of the next row."""
        if not self._pending:
            self._pending = self._next_group()[::-1]
        return [self._pending.pop()]

    def _next_group(self) -> list[DrawnExample]:
        drawn = sorted(
            self._take(GROUP * self._rows), key=lambda e: len(e.inputs) or len(e.targets)
        )
        order = np.argsort(random_bits(self._seed, self._group, count=GROUP), kind="stable")
        self._group += 1
        starts = (order * self._rows).tolist()
        return [example for start in starts for example in drawn[start : start + self._rows]]


def smallest_bucket(
    rows: Iterable[Sequence[DrawnExample]], buckets: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Returns the first numbers of input and target tokens that hold all rows.

    Args:
      rows: of one example each.
      buckets: in ascending order; the last one holds everything.
    """
    examples = [row[0] for row in rows]
    inputs = max(len(example.inputs) for example in examples)
    targets = max(len(example.targets) for example in examples)
    return next(bucket for bucket in buckets if inputs <= bucket[0] and targets <= bucket[1])
