"""Endless streams of one task's examples for one virtual shard, from memory or from SeqIO."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import threading
import types
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from synthesizer_jax.data.stored import reading_errors
from synthesizer_jax.files import storage_path

if TYPE_CHECKING:
    import seqio
    import tensorflow as tf

CHUNK = 1024
"""Number of examples that are read at once; the first epoch is shuffled within such chunks."""

RESIDENT = 2_000_000
"""Tasks with more stored rows than this are not held in memory."""

Example = tuple[np.ndarray, np.ndarray]
"""Token ids of the inputs and of the targets, both including EOS."""


class TaskStream(Protocol):
    """An endless iterator over a task's examples whose position can be saved."""

    def __next__(self) -> Example:
        """Returns the next example."""
        ...

    def save(self, prefix: pathlib.Path) -> list[int] | None:
        """Returns the position as numbers, or writes it to files that begin with `prefix`."""
        ...

    def restore(self, prefix: pathlib.Path, position: list[int] | None) -> None:
        """Continues with the example after the saved position."""
        ...


class Examples:
    """A task's preprocessed examples in stored order, tokenized once and only as far as needed.

    Instances may be shared between threads.

    Args:
      task: a SeqIO task.
      split: its split.
      lengths: SeqIO's feature lengths; longer examples are truncated.
    """

    def __init__(self, task: seqio.Task, split: str, lengths: Mapping[str, int]):
        _import_tensorflow()
        self.name = f"{task.name}'s split {split!r}"
        self._location = storage_location(task)
        with reading_errors(self.name, self._location):
            dataset = task.get_dataset(
                lengths, split=split, shuffle=False, num_epochs=1, seed=0, try_in_mem_cache=False
            )
        dataset = dataset.map(lambda row: (row["inputs"], row["targets"])).ragged_batch(CHUNK)
        self._source: Iterator[tuple[tf.RaggedTensor, tf.RaggedTensor]] = iter(
            dataset.prefetch(1).with_options(_dataset_options())
        )
        self._chunks: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self._num_read = 0
        self._exhausted = False
        self._lock = threading.Lock()
        self.read_until(0)

    def __len__(self) -> int:
        while self.read_until(self._num_read):
            pass
        return self._num_read

    def __getitem__(self, index: int) -> Example:
        if not self.read_until(index):
            raise IndexError(index)
        chunk, offset = divmod(index, CHUNK)
        inputs, targets = (
            ids[ends[offset] : ends[offset + 1]] for ids, ends in self._chunks[chunk]
        )
        return inputs, targets

    def read_until(self, index: int) -> bool:
        """Reads until example `index` is available; returns False if the split ends first."""
        while index >= self._num_read and not self._exhausted:
            with self._lock:
                self._read()
        return index < self._num_read

    def _read(self) -> None:
        with reading_errors(self.name, self._location):
            ragged = next(self._source, None)
        if ragged is None:
            self._exhausted, self._source = True, iter(())
            return
        self._chunks.append([(r.values.numpy(), r.row_splits.numpy()) for r in ragged])
        self._num_read += len(self._chunks[-1][0][1]) - 1

    @functools.cached_property
    def checksum(self) -> int:
        """CRC-32 of the first chunk; it depends on vocabulary, data set and preprocessing."""
        arrays = [array for ids, ends in self._chunks[0] for array in (ids, ends)]
        return functools.reduce(lambda crc, array: zlib.crc32(array.tobytes(), crc), arrays, 0)


_examples_cache: weakref.WeakKeyDictionary[seqio.Task, dict[tuple[object, ...], Examples]] = (
    weakref.WeakKeyDictionary()
)


def examples_of(task: seqio.Task, split: str, lengths: Mapping[str, int]) -> Examples:
    """Returns the task's examples, reusing those that this process has already read."""
    cached = _examples_cache.setdefault(task, {})
    key = (split, *sorted(lengths.items()))
    if key not in cached:
        cached[key] = Examples(task, split, lengths)
    return cached[key]


