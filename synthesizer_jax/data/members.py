"""One task's endless examples for one virtual shard: from memory, or live from SeqIO."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from synthesizer_jax.data.stored import reading
from synthesizer_jax.files import storage_path

CHUNK = 1024
"""Examples that are read at once, and among which the first epoch is shuffled."""

RESIDENT = 2_000_000
"""Tasks with more stored rows than this are not held in memory."""

Example = tuple[np.ndarray, np.ndarray]
"""Token ids of the inputs and of the targets, both with EOS."""


class Member(Protocol):
    """An endless iterator of a task's examples whose position can be saved."""

    def __next__(self) -> Example:
        """The next example."""
        ...

    def save(self, prefix: pathlib.Path) -> list[int] | None:
        """The position as numbers; what is no number goes into files that begin with `prefix`."""
        ...

    def restore(self, prefix: pathlib.Path, position: list[int] | None) -> None:
        """Continues with the example after the saved position."""
        ...


class Examples:
    """A task's finished examples in stored order, tokenised once and only as far as needed.

    Threads may share it.

    Args:
      task: a SeqIO task.
      split: its split.
      lengths: SeqIO's feature lengths; longer examples are cut.
    """

    def __init__(self, task: Any, split: str, lengths: Mapping[str, int]):
        tensorflow()
        self.name = f"{task.name}'s split {split!r}"
        self._place = place(task)
        with reading(self.name, self._place):
            dataset = task.get_dataset(
                lengths, split=split, shuffle=False, num_epochs=1, seed=0, try_in_mem_cache=False
            )
        dataset = dataset.map(lambda row: (row["inputs"], row["targets"])).ragged_batch(CHUNK)
        self._source: Iterator[Any] = iter(dataset.prefetch(1).with_options(options()))
        self._chunks: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self._count = 0
        self._whole = False
        self._lock = threading.Lock()
        self.reach(0)

    def __len__(self) -> int:
        while self.reach(self._count):
            pass
        return self._count

    def __getitem__(self, index: int) -> Example:
        if not self.reach(index):
            raise IndexError(index)
        chunk, place = divmod(index, CHUNK)
        inputs, targets = (ids[ends[place] : ends[place + 1]] for ids, ends in self._chunks[chunk])
        return inputs, targets

    def reach(self, index: int) -> bool:
        """Reads on until example `index` is there; False if the split ends before."""
        while index >= self._count and not self._whole:
            with self._lock:
                self._read()
        return index < self._count

    def _read(self) -> None:
        with reading(self.name, self._place):
            ragged = next(self._source, None)
        if ragged is None:
            self._whole, self._source = True, iter(())
            return
        self._chunks.append([(r.values.numpy(), r.row_splits.numpy()) for r in ragged])
        self._count += len(self._chunks[-1][0][1]) - 1

    @functools.cached_property
    def checksum(self) -> int:
        """Of the first examples: another vocabulary, data set or preprocessing changes it."""
        parts = [part for ids, ends in self._chunks[0] for part in (ids, ends)]
        return functools.reduce(lambda crc, part: zlib.crc32(part.tobytes(), crc), parts, 0)


_read_already: weakref.WeakKeyDictionary[Any, dict[Any, Examples]] = weakref.WeakKeyDictionary()


def examples_of(task: Any, split: str, lengths: Mapping[str, int]) -> Examples:
    """The task's examples; those that this process has read already are not read again."""
    read = _read_already.setdefault(task, {})
    key = (split, *sorted(lengths.items()))
    if key not in read:
        read[key] = Examples(task, split, lengths)
    return read[key]


class Resident:
    """A shard of examples in memory, in a new order every epoch.

    Shard s of V holds examples s, s + V, …. The first epoch is shuffled within chunks, so that
    nothing waits for the whole split to be tokenised; later ones as a whole. An epoch gives every
    example once. The order is a function of the seed, and the position three numbers.

    Args:
      examples: all of the task's.
      shard: index and number of virtual shards.
      seed: of the shuffling; None keeps the stored order.

    Raises:
      ValueError: there are fewer examples than shards.
    """

    def __init__(
        self, examples: Examples, *, shard: tuple[int, int], seed: np.random.SeedSequence | None
    ):
        self._examples, self._shard, self._seed = examples, shard, seed
        self._move(0, 0, 0)
        if not len(self._order):
            raise ValueError(
                f"{examples.name} has {len(examples)} examples, fewer than shards={shard[1]}; set "
                f"data.shards to at most {max(1, len(examples))} or leave the task out"
            )

    def __next__(self) -> Example:
        while self._taken == len(self._order):
            if not self._epoch and self._examples.reach((self._chunk + 1) * CHUNK):
                self._move(0, self._chunk + 1, 0)
            else:
                self._move(self._epoch + 1, 0, 0)
        self._taken += 1
        return self._examples[self._order[self._taken - 1]]

    def save(self, prefix: pathlib.Path) -> list[int]:
        """Epoch, chunk and examples taken of it."""
        del prefix
        return [self._epoch, self._chunk, self._taken]

    def restore(self, prefix: pathlib.Path, position: list[int] | None) -> None:
        """Continues there."""
        del prefix
        assert position is not None
        self._move(*position)

    def _move(self, epoch: int, chunk: int, taken: int) -> None:
        self._epoch, self._chunk, self._taken = epoch, chunk, taken
        first, last = (0, len(self._examples)) if epoch else (chunk * CHUNK, (chunk + 1) * CHUNK)
        if not self._examples.reach(last - 1):
            last = len(self._examples)
        index, shards = self._shard
        mine = np.arange(first + (index - first) % shards, last, shards)
        if self._seed is not None:
            mine = mine[np.argsort(bits(self._seed, epoch, chunk, count=len(mine)), kind="stable")]
        self._order = mine


