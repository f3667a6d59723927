"""Endless streams of one task's examples for one virtual shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

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
      number: its index among the task's examples; None: it cannot be read again.
      epoch: of its task, the first number of the stream's position; 0 where that is none.
    """

    inputs: np.ndarray
    targets: np.ndarray
    member: int
    number: int | None
    epoch: int = 0


class Examples(Protocol):
    """A task's examples by index, in stored order; they may be shared between threads.

    Attributes:
      name: of the task and its split, for messages.
      is_resident: whether all examples may be held in memory; otherwise it is fast to read those of a
        chunk together.
    """

    name: str
    is_resident: bool

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, index: int) -> Example:
        """Returns an example."""
        ...


class TaskStream(Protocol):
    """An endless iterator over a task's examples with an exact position.

    Attributes:
      index: index of the example that was returned last; None: it cannot be read again by its index.
    """

    index: int | None

    def __next__(self) -> Example:
        """Returns the next example."""
        ...

    def recall(self, index: int) -> Example:
        """Returns the example with that `index`."""
        ...

    def position(self) -> list[int]:
        """Returns the position, epoch first."""
        ...

    def restore(self, position: list[int]) -> None:
        """Continues at a position that `position` returned."""
        ...


def check_inputs(name: str, lengths: Mapping[str, int]) -> None:
    """Raises a `ValueError` if a task that has inputs is read without them.

    Args:
      name: of the task.
      lengths: the maximum numbers of ``inputs`` and ``targets``.
    """
    if not lengths["inputs"]:
        raise ValueError(
            f"{name} has inputs, and inputs_length is 0; set data.inputs_length to a positive number, or "
            "read a task that has targets only"
        )


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
        self, examples: Examples, *, shard: tuple[int, int], seed: np.random.SeedSequence | None
    ):
        self._examples, self._shard, self._seed = examples, shard, seed
        self.index: int | None = None
        self._chunks_of = 0
        self._seek(0, 0, 0)
        if not self._order:
            raise ValueError(
                f"{examples.name} has {len(examples)} examples, fewer than shards={shard[1]}; set "
                f"data.shards to at most {max(1, len(examples))} or leave the task out"
            )

    def __next__(self) -> Example:
        while self._num_taken == len(self._order):
            more = self._reads_chunks and (self._chunk + 1) * CHUNK < len(self._examples)
            if more:
                self._seek(self._epoch, self._chunk + 1, 0)
            else:
                self._seek(self._epoch + 1, 0, 0)
        self.index = self._order[self._num_taken]
        self._num_taken += 1
        return self._examples[self.index]

    def recall(self, index: int) -> Example:
        """Returns the example with that index."""
        return self._examples[index]

    def position(self) -> list[int]:
        """Returns the epoch, the chunk and the number of examples taken from it."""
        return [self._epoch, self._chunk, self._num_taken]

    def restore(self, position: list[int]) -> None:
        """Continues at a position that `position` returned."""
        self._seek(*position)

    def _seek(self, epoch: int, chunk: int, num_taken: int) -> None:
        self._epoch, self._chunk, self._num_taken = epoch, chunk, num_taken
        start, stop = 0, len(self._examples)
        if self._reads_chunks:
            start = self._chunk_number(epoch, chunk) * CHUNK
            stop = min(start + CHUNK, stop)
        index, num_shards = self._shard
        order = np.arange(start + (index - start) % num_shards, stop, num_shards)
        if self._seed is not None:
            bits = random_bits(self._seed, epoch, chunk, count=len(order))
            order = order[np.argsort(bits, kind="stable")]
        self._order: list[int] = order.tolist()

    @property
    def _reads_chunks(self) -> bool:
        """Whether the examples of a chunk are used before those of the next."""
        return not self._epoch or not self._examples.is_resident

    def _chunk_number(self, epoch: int, chunk: int) -> int:
        """Returns which chunk is read as the one of that number in an epoch, the same for all shards."""
        if not epoch or self._seed is None:
            return chunk
        if self._chunks_of != epoch:
            common = np.random.SeedSequence(self._seed.entropy)
            count = -(-len(self._examples) // CHUNK)
            bits = random_bits(common, epoch, count=count)
            self._chunks_of, self._chunk_order = epoch, np.argsort(bits, kind="stable")
        return int(self._chunk_order[chunk])


def random_bits(seed: np.random.SeedSequence, *place: int, count: int) -> np.ndarray:
    """Returns `count` random 64-bit integers that depend on the seed and on `place` alone.

    The numbers are the same in every version of NumPy.
    """
    key = (*seed.spawn_key, *place)
    child = np.random.SeedSequence(seed.entropy, spawn_key=key)
    return np.random.Philox(child).random_raw(count)
