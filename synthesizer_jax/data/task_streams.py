"""Defines endless streams of the examples of one task for one virtual shard."""

from __future__ import annotations

import functools

import numpy as np

from synthesizer_jax.data.examples import CHUNK, Example
from synthesizer_jax.data.prepared import PreparedExamples


class ExampleStream:
    """An endless stream of a virtual shard's examples, in a different order in every epoch.

    Shard s of V contains the examples s, s + V, s + 2V, …. Every epoch yields each of these
    examples once. The first epoch reads the chunks in stored order and shuffles the examples within
    each chunk. Training can therefore start before the whole split is read. Later epochs shuffle
    all examples together. If the examples are not held in memory, later epochs read the chunks in
    random order instead, and shuffle the examples within each chunk.

    The order is a function of the seed. The position consists of three numbers.

    Args:
      examples: all examples of the task.
      shard: the index of the virtual shard, and the number of shards.
      seed: the seed of the shuffling. `None` means that the stored order is kept.

    Raises:
      ValueError: if there are fewer examples than shards.
    """

    def __init__(
        self,
        examples: PreparedExamples,
        *,
        shard: tuple[int, int],
        seed: np.random.SeedSequence | None,
    ):
        self._examples, self._shard, self._seed = examples, shard, seed
        self.name = examples.name
        self.restore([0, 0, 0])
        if not self._order:
            raise ValueError(
                f"{examples.name} has {len(examples)} examples, fewer than data.shards "
                f"({shard[1]}). Set data.shards to at most {max(1, len(examples))}, or leave the "
                "task out."
            )

    def __next__(self) -> Example:
        """Returns the next example."""
        # The loop may run several times, because a chunk may contain no example of this shard.
        while self._num_taken == len(self._order):
            if self._reads_chunks and (self._chunk + 1) * CHUNK < len(self._examples):
                self.restore([self._epoch, self._chunk + 1, 0])
            else:
                self.restore([self._epoch + 1, 0, 0])
        self._num_taken += 1
        return self._examples[self._order[self._num_taken - 1]]

    def position(self) -> list[int]:
        """Returns the epoch, the chunk, and the number of examples taken from the chunk."""
        return [self._epoch, self._chunk, self._num_taken]

    def restore(self, position: list[int]) -> None:
        """Continues at a position that `position` returned."""
        self._epoch, self._chunk, self._num_taken = position
        start, stop = 0, len(self._examples)
        if self._reads_chunks:
            # The variable `stored` is the number of the chunk in the files. The first epoch reads
            # the chunks in this order.
            stored = self._chunk
            if self._epoch and self._seed is not None:
                count = -(-len(self._examples) // CHUNK)
                stored = int(_order_of_chunks(self._seed.entropy, self._epoch, count)[self._chunk])
            start = stored * CHUNK
            stop = min(start + CHUNK, stop)
        index, num_shards = self._shard
        # Find the indices of this shard's examples between `start` and `stop`.
        order = np.arange(start + (index - start) % num_shards, stop, num_shards)
        if self._seed is not None:
            bits = random_bits(self._seed, self._epoch, self._chunk, count=len(order))
            order = order[np.argsort(bits, kind="stable")]
        self._order: list[int] = order.tolist()

    @property
    def _reads_chunks(self) -> bool:
        """Whether all examples of a chunk are used before the examples of the next chunk."""
        return not self._epoch or not self._examples.is_resident


@functools.lru_cache(maxsize=64)
def _order_of_chunks(seed: int, epoch: int, count: int) -> np.ndarray:
    """Returns the order in which all shards read the chunks of the files in an epoch."""
    bits = random_bits(np.random.SeedSequence(seed), epoch, count=count)
    return np.argsort(bits, kind="stable")


def random_bits(seed: np.random.SeedSequence, *counters: int, count: int) -> np.ndarray:
    """Returns `count` random 64-bit integers that depend only on the seed and the counters.

    The numbers are the same in every version of NumPy.
    """
    key = (*seed.spawn_key, *counters)
    child = np.random.SeedSequence(seed.entropy, spawn_key=key)
    # NumPy guarantees the raw output of a bit generator. The methods of `Generator` may change.
    return np.random.Philox(child).random_raw(count)
