"""Groups examples into rows, and lays out rows as the arrays of a batch.

The module has two ways to group examples into rows. `Packer` puts several examples into one row
until nothing more fits. `LengthSorter` puts one example into each row, and gives all rows of a
batch a similar length.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.data.examples import DrawnExample
from synthesizer_jax.data.task_streams import random_bits

if TYPE_CHECKING:
    from synthesizer_jax.data.config import DataConfig

WINDOW = 128
"""The number of pending examples from which `Packer` chooses the examples of a row."""

GROUP = 16
"""The number of batches whose examples `LengthSorter` sorts by length together."""


class Packer:
    """Packs examples into rows, choosing the longest pending example that still fits.

    A row begins with the example that has waited longest. Then the packer adds the longest pending
    example whose inputs and targets both fit into the rest of the row, and repeats this until no
    example fits. The length of an example is the number of its input tokens, or the number of its
    target tokens if rows have no inputs.

    The examples of a task's next epoch wait until all pending examples of its current epoch are in
    rows. Without this rule, the short examples of a small task would be repeated before its long
    ones are used. Every example is used exactly once, and the rows depend only on the order of the
    examples.

    Args:
      take: a function that takes a number n and returns the next n examples.
      lengths: the maximum numbers of input tokens and of target tokens in a row.
      max_segments: the maximum number of examples in a row.
      window: the number of pending examples to choose from. If `window` is 1, every row holds one
        example.
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
        """The examples that were taken but are not in a row yet, oldest first."""
        return list(self._pending.values())

    def restore(self, pending: Sequence[DrawnExample], *, draws: int = 0) -> None:
        """Replaces the pending examples by a list that the property `pending` returned.

        The argument `draws` is ignored, and exists only because `LengthSorter.restore` has the same
        argument.
        """
        del draws
        self._numbers = itertools.count()
        self._pending: dict[int, DrawnExample] = {}
        # This list holds the sort key of each candidate (see `_key`), in ascending order. The
        # oldest of several candidates with equal length comes last.
        self._by_length: list[tuple[int, int]] = []
        # This counter maps a task and an epoch to the number of their pending examples.
        self._waiting: collections.Counter[tuple[int, int]] = collections.Counter()
        self._append(pending)

    def next_row(self) -> list[DrawnExample]:
        """Returns the examples of the next row, which has at least one example."""
        self._append(self._take(self._window - len(self._pending)))
        number, oldest = next(iter(self._pending.items()))
        row = [self._remove(bisect.bisect_left(self._by_length, self._key(oldest, number)))]
        inputs, targets = self._lengths
        for _ in range(1, self._max_segments):
            # Compute how many more input and target tokens fit into the row.
            inputs, targets = inputs - len(row[-1].inputs), targets - len(row[-1].targets)
            index = self._find(inputs, targets)
            if index is None:
                break
            row.append(self._remove(index))
        return row

    def _append(self, examples: Sequence[DrawnExample]) -> None:
        """Adds pending examples.

        An example becomes a candidate for the next row if no example of its task's previous epoch
        is pending.
        """
        for example, number in zip(examples, self._numbers, strict=False):
            self._pending[number] = example
            self._waiting[example.member, example.epoch] += 1
            # The list `_by_length` holds only candidates, so `_find` never returns an example of a
            # later epoch.
            if not self._waiting[example.member, example.epoch - 1]:
                self._by_length.append(self._key(example, number))
        self._by_length.sort()

    def _find(self, inputs: int, targets: int) -> int | None:
        """Returns the index in `_by_length` of the longest candidate that fits, or `None`.

        If several candidates have this length, the oldest one is chosen.

        Args:
          inputs: the number of input tokens that are free in the row.
          targets: the number of target tokens that are free in the row.
        """
        longest = inputs if self._lengths[0] else targets
        # Candidates are sorted by only one of their two lengths. The loop therefore checks the
        # other length of each candidate.
        for index in range(bisect.bisect_left(self._by_length, (longest, 1)) - 1, -1, -1):
            example = self._pending[-self._by_length[index][1]]
            if len(example.inputs) <= inputs and len(example.targets) <= targets:
                return index
        return None

    def _key(self, example: DrawnExample, number: int) -> tuple[int, int]:
        """Returns the sort key of an example: its length, and its number with a minus sign."""
        return len(example.inputs if self._lengths[0] else example.targets), -number

    def _remove(self, index: int) -> DrawnExample:
        """Removes the candidate at an index of `_by_length`, and returns the example."""
        example = self._pending.pop(-self._by_length.pop(index)[1])
        epoch = example.member, example.epoch
        self._waiting[epoch] -= 1
        # If the removed example was the last pending one of its epoch, the examples of the next
        # epoch become candidates.
        if not self._waiting[epoch]:
            following = (i for i in self._pending.items() if (i[1].member, i[1].epoch - 1) == epoch)
            self._by_length += (self._key(example, number) for number, example in following)
            self._by_length.sort()
        return example


