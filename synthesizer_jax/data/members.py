"""Endless streams of one task's examples for one virtual shard."""

from __future__ import annotations

import abc
import functools
import pathlib
import threading
import zlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

RESIDENT = 2_000_000
"""Tasks with more examples than this are not held in memory."""

SIDES = ("inputs", "targets")
"""The features of a task that are read."""

CHUNK = 1024
"""Number of examples that are read at once; the first epoch is shuffled within such chunks."""

Example = tuple[np.ndarray, np.ndarray]
"""Token ids of the inputs and of the targets, both including EOS; a task may have no inputs."""


class Drawn(NamedTuple):
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


class TaskStream(Protocol):
    """An endless iterator over a task's examples whose position can be saved."""

    @property
    def index(self) -> int | None:
        """Index of the example that was returned last; None: `recall` cannot return it again."""
        ...

    def __next__(self) -> Example:
        """Returns the next example."""
        ...

    def recall(self, index: int) -> Example:
        """Returns the example with that `index`."""
        ...

    def position(self) -> list[int] | None:
        """Returns the position as numbers, epoch first; None: only `save` can express it, as files."""
        ...

    def save(self, prefix: pathlib.Path) -> None:
        """Writes a position that is not expressed by numbers to files that begin with `prefix`."""
        ...

    def restore(self, prefix: pathlib.Path, position: list[int] | None) -> None:
        """Continues with the example after the saved position."""
        ...


class Ragged(NamedTuple):
    """Sequences of token ids, one after another: sequence i is ``ids[ends[i]:ends[i + 1]]``."""

    ids: np.ndarray
    ends: np.ndarray


class Chunk:
    """At most `CHUNK` consecutive examples of a task.

    Args:
      inputs: their inputs.
      targets: their targets.
    """

    def __init__(self, inputs: Ragged, targets: Ragged):
        self.inputs, self.targets = inputs, targets
        # Slicing with Python's integers takes a third of the time that it takes with NumPy's.
        self._input_ends, self._target_ends = inputs.ends.tolist(), targets.ends.tolist()

    def __len__(self) -> int:
        return len(self._input_ends) - 1

    def __getitem__(self, index: int) -> Example:
        starts, ends = self._input_ends, self._target_ends
        return (
            self.inputs.ids[starts[index] : starts[index + 1]],
            self.targets.ids[ends[index] : ends[index + 1]],
        )


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


class Examples(abc.ABC):
    """A task's examples in stored order, which are held in memory as far as they have been read.

    Instances may be shared between threads.

    Args:
      name: of the task and its split, for messages.

    Attributes:
      is_resident: whether all examples may be held in memory; otherwise it is fast to read those of a
        chunk together.
    """

    is_resident = True

    def __init__(self, name: str):
        self.name = name
        self._chunks: dict[int, Chunk] = {}
        self._lock = threading.Lock()

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples; it may have to read all of them."""

    @abc.abstractmethod
    def read_until(self, index: int) -> bool:
        """Reads as far as is needed to tell whether the split has example `index`, and tells it."""

    def __getitem__(self, index: int) -> Example:
        number, offset = divmod(index, CHUNK)
        chunk = self._chunks.get(number)
        return (self._read_chunk(index) if chunk is None else chunk)[offset]

    def _read_chunk(self, index: int) -> Chunk:
        """Returns the chunk that holds an example.

        Raises:
          IndexError: there is no such example.
        """
        if not self.read_until(index):
            raise IndexError(index)
        return self._chunks[index // CHUNK]

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the first chunk; it depends on vocabulary, data set and preprocessing."""
        chunk = self._chunks.get(0) or self._read_chunk(0)
        arrays = (*chunk.inputs, *chunk.targets)
        return functools.reduce(lambda crc, array: zlib.crc32(array.tobytes(), crc), arrays, 0)


class InMemoryTaskStream:
    """A shard of examples in memory, in a different order every epoch.

    Shard s of V holds the examples s, s + V, …. The first epoch is shuffled within chunks, so that
    no one waits for the whole split to be tokenized; later epochs are shuffled globally, or, where
    examples are not held in memory, by chunks in random order and within them. Every epoch yields
    every example once. The order is a function of the seed, and the position consists of three
    numbers.

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
            more = self._reads_chunks and self._examples.read_until((self._chunk + 1) * CHUNK)
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

    def save(self, prefix: pathlib.Path) -> None:
        """Does nothing: `position` is exact."""

    def restore(self, prefix: pathlib.Path, position: list[int] | None) -> None:
        """Continues at a position that `position` returned."""
        del prefix
        assert position is not None
        self._seek(*position)

    def _seek(self, epoch: int, chunk: int, num_taken: int) -> None:
        self._epoch, self._chunk, self._num_taken = epoch, chunk, num_taken
        start, stop = 0, len(self._examples) if epoch else CHUNK
        if self._reads_chunks:
            start = self._chunk_number(epoch, chunk) * CHUNK
            stop = start + CHUNK
        if not self._examples.read_until(stop - 1):
            stop = len(self._examples)
        index, num_shards = self._shard
        order = np.arange(start + (index - start) % num_shards, stop, num_shards)
        if self._seed is not None:
            order = order[
                np.argsort(random_bits(self._seed, epoch, chunk, count=len(order)), kind="stable")
            ]
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
