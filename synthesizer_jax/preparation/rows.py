"""The rows of tasks with their tokens: of TFDS data sets, and of SeqIO's tasks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import operator
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from etils import epy

from synthesizer_jax.data.prepared import Chunk, RaggedTokens
from synthesizer_jax.data.task_streams import CHUNK, SIDES
from synthesizer_jax.data.vocabularies import EOS, Vocabulary
from synthesizer_jax.tasks import stored
from synthesizer_jax.tasks.preprocessors import Row, takes_batches
from synthesizer_jax.tasks.seqio_tasks import RegisteredTask
from synthesizer_jax.tasks.task import Task

with epy.lazy_imports():
    import seqio
    import tensorflow as tf
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import file_adapters


class Batch(NamedTuple):
    """The tokens of up to `CHUNK` consecutive rows of a task, and everything else of each of them."""

    tokens: Chunk
    rows: Iterable[dict[str, Any]]


def read_task(
    task: Task,
    split: str,
    vocabulary: Vocabulary,
    data_dir: pathlib.Path,
    *,
    with_rows: bool = True,
    lengths: Mapping[str, int] | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    threads: int = 1,
) -> Iterator[Batch]:
    """Yields the rows of a split, or of one of its shards, in stored order, once.

    Args:
      task: the task; one of SeqIO's registry is read by SeqIO.
      split: its split.
      vocabulary: what encodes its texts.
      data_dir: where its data set is.
      with_rows: whether `Batch.rows` are asked for; otherwise there may be none.
      lengths: the lengths of rows, for a task whose steps depend on them.
      seed: of the task's random steps.
      shard: index of the shard and number of shards, at most `num_files`.
      threads: number of threads that encode texts.
    """
    import_tensorflow()
    if isinstance(task, RegisteredTask):
        dataset = _read_registered(task.to_seqio(vocabulary, data_dir), split, lengths, seed, shard)
        yield from _batches_with_rows(dataset) if with_rows else _batches_of_tokens(dataset)
        return
    with seqio.map_seed_manager(seed):
        texts = _read_stored(task, split, data_dir, shard)
    yield from encode(texts, task, vocabulary, threads=threads)


def encode(
    texts: tf.data.Dataset, task: Task, vocabulary: Vocabulary, *, threads: int = 1
) -> Iterator[Batch]:
    """Yields batches of the rows that a task has made, with their tokens."""
    sentinel = [vocabulary.vocab_size - 1] * task.sentinel
    around = {"inputs": ([], [*sentinel, EOS]), "targets": (sentinel, [EOS])}
    for batch in texts.prefetch(2).with_options(_options()):
        tokens = {
            side: RaggedTokens.of(vocabulary.encode_all(batch[side].numpy().tolist(), threads=threads))
            for side in SIDES
            if side in batch
        }
        chunk = _to_chunk({side: ids.enclose(*around[side]) for side, ids in tokens.items()})
        yield Batch(chunk, _rows_of(batch, len(chunk)))


def num_files(task: Task, split: str, vocabulary: Vocabulary, data_dir: pathlib.Path) -> int:
    """Returns the number of files of a split, which can be read as so many shards.

    Raises:
      FileNotFoundError: the data set is not in `data_dir`.
      ValueError: its files name classes that are not TFDS's, or a task of SeqIO's has no tokens.
    """
    if isinstance(task, RegisteredTask):
        return len(task.to_seqio(vocabulary, data_dir).source.list_shards(split))
    return len(list(_directory(task, data_dir).glob(f"*-{split}.*-of-*")))


def _directory(task: Task, data_dir: pathlib.Path) -> pathlib.Path:
    directory = stored.newest_version(task.dataset, data_dir)
    if directory is None:
        raise FileNotFoundError(f"the data set {task.dataset} is not in {data_dir}; import it")
    stored.check_classes(directory)
    return directory


def _read_stored(task: Task, split: str, data_dir: pathlib.Path, shard: tuple[int, int]) -> tf.data.Dataset:
    """Returns batches of a task's rows with their texts."""
    info, (index, num_shards) = tfds.builder_from_directory(str(_directory(task, data_dir))).info, shard
    files = list(map(str, info.splits[split].filepaths))[index::num_shards]
    read_file = file_adapters.ADAPTER_FOR_FORMAT[info.file_format].make_tf_data
    records = tf.data.Dataset.from_tensor_slices(files).flat_map(read_file)
    count = sum(info.splits[split].shard_lengths[index::num_shards])
    records = records.apply(tf.data.experimental.assert_cardinality(count))
    preprocess = task.preprocess or (lambda rows: rows)
    parse = _batch_parser(info.features)  # rows one by one take longer to parse than to encode
    if parse is None:
        return preprocess(records.map(info.features.deserialize_example)).ragged_batch(CHUNK)
    batches = records.batch(CHUNK).map(parse)
    if takes_batches(task.preprocess):
        return preprocess(batches)
    return preprocess(batches.unbatch()).ragged_batch(CHUNK)