class InMemoryTaskStream:
    """A shard of examples in memory, in a different order every epoch.

    Shard s of V holds the examples s, s + V, …. The first epoch is shuffled within chunks, so that
    no one waits for the whole split to be tokenized; later epochs are shuffled globally. Every
    epoch yields every example once. The order is a function of the seed, and the position consists
    of three numbers.

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
        self._seek(0, 0, 0)
        if not len(self._order):
            raise ValueError(
                f"{examples.name} has {len(examples)} examples, fewer than shards={shard[1]}; set "
                f"data.shards to at most {max(1, len(examples))} or leave the task out"
            )

    def __next__(self) -> Example:
        while self._num_taken == len(self._order):
            if not self._epoch and self._examples.read_until((self._chunk + 1) * CHUNK):
                self._seek(0, self._chunk + 1, 0)
            else:
                self._seek(self._epoch + 1, 0, 0)
        self._num_taken += 1
        return self._examples[self._order[self._num_taken - 1]]

    def save(self, prefix: pathlib.Path) -> list[int]:
        """Returns the epoch, the chunk and the number of examples taken from it."""
        del prefix
        return [self._epoch, self._chunk, self._num_taken]

    def restore(self, prefix: pathlib.Path, position: list[int] | None) -> None:
        """Continues at a position that `save` returned."""
        del prefix
        assert position is not None
        self._seek(*position)

    def _seek(self, epoch: int, chunk: int, num_taken: int) -> None:
        self._epoch, self._chunk, self._num_taken = epoch, chunk, num_taken
        start, stop = (0, len(self._examples)) if epoch else (chunk * CHUNK, (chunk + 1) * CHUNK)
        if not self._examples.read_until(stop - 1):
            stop = len(self._examples)
        index, num_shards = self._shard
        order = np.arange(start + (index - start) % num_shards, stop, num_shards)
        if self._seed is not None:
            order = order[
                np.argsort(random_bits(self._seed, epoch, chunk, count=len(order)), kind="stable")
            ]
        self._order = order


class SeqioTaskStream:
    """A shard of a task that is too large for memory or has random steps after SeqIO's cache point.

    It has its own SeqIO pipeline, whose position is a TensorFlow checkpoint.

    Args:
      task: a SeqIO task.
      split: its split.
      lengths: SeqIO's feature lengths.
      shard: index of the virtual shard and number of shards.
      seed: of shuffling and random steps; the same for all shards, so that they stay disjoint.
      shuffle: False keeps the stored order.
    """

    def __init__(
        self,
        task: seqio.Task,
        split: str,
        lengths: Mapping[str, int],
        *,
        shard: tuple[int, int],
        seed: int,
        shuffle: bool,
    ):
        import seqio

        tf = _import_tensorflow()
        self._name, self._location = f"{task.name}'s split {split!r}", storage_location(task)
        with reading_errors(self._name, self._location):
            dataset = task.get_dataset(
                lengths,
                split=split,
                shuffle=shuffle,
                shuffle_buffer_size=1,  # a larger one holds all features, and saves them
                seed=seed,
                shard_info=seqio.ShardInfo(*shard),
                num_epochs=None,
                try_in_mem_cache=False,
            )
        dataset = dataset.map(lambda row: (row["inputs"], row["targets"]))
        if shuffle:
            dataset = dataset.shuffle(max(1, CHUNK // shard[1]), seed=seed)
        dataset = dataset.with_options(_dataset_options())
        self._shard, self._iterator = shard, iter(dataset)
        self._checkpoint = tf.train.Checkpoint(iterator=self._iterator)

    def __next__(self) -> Example:
        with reading_errors(self._name, self._location):
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
        """Restores TensorFlow's checkpoint files."""
        del position
        self._checkpoint.read(str(prefix)).assert_consumed()


def storage_location(task: seqio.Task) -> str:
    """Returns where a SeqIO task's rows are stored, for error messages."""
    import seqio

    if not isinstance(task.source, seqio.TfdsDataSource):
        return str(task.source)
    dataset = task.source.tfds_dataset
    return str(storage_path(dataset.data_dir or "") / dataset.name.replace(":", "/"))


def fits_memory(task: seqio.Task, split: str) -> bool:
    """Returns whether the task is small and has no random step after SeqIO's cache point."""
    from seqio import preprocessors

    from synthesizer_jax.data.preprocessors import append_sentinel

    deterministic = (preprocessors.append_eos, preprocessors.append_eos_after_trim, append_sentinel)
    names = [type(step).__name__ for step in task.preprocessors]
    if "CacheDatasetPlaceholder" not in names:
        return False
    steps = task.preprocessors[names.index("CacheDatasetPlaceholder") + 1 :]
    num_rows = task.num_input_examples(split)
    is_small = num_rows is not None and num_rows <= RESIDENT
    functions = [step.func if isinstance(step, functools.partial) else step for step in steps]
    return is_small and all(function in deterministic for function in functions)


def random_bits(seed: np.random.SeedSequence, *place: int, count: int) -> np.ndarray:
    """Returns `count` random 64-bit integers that depend on the seed and on `place` alone.

    The numbers are the same in every version of NumPy.
    """
    key = (*seed.spawn_key, *place)
    child = np.random.SeedSequence(seed.entropy, spawn_key=key)
    return np.random.Philox(child).random_raw(count)


@functools.cache
def _import_tensorflow() -> types.ModuleType:
    """Imports TensorFlow without accelerators, whose memory it would take from JAX."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # already initialized: keep the caller's devices
        tf.config.set_visible_devices([], "GPU")
    return tf


def _dataset_options() -> tf.data.Options:
    """Returns the options of every pipeline: deterministic and without optimization of the graph.

    Autotuning and graph optimizations take more time here than they save.
    """
    options = _import_tensorflow().data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return options
