"""From examples to a batch: which examples make a row, and the fields of a batch.

A row holds the examples that fit (`Packer`), or one of a batch of similar length (`LengthSorter`).
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.data.task_streams import DrawnExample, random_bits

if TYPE_CHECKING:
    from synthesizer_jax.data.config import DataConfig

WINDOW = 128
"""Number of pending examples among which a row's examples are chosen."""

GROUP = 16
"""Number of batches whose examples are sorted by length together."""


class Packer:
    """Puts examples together to rows.

    A row begins with the example that has waited longest. The pending example with the longest inputs
    (with the longest targets, if rows have no inputs) whose inputs and targets both fit into the rest
    of the row follows, until none does. An example waits until those of its task's epochs before are in
    rows, so that a small task's short examples do not come again before its long ones. Every example is
    used once, and the rows depend on the order of the examples alone.

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
        self._take, self._lengths = take, lengths
        self._max_segments, self._window = max_segments, window
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
        self._by_length: list[tuple[int, int]] = []  # length and −number: of one length, oldest last
        self._waiting: collections.Counter[tuple[int, int]] = collections.Counter()
        self._append(pending)

    def next_row(self) -> list[DrawnExample]:
        """Returns the examples of the next row."""
        self._append(self._take(self._window - len(self._pending)))
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
        longest = inputs if self._lengths[0] else targets
        for place in range(bisect.bisect_left(self._by_length, (longest, 1)) - 1, -1, -1):
            example = self._pending[-self._by_length[place][1]]
            if len(example.inputs) <= inputs and len(example.targets) <= targets:
                return place
        return None

    def _key(self, example: DrawnExample, number: int) -> tuple[int, int]:
        return len(example.inputs if self._lengths[0] else example.targets), -number

    def _remove(self, place: int) -> DrawnExample:
        example = self._pending.pop(-self._by_length.pop(place)[1])
        epoch = example.member, example.epoch
        self._waiting[epoch] -= 1
        if not self._waiting[epoch]:  # the next may follow
            following = (i for i in self._pending.items() if (i[1].member, i[1].epoch - 1) == epoch)
            self._by_length += (self._key(example, number) for number, example in following)
            self._by_length.sort()
        return example


class LengthSorter:
    """Rows of one example, in groups of `GROUP` batches of similar length.

    The examples of a group are drawn together and sorted by the length of their inputs, or of their
    targets if they have no inputs; the first batch's worth of them makes one batch, and so on. The order of
    the batches is random, and the same for all virtual shards, so that short examples of all shards meet.

    Args:
      take: see `Packer`.
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
        return list(self._pending)

    def restore(self, pending: Sequence[DrawnExample], *, draws: int = 0) -> None:
        """Replaces the pending examples; `draws` have been taken."""
        self._group = draws // (GROUP * self._rows)
        self._pending = collections.deque(pending)

    def next_row(self) -> list[DrawnExample]:
        """Returns the example of the next row."""
        if not self._pending:
            drawn = self._take(GROUP * self._rows)
            drawn.sort(key=lambda e: len(e.inputs) or len(e.targets))
            order = np.argsort(random_bits(self._seed, self._group, count=GROUP), kind="stable")
            self._group += 1
            for start in (order * self._rows).tolist():
                self._pending += drawn[start : start + self._rows]
        return [self._pending.popleft()]


def smallest_bucket(
    rows: Iterable[Sequence[DrawnExample]], buckets: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Returns the first numbers of input and target tokens that hold all rows, of one example each."""
    examples = [row[0] for row in rows]
    inputs = max(len(example.inputs) for example in examples)
    targets = max(len(example.targets) for example in examples)
    return next(bucket for bucket in buckets if inputs <= bucket[0] and targets <= bucket[1])


def batch_fields(config: DataConfig, *, lengths: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
    """Returns the fields of a training batch of padding, which take no memory.

    ``encoder_input_tokens`` are ``[rows, inputs_length]``, without elements if there are no inputs;
    ``decoder_input_tokens`` (the targets shifted right by one), ``decoder_target_tokens`` and
    ``decoder_loss_weights`` (float32, 0 at padding and at targets that an objective
    leaves out) are ``[rows, targets_length]``. Packed rows also have the ``segment_ids`` of either side:
    1, 2, …; 0 is padding. Tokens are int32, as in `assemble_batch`.

    Args:
      config: lengths, batch size and packing.
      lengths: numbers of input and target tokens of a row; None: the full lengths.
    """
    row = assemble_batch([()], config, lengths=lengths)
    return {k: np.broadcast_to(x, (config.batch_size, x.shape[1])) for k, x in row.items()}


def assemble_batch(
    rows: Sequence[Sequence[DrawnExample]],
    config: DataConfig,
    *,
    lengths: tuple[int, int] | None = None,
    ids: SpecialIds = T5_IDS,
) -> dict[str, np.ndarray]:
    """Returns the `batch_fields` of rows of examples, put one after another; a row of none is padding."""
    inputs, targets = lengths or (config.inputs_length, config.targets_length)
    pad = ids.padding
    encoder_tokens, encoder_segments = _lay_out([[e.inputs for e in row] for row in rows], inputs, pad)
    target_tokens, target_segments = _lay_out([[e.targets for e in row] for row in rows], targets, pad)
    decoder_inputs = np.where(target_segments > 0, ids.start, pad).astype(np.int32)
    continues = target_segments[:, 1:] == target_segments[:, :-1]  # others begin an example, or are padding
    decoder_inputs[:, 1:] = np.where(continues, target_tokens[:, :-1], decoder_inputs[:, 1:])
    # A class may have the number of padding.
    predicted = target_segments > 0 if config.classes else target_tokens != pad
    batch = {
        "encoder_input_tokens": encoder_tokens,
        "decoder_input_tokens": decoder_inputs,
        "decoder_target_tokens": target_tokens,
        "decoder_loss_weights": predicted.astype(np.float32),
    }
    if config.pack:
        batch["encoder_segment_ids"] = encoder_segments
        batch["decoder_segment_ids"] = target_segments
    return batch


def _lay_out(rows: Sequence[Sequence[np.ndarray]], width: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Puts the sequences of every row one after another, and padding after them.

    Returns token ids, and the sequences' numbers in the row, from 1; both are ``[rows, width]`` and int32;
    padding has the id `pad` and the number 0.
    """
    padding = np.full(width, pad, np.int32)
    pieces: list[np.ndarray] = []
    numbers: list[int] = []
    for row in rows:
        pieces += row
        numbers += range(1, len(row) + 1)
        pieces.append(padding[: width - sum(map(len, row))])
        numbers.append(0)
    segments = np.repeat(np.array(numbers, np.int32), [len(piece) for piece in pieces])
    shape = (len(rows), width)
    return np.concatenate(pieces).reshape(shape), segments.reshape(shape)
