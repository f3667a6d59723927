"""Training batches from a mixture's tasks, in an order that can be saved, restored and split over hosts.

The stream consists of V virtual shards. Each shard draws a task by its rate, then that task's next
example for the shard, and the batch takes B/V rows of each shard in order. The order of examples is
therefore the same on any number of hosts. Examples are drawn by counters (`task_streams.ExampleStream`),
so that a position is a few exact numbers and the examples that wait for a row.
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
from synthesizer_jax.data.batch import GROUP, WINDOW, LengthSorter, Packer, assemble_batch, smallest_bucket
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import ExampleFormat, Objective
from synthesizer_jax.data.prepared import PreparedExamples
from synthesizer_jax.data.segments import SegmentStream
from synthesizer_jax.data.task_streams import CHUNK, DrawnExample, ExampleStream, random_bits
from synthesizer_jax.data.vocabularies import Classes, Vocabulary

STREAM_FILE = "stream.json"

DEPTH = 2
"""Number of batches that are made ahead."""

TaskStream: TypeAlias = ExampleStream | SegmentStream

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(DataConfig)}

Position: TypeAlias = dict[int, dict[str, Any]]
"""The positions of virtual shards by their indices."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A task that a stream draws from.

    Attributes:
      rate: its rate, relative to those of the other members.
      examples: its prepared examples.
      objective: what makes examples of its rows, which are documents then; None: they are examples.
    """

    rate: float
    examples: PreparedExamples
    objective: Objective | None = None


class VirtualShard:
    """One of a fixed number of slices of the data order: draws a task by its rate, then its next example.

    Attributes:
      rows: gives the examples of one row after another.
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
        cumulative_rates = np.cumsum(rates, dtype=np.float64)
        self._boundaries = cumulative_rates[:-1] / cumulative_rates[-1]
        self._num_draws, self._block = 0, -1
        self.rows: Packer | LengthSorter
        if config.buckets:
            rows = config.batch_size // config.shards
            self.rows = LengthSorter(self._take, rows=rows, seed=config.seed)
        else:
            self.rows = Packer(
                self._take,
                (config.inputs_length, config.targets_length),
                max_segments=config.segments_per_row,
                window=WINDOW if config.pack else 1,  # 1: a row is an example
            )

    def position(self) -> dict[str, Any]:
        """Returns the position after the last row: draws, that of every task, and waiting examples."""
        members = [stream.position() for stream in self._streams]
        return {"draws": self._num_draws, "members": members, "pending": self.rows.pending}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continues after a position, whose token ids may be lists."""
        self._num_draws = position["draws"]
        for stream, member in zip(self._streams, position["members"], strict=True):
            stream.restore(member)
        pending = [
            DrawnExample(np.asarray(inputs, np.int32), np.asarray(targets, np.int32), *drawn)
            for inputs, targets, *drawn in position["pending"]
        ]
        self.rows.restore(pending, draws=self._num_draws)

    def _take(self, count: int) -> list[DrawnExample]:
        """Draws the next examples."""
        drawn = []
        for _ in range(count):
            block, offset = divmod(self._num_draws, CHUNK)
            if block != self._block:
                bits = random_bits(self._seed, block, count=CHUNK)
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
    """An endless iterator over batches whose position is that of the last batch taken.

    A batch is a dictionary of NumPy arrays ``[batch, length]``, see `batch_fields`.
    `tasks.splits.open_stream` makes a stream from a data directory.

    Args:
      config: what to read.
      members: the tasks by name, in SeqIO's order, on which the order of examples depends.
      vocabulary: of the token ids.
      ids: those of the model that reads the batches.
      shards: indices of the virtual shards that this process reads, in order; None is all of them.
        The batch then contains the rows of these shards only, and only their positions are
        restored (with buckets those of all shards).
      saved: indices of those shards whose positions this process saves; None is all that it reads.

    Raises:
      ValueError: a task has fewer examples than shards; no task has an objective, and
        `DataConfig.objective` is given; see also `Classes`.
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
        self._form = ExampleFormat(*lengths, vocabulary.vocab_size, ids)
        self._classes = Classes(config.classes, vocabulary) if config.classes else None
        if config.objective is not None and not any(m.objective for m in members.values()):
            raise ValueError(
                f"data.objective makes examples of texts without inputs, and {config.mixture!r} has no "
                "task of that kind; leave it out, or name another mixture"
            )
        self._read = list(range(config.shards) if shards is None else shards)
        # The shape of a batch with buckets depends on the rows of all shards.
        indices = range(config.shards) if config.buckets else self._read
        self._shards = {index: self._make_shard(index) for index in indices}
        self._saved = self._read if saved is None else list(saved)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows_per_shard = self.config.batch_size // self.config.shards
        rows = {
            index: [shard.rows.next_row() for _ in range(rows_per_shard)]
            for index, shard in self._shards.items()
        }
        lengths = None
        if self.config.buckets:
            every_row = itertools.chain.from_iterable(rows.values())
            lengths = smallest_bucket(every_row, self.config.shapes)
        of_batch = [row for index in self._read for row in rows[index]]
        return assemble_batch(of_batch, self.config, lengths=lengths, ids=self._form.ids)

    def position(self) -> Position:
        """Returns the position after the last batch, for `save`."""
        return {index: self._shards[index].position() for index in self._saved}

    def save(self, directory: pathlib.Path, position: Position | None = None) -> None:
        """Writes a position: ``stream.json``, and a separate file for every virtual shard.

        A shard that moves to another host needs only its own file. Among several processes the one that
        saves shard 0 writes ``stream.json``.

        Args:
          directory: where to.
          position: None: that after the last batch.
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

        Raises:
          ValueError: the position is that of another stream, or the file of a shard is missing.
        """
        saved = json.loads((directory / STREAM_FILE).read_text(encoding="utf-8"))
        current = self.fingerprint()
        # Earlier versions did not save the numbers of examples.
        omitted = _DEFAULTS | {k: v for k, v in current.items() if k.startswith("examples of ")}
        for key in sorted(saved.keys() | current.keys()):
            was, now = (x.get(key, omitted.get(key)) for x in (saved, current))
            if was != now:
                raise ValueError(
                    f"the saved data position belongs to another stream: {key} was {was} and is {now}; "
                    "restore what it was, or start a new run with this one's parameters: "
                    "'synthesizer-jax train RUN --workdir NEW'"
                )
        for index, shard in self._shards.items():
            path = self._shard_file(directory, index)
            if not path.is_file():
                raise ValueError(f"the saved data position lacks {path}; restore that file")
            shard.restore(json.loads(path.read_text(encoding="utf-8")))

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that must be equal for a saved position to be valid, as flat JSON.

        The checksums are those of the tasks' first records: they depend on vocabulary, data set and
        preprocessing. Fields with their default are left out, so that later versions may have more of them.
        """
        config = self.config
        settings: dict[str, object] = {
            name: value if isinstance(value, bool | int | str) else repr(value)
            for name, value in vars(config).items()
            if value != _DEFAULTS[name]
        }
        settings.pop("objective", None)  # that of every task is below
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
        return directory / f"shard-{index:05}-of-{self.config.shards:05}.json"

    def _make_shard(self, index: int) -> VirtualShard:
        config, members = self.config, self._members.values()
        shard, streams = (index, config.shards), list[TaskStream]()
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
    """The batches of a stream, made ahead by a thread; the position is that of the last batch taken.

    As a context manager it ends the thread.

    Args:
      stream: from now on used by this object alone.
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
        self._ahead = collections.deque[concurrent.futures.Future[tuple[dict[str, np.ndarray], Position]]]()
        self._position = stream.position()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __next__(self) -> dict[str, np.ndarray]:
        while len(self._ahead) <= DEPTH:
            self._ahead.append(self._thread.submit(lambda: (next(self._stream), self._stream.position())))
        batch, self._position = self._ahead.popleft().result()
        return batch

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position after the last batch that was taken; see `Stream.save`."""
        self._stream.save(directory, self._position)

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after a saved position, before a batch is taken; see `Stream.restore`."""
        self._stream.restore(directory)
        self._position = self._stream.position()
