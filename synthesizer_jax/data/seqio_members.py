"""Examples and streams of tasks that SeqIO reads and tokenizes while training."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.data.members import (
    CHUNK,
    RESIDENT,
    Chunk,
    Example,
    Examples,
    Ragged,
    check_inputs,
)
from synthesizer_jax.data.stored import reading_errors
from synthesizer_jax.data.vocabularies import EOS
from synthesizer_jax.files import storage_path

if TYPE_CHECKING:
    import seqio
    import tensorflow as tf


class SeqioExamples(Examples):
    """A task's preprocessed examples, tokenized once and only as far as needed.

    Args:
      task: a SeqIO task.
      split: its split.
      lengths: SeqIO's feature lengths; longer examples are truncated. None: documents for an objective,
        which are whole and have no EOS.
    """

    def __init__(self, task: seqio.Task, split: str, lengths: Mapping[str, int] | None):
        _import_tensorflow()
        super().__init__(f"{task.name}'s split {split!r}")
        self._location = storage_location(task)
        with reading_errors(self.name, self._location):
            dataset = task.get_dataset(
                lengths, split=split, shuffle=False, num_epochs=1, seed=0, try_in_mem_cache=False
            )
        self._source = ragged_chunks(_checked(dataset, task.name, lengths))
        if lengths is None:
            self._source = map(_without_eos, self._source)
        self._num_read = 0
        self._exhausted = False
        self.read_until(0)

    def __len__(self) -> int:
        while self.read_until(self._num_read):
            pass
        return self._num_read

    def read_until(self, index: int) -> bool:
        """Reads until example `index` is available; returns False if the split ends first."""
        while index >= self._num_read and not self._exhausted:
            with self._lock:
                self._read()
        return index < self._num_read

    def _read(self) -> None:
        with reading_errors(self.name, self._location):
            chunk = next(self._source, None)
        if chunk is None:
            self._exhausted, self._source = True, iter(())
            return
        self._chunks[len(self._chunks)] = chunk
        self._num_read += len(chunk)


def ragged_chunks(dataset: tf.data.Dataset) -> Iterator[Chunk]:
    """Returns the inputs and targets of tokenized rows, `CHUNK` examples at a time, in order.

    Rows may lack inputs, which are then empty.
    """
    dataset = _sides(dataset).ragged_batch(CHUNK)
    return map(_to_chunk, iter(dataset.prefetch(1).with_options(_dataset_options())))


def has_inputs(dataset: tf.data.Dataset) -> bool:
    """Returns whether the rows of a data set have inputs."""
    return "inputs" in dataset.element_spec


def _checked(
    dataset: tf.data.Dataset, name: str, lengths: Mapping[str, int] | None
) -> tf.data.Dataset:
    """Returns a data set; raises a `ValueError` if its rows have inputs that are not to be read."""
    if lengths is not None and has_inputs(dataset):
        check_inputs(name, lengths)
    return dataset


def _sides(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns pairs of inputs, which are empty where rows have none, and targets."""
    tf = _import_tensorflow()
    empty = None if has_inputs(dataset) else tf.zeros([0], tf.int32)
    return dataset.map(lambda row: (row["inputs"] if empty is None else empty, row["targets"]))


def _to_chunk(sides: tuple[tf.RaggedTensor | tf.Tensor, tf.RaggedTensor]) -> Chunk:
    return Chunk(*map(_to_ragged, sides))


def _to_ragged(side: tf.RaggedTensor | tf.Tensor) -> Ragged:
    """Returns the sequences of a batch; batches of `_sides`' empty inputs are not ragged."""
    if not hasattr(side, "row_splits"):
        return Ragged(np.zeros(0, np.int32), np.zeros(len(side) + 1, np.int64))
    return Ragged(side.values.numpy(), side.row_splits.numpy())


def _without_eos(chunk: Chunk) -> Chunk:
    """Returns the targets of a chunk without the EOS that tasks append, and empty inputs."""
    ids, ends = chunk.targets
    is_eos = np.zeros(len(ids), bool)
    last = ends[1:][np.diff(ends) > 0] - 1
    is_eos[last] = ids[last] == EOS
    removed = np.concatenate([[0], np.cumsum(is_eos)])[ends]
    empty = Ragged(np.zeros(0, np.int32), np.zeros(len(ends), np.int64))
    return Chunk(empty, Ragged(ids[~is_eos], ends - removed))


_examples_cache: weakref.WeakKeyDictionary[seqio.Task, dict[tuple[object, ...], SeqioExamples]] = (
    weakref.WeakKeyDictionary()
)


def examples_of(task: seqio.Task, split: str, lengths: Mapping[str, int] | None) -> SeqioExamples:
    """Returns the task's examples, reusing those that this process has already read.

    Args:
      task: see `SeqioExamples`.
      split: see `SeqioExamples`.
      lengths: see `SeqioExamples`.
    """
    cached = _examples_cache.setdefault(task, {})
    key = (split, *sorted((lengths or {}).items()))
    if key not in cached:
        cached[key] = SeqioExamples(task, split, lengths)
    return cached[key]


class SeqioTaskStream:
    """A shard of a task that is too large for memory or has random steps after SeqIO's cache point.

    It has its own SeqIO pipeline, whose position is a TensorFlow checkpoint. Its examples have no
    index.

    Args:
      task: a SeqIO task.
      split: its split.
      lengths: SeqIO's feature lengths.
      shard: index of the virtual shard and number of shards.
      seed: of shuffling and random steps; the same for all shards, so that they stay disjoint.
      shuffle: False keeps the stored order.
    """

    index: int | None = None

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
        dataset = _sides(_checked(dataset, task.name, lengths))
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

    def recall(self, index: int) -> Example:
        """Is not called: its examples have no index."""
        raise NotImplementedError

    def position(self) -> None:
        """The position cannot be expressed by numbers."""

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
    num_rows = task.num_input_examples(split)
    return num_rows is not None and num_rows <= RESIDENT and is_deterministic(task)


def is_deterministic(task: seqio.Task) -> bool:
    """Returns whether the task has a cache point, and no random step after it."""
    from seqio import preprocessors

    from synthesizer_jax.data.preprocessors import append_sentinel

    deterministic = (preprocessors.append_eos, preprocessors.append_eos_after_trim, append_sentinel)
    steps = steps_after_cache(task)
    return steps is not None and all(function in deterministic for function, _ in steps)


def steps_after_cache(
    task: seqio.Task,
) -> list[tuple[Callable[..., object], Mapping[str, object]]] | None:
    """Returns the steps after SeqIO's cache point as functions and their bound keyword arguments.

    None: the task has no cache point.
    """
    names = [type(step).__name__ for step in task.preprocessors]
    if "CacheDatasetPlaceholder" not in names:
        return None
    steps = task.preprocessors[names.index("CacheDatasetPlaceholder") + 1 :]
    return [
        (step.func, step.keywords) if isinstance(step, functools.partial) else (step, {})
        for step in steps
    ]


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
