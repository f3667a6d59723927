"""Makes the training batches of a mixture from a stream whose position can be saved and restored.

A stream consists of V virtual shards. Each shard repeatedly draws a task in proportion to the
task's rate, and takes the shard's next example of this task. A batch of B rows contains B/V rows of
each shard, in the order of the shards. The order of examples is therefore the same for any number
of hosts.

All random numbers are functions of counters (see `task_streams.ExampleStream`). The position of a
shard therefore consists of a few integers and the examples that are not in a row yet.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.data.batch import (
    GROUP,
    WINDOW,
    LengthSorter,
    Packer,
    assemble_batch,
    smallest_bucket,
)
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.examples import CHUNK, DrawnExample
from synthesizer_jax.data.objectives import ExampleFormat, Objective
from synthesizer_jax.data.prepared import PreparedExamples
from synthesizer_jax.data.segments import SegmentStream
from synthesizer_jax.data.task_streams import ExampleStream, random_bits
from synthesizer_jax.data.vocabularies import Classes, Vocabulary

STREAM_FILE = "stream.json"
"""The name of a file in a saved position, which describes the stream of this position."""

DEPTH = 2
"""The number of batches that `PrefetchedStream` makes ahead."""

TaskStream: TypeAlias = ExampleStream | SegmentStream
"""An endless stream of the examples of one task for one virtual shard."""

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(DataConfig)}
"""The default of every field of `DataConfig`."""

Position: TypeAlias = dict[int, dict[str, Any]]
"""A mapping from the index of a virtual shard to its position."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A task from which a stream draws examples.

    Attributes:
      rate: the rate of the task, relative to the rates of the other members.
      examples: the prepared examples of the task.
      objective: the objective that makes examples of the task's documents. `None` means that
        `examples` are used as they are.
    """

    rate: float
    examples: PreparedExamples
    objective: Objective | None = None


class VirtualShard:
    """A virtual shard, which is one of a fixed number of slices of the data.

    The shard draws the task of every example in proportion to the task's rate.

    Args:
      streams: the streams of this shard, one for each task.
      rates: the relative rate of every task.
      config: the lengths, the batch size, and how examples are grouped into rows.
      seed: the seed for drawing tasks.
      classes: the classes whose indices replace the targets, or `None` if targets are sequences of
        tokens.

    Attributes:
      rows: the `Packer` or `LengthSorter` that groups the examples into rows.
    """

    def __init__(
        self,
        streams: Sequence[TaskStream],
        rates: Sequence[float],
        config: DataConfig,
        *,
        seed: np.random.SeedSequence,
        classes: Classes | None,
    ):
        self._streams, self._seed, self._classes = streams, seed, classes
        # The boundaries divide [0, 1) into one interval for each task. The interval that contains a
        # uniform random number selects the task.
        cumulative_rates = np.cumsum(rates, dtype=np.float64)
        self._boundaries = cumulative_rates[:-1] / cumulative_rates[-1]
        self._num_draws = 0
        # Tasks are drawn in blocks, and `_choices` holds the tasks of the current block. No block
        # is drawn yet.
        self._block = -1
        self.rows: Packer | LengthSorter
        if config.buckets:
            rows = config.batch_size // config.shards
            self.rows = LengthSorter(self._take, rows=rows, seed=config.seed)
        else:
            self.rows = Packer(
                self._take,
                (config.inputs_length, config.targets_length),
                max_segments=config.segments_per_row,
                # With only one example to choose from, the packer puts one example into each row.
                window=WINDOW if config.pack else 1,
            )

    def position(self) -> dict[str, Any]:
        """Returns the position after the last row.

        The position consists of the number of draws, the position of every task's stream, and the
        examples that are not in a row yet.
        """
        members = [stream.position() for stream in self._streams]
        return {"draws": self._num_draws, "members": members, "pending": self.rows.pending}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continues after a position that `position` returned.

        Token ids in the position may be lists instead of arrays.
        """
        self._num_draws = position["draws"]
        for stream, member in zip(self._streams, position["members"], strict=True):
            stream.restore(member)
        pending = [
            DrawnExample(np.asarray(inputs, np.int32), np.asarray(targets, np.int32), *drawn)
            for inputs, targets, *drawn in position["pending"]
        ]
        self.rows.restore(pending, draws=self._num_draws)

    def _take(self, count: int) -> list[DrawnExample]:
        """Draws the next `count` examples."""
        drawn = []
        for _ in range(count):
            block, offset = divmod(self._num_draws, CHUNK)
            # Drawing the tasks of a whole block at once is faster than drawing them one by one.
            if block != self._block:
                bits = random_bits(self._seed, block, count=CHUNK)
                # The upper 53 bits of each number give a float64 in [0, 1).
                uniform = (bits >> np.uint64(11)) * 2.0**-53
                self._block = block
                self._choices = np.searchsorted(self._boundaries, uniform, side="right").tolist()
            self._num_draws += 1
            member = self._choices[offset]
            stream = self._streams[member]
            inputs, targets = next(stream)
            if self._classes is not None:
                targets = np.array([self._classes.index(targets, owner=stream.name)], np.int32)
            drawn.append(DrawnExample(inputs, targets, member, stream.position()[0]))
        return drawn


