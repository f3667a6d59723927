"""Endless streams of one task's examples for one virtual shard."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from synthesizer_jax.data.prepared import PreparedExamples

SIDES = ("inputs", "targets")
"""The features of a task that are read."""

CHUNK = 1024
"""Number of examples of a record; the first epoch is shuffled within such chunks."""

Example: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Token ids of the inputs and of the targets, both including EOS; a task may have no inputs."""


class DrawnExample(NamedTuple):
    """An example that was drawn from a mixture.

    Attributes:
      inputs: token ids with EOS; none of a task without inputs.
      targets: token ids with EOS.
      member: number of its task in the mixture.
      epoch: of its task, the first number of the stream's position.
    """

    inputs: np.ndarray
    targets: np.ndarray
    member: int
    epoch: int


class ExampleStream:
    """A shard of a task's examples, in a different order every epoch.

    Shard s of V holds the examples s, s + V, …. The first epoch is shuffled within chunks, so that it
    begins before the whole split is read; later epochs are shuffled globally, or, where examples are not
    held in memory, by chunks in random order and within them. Every epoch yields every example once. The
    order is a function of the seed, and the position consists of three numbers.

    Args:
      examples: all examples of the task.
      shard: index of the virtual shard and number of shards.
      seed: of the shuffling; None keeps the stored order.

    Raises:
      ValueError: there are fewer examples than shards.
    """

    def __init__(
        self, examples: PreparedExamples, *, shard: tuple[int, int], seed: np.random.SeedSequence | None
    ):
        self._examples, self._shard, self._seed = examples, shard, seed
        self.name = examples.name
        self.restore([0, 0, 0])
        if not self._order:
            raise ValueError(
                f"{examples.name} has {len(examples)} examples, fewer than shards={shard[1]}; set "
                f"data.shards to at most {max(1, len(examples))} or leave the task out"
            )

    def __next__(self) -> Example:
        while self._num_taken == len(self._order):
            if self._reads_chunks and (self._chunk + 1) * CHUNK < len(self._examples):
                self.restore([self._epoch, self._chunk + 1, 0])
            else:
                self.restore([self._epoch + 1, 0, 0])
        self._num_taken += 1
        return self._examples[self._order[self._num_taken - 1]]

    def position(self) -> list[int]:
        """Returns the epoch, the chunk and the number of examples taken from it."""
        return [self._epoch, self._chunk, self._num_taken]

    def restore(self, position: list[int]) -> None:
        """Continues at a position that `position` returned."""
        self._epoch, self._chunk, self._num_taken = position
        start, stop = 0, len(self._examples)
        if self._reads_chunks:
            stored = self._chunk  # its number in the files
            if self._epoch and self._seed is not None:
                count = -(-len(self._examples) // CHUNK)
                stored = int(_order_of_chunks(self._seed.entropy, self._epoch, count)[self._chunk])
            start = stored * CHUNK
            stop = min(start + CHUNK, stop)
        index, num_shards = self._shard
        order = np.arange(start + (index - start) % num_shards, stop, num_shards)
        if self._seed is not None:
            bits = random_bits(self._seed, self._epoch, self._chunk, count=len(order))
            order = order[np.argsort(bits, kind="stable")]
        self._order: list[int] = order.tolist()

    @property
    def _reads_chunks(self) -> bool:
        """Whether the examples of a chunk are used before those of the next."""
        return not self._epoch or not self._examples.is_resident


@functools.lru_cache(maxsize=64)
def _order_of_chunks(seed: int, epoch: int, count: int) -> np.ndarray:
    """Returns the order in which all shards read the chunks of an epoch."""
    bits = random_bits(np.random.SeedSequence(seed), epoch, count=count)
    return np.argsort(bits, kind="stable")


def random_bits(seed: np.random.SeedSequence, *place: int, count: int) -> np.ndarray:
    """Returns `count` random 64-bit integers that depend on the seed and on `place` alone.

    The numbers are the same in every version of NumPy.
    """
    key = (*seed.spawn_key, *place)
    child = np.random.SeedSequence(seed.entropy, spawn_key=key)
    return np.random.Philox(child).random_raw(count)
