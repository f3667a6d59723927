"""A virtual shard: one of a fixed number of parts of the data's order, whatever the number of hosts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.data.bucketing import LengthSorter
from synthesizer_jax.data.packing import WINDOW, Packer
from synthesizer_jax.data.task_streams import CHUNK, DrawnExample, TaskStream, random_bits

if TYPE_CHECKING:
    from synthesizer_jax.data.config import DataConfig


@dataclasses.dataclass(frozen=True)
class ShardPosition:
    """The position of a virtual shard.

    Attributes:
      draws: number of drawn tasks.
      members: the position of every task's stream by name.
      pending: examples that were drawn and are in no row yet, oldest first.
    """

    draws: int
    members: dict[str, list[int]]
    pending: list[DrawnExample]

    def to_json(self) -> str:
        """Returns the contents of the shard's file."""
        pending = [
            [e.member, e.epoch, e.number]
            if e.number is not None
            else [e.member, e.epoch, e.inputs.tolist(), e.targets.tolist()]
            for e in self.pending
        ]
        return json.dumps({"draws": self.draws, "members": self.members, "pending": pending})


class VirtualShard:
    """One virtual shard: draws its next task by the rates, and makes rows of examples.

    Args:
      members: task streams by task name.
      config: lengths, packing and buckets.
      rates: relative rates by task name.
      seed: of the draws.
    """

    def __init__(
        self,
        members: dict[str, TaskStream],
        config: DataConfig,
        *,
        rates: Mapping[str, float],
        seed: np.random.SeedSequence,
    ):
        self._streams, self._seed = list(members.values()), seed
        self._names = list(members)
        cumulative_rates = np.cumsum([rates[name] for name in self._names], dtype=np.float64)
        self._boundaries = cumulative_rates[:-1] / cumulative_rates[-1]
        self._num_draws, self._block = 0, -1
        self._rows: Packer | LengthSorter
        if config.buckets:
            rows = config.batch_size // config.shards
            self._rows = LengthSorter(self.take, rows=rows, seed=config.seed)
        else:
            self._rows = Packer(
                self.take,
                (config.inputs_length, config.targets_length),
                max_segments=config.segments_per_row,
                window=WINDOW if config.pack else 1,
            )

    def take(self, count: int) -> list[DrawnExample]:
        """Draws the next examples."""
        drawn = []
        for _ in range(count):
            block, offset = divmod(self._num_draws, CHUNK)
            if block != self._block:
                self._block = block
                self._choices = _draw_members(self._boundaries, self._seed, block)
            self._num_draws += 1
            member = self._choices[offset]
            stream = self._streams[member]
            inputs, targets = next(stream)
            epoch = stream.position()[0]
            drawn.append(DrawnExample(inputs, targets, member, stream.index, epoch))
        return drawn

    def next_row(self) -> list[DrawnExample]:
        """Returns the examples of the next row."""
        return self._rows.next_row()

    def position(self) -> ShardPosition:
        """Returns the position after the last row."""
        members = {n: s.position() for n, s in zip(self._names, self._streams, strict=True)}
        return ShardPosition(self._num_draws, members, self._rows.pending)

    def restore(self, path: pathlib.Path) -> None:
        """Continues with the example after the position whose JSON is in a file."""
        if not path.is_file():
            raise ValueError(f"the saved data position lacks {path}; restore that file")
        position = json.loads(path.read_text(encoding="utf-8"))
        self._num_draws = position["draws"]
        for name, stream in zip(self._names, self._streams, strict=True):
            stream.restore(position["members"][name])
        pending = [self._recall(*entry) for entry in position["pending"] or ()]
        self._rows.restore(pending, draws=self._num_draws)

    def _recall(self, member: int, epoch: int, *saved: int | list[int]) -> DrawnExample:
        """Returns a pending example from its index, or from its inputs and targets."""
        if isinstance(saved[0], int):
            return DrawnExample(*self._streams[member].recall(saved[0]), member, saved[0], epoch)
        inputs, targets = (np.asarray(ids, np.int32) for ids in saved)
        return DrawnExample(inputs, targets, member, None, epoch)


def _draw_members(boundaries: np.ndarray, seed: np.random.SeedSequence, block: int) -> list[int]:
    """Returns the member indices of one block of draws.

    Args:
      boundaries: cumulative rates in (0, 1) that separate the members.
      seed: of the draws.
      block: index of the block of `CHUNK` draws.
    """
    uniform = (random_bits(seed, block, count=CHUNK) >> np.uint64(11)) * 2.0**-53
    choices: list[int] = np.searchsorted(boundaries, uniform, side="right").tolist()
    return choices