class Live:
    """A shard of a task whose steps after SeqIO's cache point are random, or which is too large.

    A SeqIO pipeline of its own, whose position is a TensorFlow checkpoint.

    Args:
      task: a SeqIO task.
      split: its split.
      lengths: SeqIO's feature lengths.
      shard: index and number of virtual shards.
      seed: of shuffling and of random steps; the same for all shards, so that they stay disjoint.
      shuffle: False keeps the stored order.
    """

    def __init__(
        self,
        task: Any,
        split: str,
        lengths: Mapping[str, int],
        *,
        shard: tuple[int, int],
        seed: int,
        shuffle: bool,
    ):
        import seqio

        tf = tensorflow()
        self._name, self._place = f"{task.name}'s split {split!r}", place(task)
        with reading(self._name, self._place):
            dataset = task.get_dataset(
                lengths,
                split=split,
                shuffle=shuffle,
                shuffle_buffer_size=1,  # it would hold all features, and save them
                seed=seed,
                shard_info=seqio.ShardInfo(*shard),
                num_epochs=None,
                try_in_mem_cache=False,
            )
        dataset = dataset.map(lambda row: (row["inputs"], row["targets"]))
        if shuffle:
            dataset = dataset.shuffle(max(1, CHUNK // shard[1]), seed=seed)
        dataset = dataset.with_options(options())
        self._shard, self._iterator = shard, iter(dataset)
        self._checkpoint = tf.train.Checkpoint(iterator=self._iterator)

    def __next__(self) -> Example:
        with reading(self._name, self._place):
            row = next(self._iterator, None)
        if row is None:
            raise ValueError(
                f"{self._name} has no example for shard {self._shard[0]} of {self._shard[1]}; set "
                "data.shards to a smaller number or leave the task out"
            )
        inputs, targets = row
        return inputs.numpy(), targets.numpy()

    def save(self, prefix: pathlib.Path) -> None:
        """Writes TensorFlow's checkpoint files."""
        self._checkpoint.write(str(prefix))

    def restore(self, prefix: pathlib.Path, position: list[int] | None) -> None:
        """Reads them."""
        del position
        self._checkpoint.read(str(prefix)).assert_consumed()


def place(task: Any) -> str:
    """Where a SeqIO task's stored rows lie, for messages."""
    stored = getattr(task.source, "tfds_dataset", None)
    if stored is None:
        return str(task.source)
    return str(storage_path(stored.data_dir or "") / stored.name.replace(":", "/"))


def fits_memory(task: Any, split: str) -> bool:
    """True if the task is small and nothing after SeqIO's cache point is random."""
    from seqio import preprocessors as steps

    from synthesizer_jax.data.preprocessors import append_sentinel

    fixed = (steps.append_eos, steps.append_eos_after_trim, append_sentinel)
    names = [type(step).__name__ for step in task.preprocessors]
    if "CacheDatasetPlaceholder" not in names:
        return False
    after = task.preprocessors[names.index("CacheDatasetPlaceholder") + 1 :]
    rows = task.num_input_examples(split)
    small = rows is not None and rows <= RESIDENT
    return small and all(getattr(step, "func", step) in fixed for step in after)


def bits(seed: np.random.SeedSequence, *place: int, count: int) -> np.ndarray:
    """Random 64-bit numbers that depend on the seed and a place; the same in every NumPy."""
    key = (*seed.spawn_key, *place)
    child = np.random.SeedSequence(seed.entropy, spawn_key=key)
    return np.random.Philox(child).random_raw(count)


@functools.cache
def tensorflow() -> Any:
    """TensorFlow, kept off accelerators: it would take their memory from JAX."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # it runs already: the caller decided what it sees
        tf.config.set_visible_devices([], "GPU")
    return tf


def options() -> Any:
    """Of every pipeline: a fixed order, and no search for the fastest graph, which costs more."""
    result = tensorflow().data.Options()
    result.deterministic = True
    result.autotune.enabled = False
    result.experimental_optimization.apply_default_optimizations = False
    return result