def _batch_parser(features: tfds.features.FeaturesDict) -> Callable[[tf.Tensor], Row] | None:
    """Returns a function that parses many records; None: a feature is nested, a sequence or encoded."""
    stored_types, types = features.tf_example_spec, features.get_tensor_spec()
    for name, spec in types.items():
        if not isinstance(spec, tf.TensorSpec) or spec.shape != ():
            return None
        if (spec.dtype == tf.string) != (stored_types[name].dtype == tf.string):
            return None

    def parse(records: tf.Tensor) -> Row:
        values = tf.io.parse_example(records, stored_types)
        return {name: tf.cast(values[name], spec.dtype) for name, spec in types.items()}

    return parse


def _rows_of(batch: Row, count: int) -> Iterator[dict[str, Any]]:
    """Yields what the rows of a batch have beside tokens."""
    columns = {f"{name}_pretokenized" if name in SIDES else name: batch[name] for name in batch}
    columns = tf.nest.map_structure(lambda column: column.numpy(), columns)
    for i in range(count):
        yield tf.nest.map_structure(operator.itemgetter(i), columns)


def _read_registered(
    task: seqio.Task,
    split: str,
    lengths: Mapping[str, int] | None,
    seed: int,
    shard: tuple[int, int],
) -> tf.data.Dataset:
    """Returns the rows that SeqIO reads."""
    # Files in their order, one after another.
    seqio.set_tfds_read_config_override(
        tfds.ReadConfig(
            try_autocache=False,
            interleave_cycle_length=1,
            num_parallel_calls_for_interleave_files=1,
            num_parallel_calls_for_decode=1,
        )
    )
    return task.get_dataset(
        lengths,
        split=split,
        shuffle=False,
        num_epochs=1,
        seed=seed,
        shard_info=None if shard[1] == 1 else seqio.ShardInfo(*shard),
        use_cached=False,
        try_in_mem_cache=False,
    )


def _batches_with_rows(dataset: tf.data.Dataset) -> Iterator[Batch]:
    rows = dataset.as_numpy_iterator()
    while batch := list(itertools.islice(rows, CHUNK)):
        tokens = [[row.pop(side, ()) for row in batch] for side in SIDES]
        yield Batch(Chunk(*map(RaggedTokens.of, tokens)), batch)


def _batches_of_tokens(dataset: tf.data.Dataset) -> Iterator[Batch]:
    sides = dataset.map(lambda row: {side: row[side] for side in SIDES if side in row})
    for batch in sides.ragged_batch(CHUNK).prefetch(1).with_options(_options()):
        tokens = {k: RaggedTokens(v.values.numpy(), v.row_splits.numpy()) for k, v in batch.items()}
        yield Batch(_to_chunk(tokens), ())


def _to_chunk(tokens: Mapping[str, RaggedTokens]) -> Chunk:
    """Returns tokens of targets, and of inputs if there are any."""
    targets = tokens["targets"]
    return Chunk(tokens.get("inputs") or RaggedTokens.of([()] * (len(targets.ends) - 1)), targets)


def _options() -> tf.data.Options:
    """Returns options without autotuning and graph optimizations, which take more time than they save."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return options


@contextlib.contextmanager
def reading_errors(what: str) -> Iterator[None]:
    """Context manager that turns errors of reading the stored rows of `what` into one-line messages.

    Raises:
      ValueError: TensorFlow or TFDS could not read the files.
    """
    from google.protobuf import json_format

    # TFDS does not validate what it reads.
    builtin_errors = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
    try:
        yield
    except (tf.errors.OpError, json_format.Error, *builtin_errors) as error:
        text = getattr(error, "message", None) or str(error)
        reason = " ".join(re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*", "", text).split())[:200]
        raise ValueError(
            f"{what} cannot be read ({reason or type(error).__name__}); {stored.REMEDY}"
        ) from error


@functools.cache
def import_tensorflow() -> None:
    """Imports TensorFlow and SeqIO without their messages, and hides accelerators from TensorFlow.

    It would take their memory from JAX.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _silent_stderr():
        importlib.import_module("seqio")  # with TensorFlow Text, which prints the messages again
        with contextlib.suppress(RuntimeError):  # already initialized: keep the caller's devices
            tf.config.set_visible_devices([], "GPU")


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discards what C++ code prints while it is imported, before the level of messages can be set."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