class Stream:
    """An endless iterator over the batches of a mixture, which can save and restore its position.

    A batch is a dictionary of NumPy arrays ``[batch, length]`` (see `batch_fields`). Use
    `tasks.splits.open_stream` to make a stream from a data directory.

    Args:
      config: the lengths, the batch size, and how examples are drawn and grouped.
      members: the tasks by name. The order of examples depends on the order of this mapping.
        `open_stream` sorts the mapping by name, as SeqIO does.
      vocabulary: the vocabulary of the token ids.
      ids: the special ids of the model that reads the batches.
      shards: the indices of the virtual shards that this process reads, in order. `None` means all
        shards. If shards are given, a batch contains only the rows of these shards, and only their
        positions are restored. If the configuration has buckets, the positions of all shards are
        restored.
      saved: the indices of the shards whose positions this process saves. `None` means all shards
        that this process reads.

    Raises:
      ValueError: if a task has fewer examples than there are shards, or if `DataConfig.objective`
        is set and no task uses an objective. See also `Classes`.
    """

    def __init__(
        self,
        config: DataConfig,
        members: Mapping[str, Member],
        *,
        vocabulary: Vocabulary,
        ids: SpecialIds = T5_IDS,
        shards: Sequence[int] | None = None,
        saved: Sequence[int] | None = None,
    ):
        self.config, self._members = config, dict(members)
        lengths = config.inputs_length, config.targets_length
        size = vocabulary.vocab_size
        if any(member.objective for member in members.values()):
            size = vocabulary.first_sentinel + 1
        self._form = ExampleFormat(*lengths, size, ids)
        self._classes = Classes(config.classes, vocabulary) if config.classes else None
        if config.objective is not None and not any(m.objective for m in members.values()):
            raise ValueError(
                f"data.objective makes examples of texts without inputs, but {config.mixture!r} "
                "has no such task. Leave it out, or choose another data.mixture."
            )
        self._read = list(range(config.shards) if shards is None else shards)
        # With buckets, the shape of a batch depends on the rows of all shards. Every process must
        # find the same shape, so every process draws the rows of all shards.
        indices = range(config.shards) if config.buckets else self._read
        self._shards = {index: self._make_shard(index) for index in indices}
        self._saved = self._read if saved is None else list(saved)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns the next batch."""
        rows_per_shard = self.config.batch_size // self.config.shards
        rows = {
            index: [shard.rows.next_row() for _ in range(rows_per_shard)]
            for index, shard in self._shards.items()
        }
        lengths = None
        if self.config.buckets:
            every_row = itertools.chain.from_iterable(rows.values())
            lengths = smallest_bucket(every_row, self.config.shapes)
        # The batch of this process contains only the rows of its own shards.
        own_rows = [row for index in self._read for row in rows[index]]
        return assemble_batch(own_rows, self.config, lengths=lengths, ids=self._form.ids)

    def position(self) -> Position:
        """Returns the position after the last batch. The position can be passed to `save`."""
        return {index: self._shards[index].position() for index in self._saved}

    def save(self, directory: pathlib.Path, position: Position | None = None) -> None:
        """Writes a position as ``stream.json`` and a separate file for every virtual shard.

        A process that takes over a shard from another host needs only the file of this shard. If
        there are several processes, the one that saves shard 0 writes ``stream.json``.

        Args:
          directory: the directory to write to. The directory is created if necessary.
          position: the position to write, or `None` for the position after the last batch.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for index, shard_position in (self.position() if position is None else position).items():
            text = json.dumps(shard_position, default=np.ndarray.tolist)
            self._shard_file(directory, index).write_text(text, encoding="utf-8")
        if 0 in self._saved:
            text = json.dumps(self.fingerprint(), indent=1)
            (directory / STREAM_FILE).write_text(text, encoding="utf-8")

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after the last batch that was taken before `save`.

        Args:
          directory: the directory that `save` has written.

        Raises:
          ValueError: if the position belongs to a different stream, or the file of a shard is
            missing.
        """
        saved = json.loads((directory / STREAM_FILE).read_text(encoding="utf-8"))
        current = self.fingerprint()
        # If a field is missing in the saved or in the current settings, the field has its default
        # there. Earlier versions did not save the numbers of examples. A missing number of examples
        # is therefore taken from the current settings.
        omitted = _DEFAULTS | {k: v for k, v in current.items() if k.startswith("examples of ")}
        for key in sorted(saved.keys() | current.keys()):
            was = saved.get(key, omitted.get(key))
            now = current.get(key, omitted.get(key))
            if was != now:
                raise ValueError(
                    f"The saved data position belongs to another stream: {key} was {was} and is "
                    f"now {now}. Restore the old value, or start a new run from the parameters of "
                    "this run with 'synthesizer-jax train RUN --workdir NEW'."
                )
        for index, shard in self._shards.items():
            path = self._shard_file(directory, index)
            if not path.is_file():
                raise ValueError(f"The saved data position lacks {path}. Restore that file.")
            shard.restore(json.loads(path.read_text(encoding="utf-8")))

    def fingerprint(self) -> dict[str, object]:
        """Returns the settings on which the meaning of a position depends, as flat JSON.

        A saved position is valid only if these settings have not changed. The checksum of a task is
        the checksum of its first record. The checksum depends on the vocabulary, the data set and
        the preprocessing. Fields of `DataConfig` that have their defaults are omitted. Later
        versions can therefore add fields and still restore earlier positions.
        """
        config = self.config
        settings: dict[str, object] = {
            name: value if isinstance(value, bool | int | str) else repr(value)
            for name, value in vars(config).items()
            if value != _DEFAULTS[name]
        }
        # The setting `objective` is replaced below by the objective that each task uses.
        settings.pop("objective", None)
        if config.buckets:
            settings["buckets"] = f"{config.buckets} in groups of {GROUP} batches"
        if config.pack:
            settings["packing"] = f"best fit among {WINDOW} examples, epoch by epoch"
        for name, member in self._members.items():
            settings[f"rate of {name}"] = member.rate
            settings[f"examples of {name}"] = len(member.examples)
            settings[f"checksum of {name}"] = member.examples.info.checksum
            if member.objective:
                settings[f"objective of {name}"] = repr(member.objective)
        return settings

    def _shard_file(self, directory: pathlib.Path, index: int) -> pathlib.Path:
        """Returns the path of the file with the position of a virtual shard."""
        return directory / f"shard-{index:05}-of-{self.config.shards:05}.json"

    def _make_shard(self, index: int) -> VirtualShard:
        """Returns a virtual shard, which has its own stream of every task."""
        config = self.config
        members = self._members.values()
        shard = (index, config.shards)
        streams: list[TaskStream] = []
        # The seeds of the tasks are numbered from 1, because the shard uses seed 0 to choose tasks.
        for number, member in enumerate(members, 1):
            seed = np.random.SeedSequence(config.seed, spawn_key=(index, number))
            examples, objective = member.examples, member.objective
            stream: TaskStream
            if objective is None:
                stream = ExampleStream(examples, shard=shard, seed=seed if config.shuffle else None)
            else:
                stream = SegmentStream(
                    examples, objective, self._form, shard=shard, seed=seed, shuffle=config.shuffle
                )
            streams.append(stream)
        return VirtualShard(
            streams,
            [member.rate for member in members],
            config,
            seed=np.random.SeedSequence(config.seed, spawn_key=(index, 0)),
            classes=self._classes,
        )


class PrefetchedStream(contextlib.AbstractContextManager["PrefetchedStream"]):
    """Makes the batches of a stream in a background thread before they are needed.

    The saved position is the position after the last batch that was taken. Batches that were made
    but not taken are not counted. Use the stream as a context manager, so that the thread stops at
    the end.

    Args:
      stream: the stream. The caller must not use the stream after passing it.
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
        self._ahead = collections.deque[
            concurrent.futures.Future[tuple[dict[str, np.ndarray], Position]]
        ]()
        self._position = stream.position()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns the next batch, while the thread prepares the `DEPTH` batches after it."""
        while len(self._ahead) <= DEPTH:
            self._ahead.append(
                self._thread.submit(lambda: (next(self._stream), self._stream.position()))
            )
        batch, self._position = self._ahead.popleft().result()
        return batch

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position after the last batch that was taken (see `Stream.save`)."""
        self._stream.save(directory, self._position)

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after a saved position (see `Stream.restore`).

        This method must be called before the first batch is taken.
        """
        self._stream.restore(directory)
        self._position = self._stream.position()
