"""Training batches from a mixture's tasks, in an order that can be saved, restored and split over hosts.

The stream consists of V virtual shards. Each shard draws a task by its rate, then that task's next
example for the shard, and the batch takes B/V rows of each shard in order. The order of examples is
therefore the same on any number of hosts. Examples are drawn by counters (`task_streams.ExampleStream`),
so that a position is a few exact numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from synthesizer_jax.data.batch import assemble_batch
from synthesizer_jax.data.bucketing import GROUP, smallest_bucket
from synthesizer_jax.data.classes import Classes, ClassExamples
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import ExampleFormat, Objective, SegmentStream
from synthesizer_jax.data.packing import WINDOW
from synthesizer_jax.data.prepared import PreparedExamples
from synthesizer_jax.data.task_streams import Examples, ExampleStream, TaskStream
from synthesizer_jax.data.virtual_shard import ShardPosition, VirtualShard
from synthesizer_jax.data.vocabularies import Vocabulary

STREAM_FILE = "stream.json"

Position: TypeAlias = dict[int, ShardPosition]
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


class OtherStreamError(ValueError):
    """The saved position belongs to another stream: other tasks, lengths, seed, shards, ..."""


class Stream:
    """An endless iterator over batches whose position is that of the last batch taken.

    A batch is a dictionary of NumPy arrays ``[batch, length]``: ``encoder_input_tokens``,
    ``decoder_input_tokens``, ``decoder_target_tokens`` (int32) and ``decoder_loss_weights``
    (float32); packed batches also have ``*_segment_ids`` (from 1; 0 is padding) and
    ``*_positions``. With `DataConfig.classes` the target is the class. `tasks.streams.open_stream` makes
    it from a data directory.

    Args:
      config: what to read.
      members: the tasks by name, in SeqIO's order, on which the order of examples depends.
      vocabulary: of the token ids.
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
        shards: Sequence[int] | None = None,
        saved: Sequence[int] | None = None,
    ):
        self.config, self._members = config, dict(members)
        self._vocabulary = vocabulary
        self._classes = Classes(config.classes, vocabulary) if config.classes else None
        if config.objective is not None and not any(m.objective for m in members.values()):
            raise ValueError(
                f"data.objective makes examples of texts without inputs, and {config.mixture!r} has no "
                "task of that kind; leave it out, or name another mixture"
            )
        own = range(config.shards) if shards is None else shards
        self._own = list(own)
        # The shape of a batch with buckets depends on the rows of all shards.
        indices = range(config.shards) if config.buckets else own
        self._shards = {index: self._make_shard(index) for index in indices}
        self._saved = self._own if saved is None else list(saved)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows_per_shard = self.config.batch_size // self.config.shards
        rows = {
            index: [shard.next_row() for _ in range(rows_per_shard)]
            for index, shard in self._shards.items()
        }
        lengths = None
        if self.config.buckets:
            every_row = itertools.chain.from_iterable(rows.values())
            lengths = smallest_bucket(every_row, self.config.shapes)
        own = [row for index in self._own for row in rows[index]]
        return assemble_batch(own, self.config, lengths=lengths)

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
            text = shard_position.to_json()
            self._shard_file(directory, index).write_text(text, encoding="utf-8")
        if 0 in self._saved:
            text = json.dumps(self.fingerprint(), indent=1)
            (directory / STREAM_FILE).write_text(text, encoding="utf-8")

    def restore(self, directory: pathlib.Path) -> None:
        """Continues after the last batch that was taken before `save`.

        Raises:
          OtherStreamError: the position is that of another stream.
          ValueError: the file of a shard is missing.
        """
        saved = json.loads((directory / STREAM_FILE).read_text(encoding="utf-8"))
        current = self.fingerprint()
        for key in sorted(saved.keys() | current.keys()):
            if saved.get(key) != current.get(key):
                raise OtherStreamError(
                    f"the saved data position belongs to another stream: {key} was "
                    f"{saved.get(key)} and is {current.get(key)}; restore the old value or start a "
                    "new run"
                )
        for index, shard in self._shards.items():
            shard.restore(self._shard_file(directory, index))

    def fingerprint(self) -> dict[str, object]:
        """Returns everything that must be equal for a saved position to be valid, as flat JSON.

        The checksums are those of the tasks' first records: they depend on vocabulary, data set and
        preprocessing. Fields that a configuration does not set are left out, so that later versions may
        have more of them.
        """
        config = self.config
        settings: dict[str, object] = {
            name: value if isinstance(value, bool | int | str) else repr(value)
            for name, value in vars(config).items()
            if value is not None and value != ()
        }
        settings.pop("objective", None)  # that of every task is below
        if config.buckets:
            settings["buckets"] = f"{config.buckets} in groups of {GROUP} batches"
        if config.pack:
            settings["packing"] = f"best fit among {WINDOW} examples, epoch by epoch"
        for name, member in self._members.items():
            settings[f"rate of {name}"] = member.rate
            settings[f"checksum of {name}"] = member.examples.checksum
            if member.objective:
                settings[f"objective of {name}"] = repr(member.objective)
        return settings

    def _shard_file(self, directory: pathlib.Path, index: int) -> pathlib.Path:
        return directory / f"shard-{index:05}-of-{self.config.shards:05}.json"

    def _make_shard(self, index: int) -> VirtualShard:
        members = {
            name: self._make_stream(member, index, number)
            for number, (name, member) in enumerate(self._members.items(), 1)
        }
        rates = {name: member.rate for name, member in self._members.items()}
        seed = np.random.SeedSequence(self.config.seed, spawn_key=(index, 0))
        return VirtualShard(members, self.config, rates=rates, seed=seed)

    def _make_stream(self, member: Member, index: int, number: int) -> TaskStream:
        """Returns a task's stream for a virtual shard.

        Args:
          member: the task.
          index: the virtual shard.
          number: the number of the task, from 1.
        """
        config, shard = self.config, (index, self.config.shards)
        seed = np.random.SeedSequence(config.seed, spawn_key=(index, number))
        examples: Examples = member.examples
        if member.objective is None:
            if self._classes is not None:
                examples = ClassExamples(examples, self._classes)
            return ExampleStream(examples, shard=shard, seed=seed if config.shuffle else None)
        return SegmentStream(
            examples,
            member.objective,
            ExampleFormat(config.inputs_length, config.targets_length, self._vocabulary.vocab_size),
            shard=shard,
            seed=seed,
            shuffle=config.shuffle,
        )
