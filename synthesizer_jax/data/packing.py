"""Packing of several examples into one row: best fit in a bounded window of pending examples."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

from synthesizer_jax.data.members import Drawn

WINDOW = 128
"""Number of pending examples among which a row's examples are chosen."""


class Packer:
    """Puts examples together to rows.

    A row begins with the example that has waited longest. The longest pending example whose inputs
    and targets both fit into the rest of the row follows, until none does. Every example is used
    once, in the row after at most ``window - 1`` others at the latest, and the rows depend on the
    order of the examples alone.

    Args:
      examples: an endless iterator.
      lengths: the maximum numbers of input and target tokens of a row.
      max_segments: the maximum number of examples of a row.
      window: number of pending examples; 1 packs nothing.
    """

    def __init__(
        self,
        examples: Iterator[Drawn],
        lengths: tuple[int, int],
        *,
        max_segments: int,
        window: int = WINDOW,
    ):
        self._examples, self._lengths = examples, lengths
        self._max_segments, self._window = max_segments, window
        self.restore([])

    @property
    def pending(self) -> list[Drawn]:
        """The examples that were taken and are in no row yet, oldest first."""
        return list(self._pending.values())

    def restore(self, pending: Sequence[Drawn]) -> None:
        """Replaces the pending examples, which `pending` returned."""
        self._numbers = itertools.count()
        self._pending: dict[int, Drawn] = {}
        # Input length and negative number: of examples of one length the oldest is the last.
        self._by_length: list[tuple[int, int]] = []
        self._append(pending)

    def next_row(self) -> list[Drawn]:
        """Returns the examples of the next row."""
        missing = self._window - len(self._pending)
        self._append(list(itertools.islice(self._examples, missing)))
        oldest = next(iter(self._pending))
        key = (len(self._pending[oldest].inputs), -oldest)
        row = [self._take(bisect.bisect_left(self._by_length, key))]
        inputs, targets = self._lengths
        for _ in range(1, self._max_segments):
            inputs, targets = inputs - len(row[-1].inputs), targets - len(row[-1].targets)
            place = self._find(inputs, targets)
            if place is None:
                break
            row.append(self._take(place))
        return row

    def _append(self, examples: Sequence[Drawn]) -> None:
        for example, number in zip(examples, self._numbers, strict=False):
            self._pending[number] = example
            self._by_length.append((len(example.inputs), -number))
        self._by_length.sort()

    def _find(self, inputs: int, targets: int) -> int | None:
        """Returns the place of the longest example that fits, the oldest of that length."""
        for place in range(bisect.bisect_right(self._by_length, (inputs, 1)) - 1, -1, -1):
            if len(self._pending[-self._by_length[place][1]].targets) <= targets:
                return place
        return None

    def _take(self, place: int) -> Drawn:
        return self._pending.pop(-self._by_length.pop(place)[1])