class LengthSorter:
    """Puts one example into each row, and gives the rows of a batch similar lengths.

    The examples of `GROUP` batches are drawn together. These examples are sorted by the number of
    their input tokens, or by the number of their target tokens if they have no inputs. Then the
    sorted list is cut into batches, whose order is random. All virtual shards use the same order,
    so that the short examples of all shards are in the same batches.

    Args:
      take: a function that takes a number n and returns the next n examples.
      rows: the number of rows that this shard contributes to a batch.
      seed: the seed of the order of the batches. The seed must be the same for all shards.
    """

    def __init__(self, take: Callable[[int], list[DrawnExample]], *, rows: int, seed: int):
        self._take, self._rows = take, rows
        self._seed = np.random.SeedSequence(seed, spawn_key=(2**32 - 1,))
        self.restore([])

    @property
    def pending(self) -> list[DrawnExample]:
        """The examples that were taken but are not in a row yet, in the order of their rows."""
        return list(self._pending)

    def restore(self, pending: Sequence[DrawnExample], *, draws: int = 0) -> None:
        """Replaces the pending examples by a list that the property `pending` returned.

        Args:
          pending: the examples.
          draws: the number of examples that have been taken so far. This number determines which
            group of batches is the current one.
        """
        self._group = draws // (GROUP * self._rows)
        self._pending = collections.deque(pending)

    def next_row(self) -> list[DrawnExample]:
        """Returns the next row, which is a list of one example."""
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
    """Returns the first bucket into which all rows fit.

    Args:
      rows: rows with one example each.
      buckets: pairs of an input length and a target length in tokens, in ascending order. All rows
        must fit into the last bucket.

    Returns:
      The input length and the target length of the batch, in tokens.
    """
    examples = [row[0] for row in rows]
    inputs = max(len(example.inputs) for example in examples)
    targets = max(len(example.targets) for example in examples)
    return next(bucket for bucket in buckets if inputs <= bucket[0] and targets <= bucket[1])


def batch_fields(
    config: DataConfig, *, lengths: tuple[int, int] | None = None
) -> dict[str, np.ndarray]:
    """Returns the fields of a training batch that contains only padding.

    The trainer derives the shapes and dtypes of a training batch from these fields. The arrays are
    broadcast views of a single row, so they take almost no memory. A batch has these fields:

    - ``encoder_input_tokens``: int32 token ids ``[rows, inputs_length]``. For tasks without inputs,
      ``inputs_length`` is 0.
    - ``decoder_input_tokens``: int32 token ids ``[rows, targets_length]``, the targets shifted
      right by one position.
    - ``decoder_target_tokens``: int32 token ids ``[rows, targets_length]``.
    - ``decoder_loss_weights``: float32 ``[rows, targets_length]``. The weight is 0 at padding and
      at targets that an objective leaves out, and 1 elsewhere.
    - ``encoder_segment_ids`` and ``decoder_segment_ids``: int32 segment ids, with the shapes of the
      inputs and of the targets. Only batches of packed rows have these two fields. The examples of
      a row have the segment ids 1, 2, …, and padding has the segment id 0.

    Args:
      config: the lengths, the batch size, and whether rows are packed.
      lengths: the input length and the target length of a row in tokens, or `None` for the full
        lengths in `config`.
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
    """Returns a batch of rows, each of which holds the tokens of its examples one after another.

    Args:
      rows: the examples of every row. A row without examples contains only padding.
      config: the lengths, whether rows are packed, and the classes.
      lengths: the input length and the target length of a row in tokens, or `None` for the full
        lengths in `config`.
      ids: the special ids of the model, of which the padding id and the start id are used.

    Returns:
      The fields that `batch_fields` describes, with one row for each entry of `rows`.
    """
    inputs, targets = lengths or (config.inputs_length, config.targets_length)
    pad = ids.padding
    encoder_tokens, encoder_segments = _lay_out(
        [[e.inputs for e in row] for row in rows], inputs, pad
    )
    target_tokens, target_segments = _lay_out(
        [[e.targets for e in row] for row in rows], targets, pad
    )

    decoder_inputs = np.where(target_segments > 0, ids.start, pad).astype(np.int32)
    # A position continues an example if the previous position has the same segment id. At the first
    # position of every example, the decoder reads the start id. At padding, the decoder reads the
    # padding id.
    continues = target_segments[:, 1:] == target_segments[:, :-1]
    decoder_inputs[:, 1:] = np.where(continues, target_tokens[:, :-1], decoder_inputs[:, 1:])

    # The index of a class can be equal to the padding id. If there are classes, the segment ids
    # therefore decide which targets are padding.
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


def _lay_out(
    rows: Sequence[Sequence[np.ndarray]], width: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Puts the sequences of every row one after another, and fills the rest with padding.

    Args:
      rows: the sequences of token ids of every row.
      width: the number of tokens of a row.
      pad: the id of padding.

    Returns:
      The token ids and the segment ids, both int32 with the shape ``[len(rows), width]``. The
      segment id of a token is the position of its sequence in the row, counted from 1. The segment
      id of padding is 0.
    """
    padding = np.full(width, pad, np.int32)
    # Concatenate all rows into one long array. The reshape at the end divides the array into rows.
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
