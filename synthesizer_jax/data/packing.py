"""Packing of several examples into one row: best fit in a bounded window of pending examples."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Sequence

from synthesizer_jax.data.task_streams import DrawnExample

WINDOW = 128
"""Number of pending examples among which a row's examples are chosen."""


class Packer:
    """Puts examples together to rows.

    A row begins with the example that has waited longest. The pending example with the longest inputs
    (with the longest targets, if rows have no inputs) whose inputs and targets both fit into the rest
    of the row follows, until none does. An example waits until those of its task's epochs before are in
    rows, so that a small task's short examples do not come again before its long ones. Every example is
    used once, in the row after at most ``window - 1`` others at the latest, and the rows depend on the
    order of the examples alone.

    Args:
      take: returns the next examples, as many as it is asked for.
      lengths: the maximum numbers of input and target tokens of a row.
      max_segments: the maximum number of examples of a row.
      window: number of pending examples; 1 packs nothing.
    """

    def __init__(
        self,
        take: Callable[[int], list[DrawnExample]],
        lengths: tuple[int, int],
        *,
        max_segments: int,
        window: int = WINDOW,
    ):
        self._take_next, self._lengths = take, lengths
        self._max_segments, self._window = max_segments, window
        self._sorts_targets = not lengths[0]
        self.restore([])

    @property
    def pending(self) -> list[DrawnExample]:
        """The examples that were taken and are in no row yet, oldest first."""
        return list(self._pending.values())

    def restore(self, pending: Sequence[DrawnExample], *, draws: int = 0) -> None:
        """Replaces the pending examples, which `pending` returned; `draws` is not needed."""
        del draws
        self._numbers = itertools.count()
        self._pending: dict[int, DrawnExample] = {}
        self._by_length: list[int] = []
        self._waiting: collections.Counter[tuple[int, int]] = collections.Counter()
        self._append(pending)

    def next_row(self) -> list[DrawnExample]:
        """Returns the examples of the next row."""
        self._append(self._take_next(self._window - len(self._pending)))
        number, oldest = next(iter(self._pending.items()))
        row = [self._remove(bisect.bisect_left(self._by_length, self._key(oldest, number)))]
        inputs, targets = self._lengths
        for _ in range(1, self._max_segments):
            inputs, targets = inputs - len(row[-1].inputs), targets - len(row[-1].targets)
            place = self._find(inputs, targets)
            if place is None:
                break
            row.append(self._remove(place))
        return row

    def _append(self, examples: Sequence[DrawnExample]) -> None:
        for example, number in zip(examples, self._numbers, strict=False):
            self._pending[number] = example
            self._waiting[example.member, example.epoch] += 1
            if not self._waiting[example.member, example.epoch - 1]:
                self._by_length.append(self._key(example, number))
        self._by_length.sort()

    def _find(self, inputs: int, targets: int) -> int | None:
        """Returns the place of the longest example that fits, the oldest of that length."""
        longest = targets if self._sorts_targets else inputs
        for place in range(bisect.bisect_left(self._by_length, _key(longest, -1)) - 1, -1, -1):
            example = self._pending[_number(self._by_length[place])]
            if len(example.inputs) <= inputs and len(example.targets) <= targets:
                return place
        return None

    def _key(self, example: DrawnExample, number: int) -> int:
        return _key(len(example.targets if self._sorts_targets else example.inputs), number)

    def _remove(self, place: int) -> DrawnExample:
        example = self._pending.pop(_number(self._by_length.pop(place)))
        epoch = example.member, example.epoch
        self._waiting[epoch] -= 1
        if not self._waiting[epoch]:  # the next may follow
            following = (i for i in self._pending.items() if (i[1].member, i[1].epoch - 1) == epoch)
            self._by_length += (self._key(example, number) for number, example in following)
            self._by_length.sort()
        return example


_LAST = 2**48 - 1
"""More than the number of any example."""


def _key(length: int, number: int) -> int:
    """Returns an integer that orders examples by length, and those of one length with the oldest last."""
    return (length << 48) + _LAST - number


def _number(key: int) -> int:
    """Returns the number of the example with that key."""
    return _LAST - (key & _LAST)
