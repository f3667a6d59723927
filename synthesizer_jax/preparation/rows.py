"""Reads and tokenizes the rows of tasks on TFDS data sets and of SeqIO's tasks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import operator
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from etils import epy

from synthesizer_jax.base.messages import silent_stderr
from synthesizer_jax.data.examples import CHUNK, SIDES
from synthesizer_jax.data.prepared import Chunk, PreparedTasks, RaggedTokens
from synthesizer_jax.data.vocabularies import Bytes, Vocabulary
from synthesizer_jax.tasks import stored
from synthesizer_jax.tasks.preprocessors import Row, takes_batches
from synthesizer_jax.tasks.seqio_tasks import RegisteredTask, seqio_vocabulary
from synthesizer_jax.tasks.task import Task

with epy.lazy_imports():
    import seqio
    import tensorflow as tf
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import file_adapters


Batch: TypeAlias = tuple[Chunk, Iterable[dict[str, Any]]]
"""The tokens of up to `CHUNK` consecutive rows of a task, and the other features of each row."""


def read_task(
    task: Task,
    split: str,
    prepared: PreparedTasks,
    *,
    with_rows: bool = True,
    lengths: Mapping[str, int] | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yields the rows of a split, or the rows of one of its shards, in stored order.

    Args:
      task: the task. A task of SeqIO's registry is read with SeqIO.
      split: the name of the split.
      prepared: the prepared tasks, which determine the data directory and the vocabulary.
      with_rows: whether features other than the tokens are needed. If `with_rows` is `False`, these
        features may be missing.
      lengths: the maximum lengths of inputs and targets, for tasks whose preprocessing depends on
        them.
      seed: the seed of the random steps of the task.
      shard: the index of the shard, and the number of shards.
    """
    import_tensorflow()
    if not isinstance(task, RegisteredTask):
        with seqio.map_seed_manager(seed):
            texts = _read_texts(task, split, prepared.data_dir, shard)
        return to_batches(encode(texts, task, prepared.vocabulary))
    # Read the files one after another, so that the rows have the stored order.
    seqio.set_tfds_read_config_override(
        tfds.ReadConfig(try_autocache=False, interleave_cycle_length=1)
    )
    rows = task.to_seqio(prepared.vocabulary, prepared.data_dir).get_dataset(
        lengths,
        split=split,
        shuffle=False,
        seed=seed,
        shard_info=None if shard[1] == 1 else seqio.ShardInfo(*shard),
        try_in_mem_cache=False,
    )
    # Gather the rows one by one, because the ranks of their features may not be known.
    if with_rows:
        return _gather(rows.as_numpy_iterator())
    tokens = rows.map(lambda row: {side: row[side] for side in SIDES if side in row})
    return to_batches(tokens.ragged_batch(CHUNK))


def num_files(task: Task, split: str, prepared: PreparedTasks) -> int:
    """Returns the number of files of a split, which is the number of shards of a large split."""
    if isinstance(task, RegisteredTask):
        return len(task.to_seqio(prepared.vocabulary, prepared.data_dir).source.list_shards(split))
    return len(list(_directory(task, prepared.data_dir).glob(f"*-{split}.*-of-*")))


def _directory(task: Task, data_dir: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a task's data set, which must exist.

    Raises:
      ValueError: if the data set names a class that is not part of TFDS.
    """
    directory = stored.newest_version(task.dataset, data_dir)
    assert directory is not None
    stored.check_classes(directory)
    return directory


def _read_texts(
    task: Task, split: str, data_dir: pathlib.Path, shard: tuple[int, int]
) -> tf.data.Dataset:
    """Returns the preprocessed rows of a task in batches."""
    info = tfds.builder_from_directory(str(_directory(task, data_dir))).info
    index, num_shards = shard
    files = list(map(str, info.splits[split].filepaths))[index::num_shards]
    read_file = file_adapters.ADAPTER_FOR_FORMAT[info.file_format].make_tf_data
    records = tf.data.Dataset.from_tensor_slices(files).flat_map(read_file)
    # At the end of the data, this check raises an error if a file has fewer rows than recorded.
    counts = info.splits[split].shard_lengths[index::num_shards]
    records = records.apply(tf.data.experimental.assert_cardinality(sum(counts)))

    features = info.features
    stored_types, types = features.tf_example_spec, features.get_tensor_spec()
    preprocess = task.preprocess or (lambda rows: rows)

    def parse(records: tf.Tensor) -> Row:
        """Parses a batch of records in which all features are scalars."""
        values = tf.io.parse_example(records, stored_types)
        return {name: tf.cast(values[name], spec.dtype) for name, spec in sorted(types.items())}

    # Parsing and formatting rows one by one would take longer than tokenizing them. Rows are
    # therefore parsed in batches if all features are stored as scalars of the same kind.
    if not all(
        getattr(spec, "shape", None) == ()
        and (spec.dtype == tf.string) == (stored_types[name].dtype == tf.string)
        for name, spec in types.items()
    ):
        return preprocess(records.map(features.deserialize_example)).ragged_batch(CHUNK)
    batches = records.batch(CHUNK).map(parse)
    if takes_batches(task.preprocess):
        return preprocess(batches)
    return preprocess(batches.unbatch()).ragged_batch(CHUNK)


def encode(texts: tf.data.Dataset, task: Task, vocabulary: Vocabulary) -> tf.data.Dataset:
    """Adds the token ids of inputs and targets to batches of a task's rows.

    The texts are kept under the names ``inputs_pretokenized`` and ``targets_pretokenized``.

    Raises:
      ValueError: if the rows have no targets.
    """
    if "targets" not in texts.element_spec:
        raise ValueError(f"The rows of the task {task.name!r} have no targets.")
    theirs = seqio_vocabulary(vocabulary)
    # In T5's sentinel format, inputs end with the first sentinel, and targets begin with the first
    # sentinel.
    sentinel = [vocabulary.first_sentinel] if task.sentinel else []
    first, last = vocabulary.around_inputs
    # For inputs and for targets, the ids to put before and after the ids of a text.
    around = {"inputs": (first, [*sentinel, *last]), "targets": (sentinel, [vocabulary.eos_id])}

    def encode_side(texts: tf.Tensor, side: str) -> tf.RaggedTensor:
        """Returns the ids of texts, with the ids that `around` puts before and after every text."""
        if not isinstance(vocabulary, Bytes):
            ids = theirs.encode_tf(texts)
        else:
            # Every byte has one id. All texts are therefore joined and encoded at once, and the ids
            # are then split by the lengths of the texts in bytes.
            joined = theirs.encode_tf(tf.strings.reduce_join(texts))
            ids = tf.RaggedTensor.from_row_lengths(joined, tf.strings.length(texts))
        first, last = (
            tf.repeat(tf.constant([x], tf.int32), tf.size(texts), 0) for x in around[side]
        )
        return tf.concat([first, ids, last], 1)

    def convert(batch: Row) -> Row:
        rows = {f"{name}_pretokenized" if name in SIDES else name: batch[name] for name in batch}
        return rows | {side: encode_side(batch[side], side) for side in SIDES if side in batch}

    return texts.map(convert, num_parallel_calls=tf.data.AUTOTUNE)


def to_batches(rows: tf.data.Dataset) -> Iterator[Batch]:
    """Yields the batches of a data set, whose rows may lack inputs."""
    # The autotuning and graph optimizations of tf.data would take more time than they save.
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    for batch in rows.prefetch(2).with_options(options):
        sides = [batch.pop(side) for side in SIDES if side in batch]
        tokens = [RaggedTokens(side.values.numpy(), side.row_splits.numpy()) for side in sides]
        count = len(tokens[-1].ends) - 1
        if len(tokens) == 1:
            # If rows have no inputs, add empty inputs.
            tokens.insert(0, RaggedTokens.of([()] * count))
        chunk = Chunk(*tokens)
        columns = tf.nest.map_structure(lambda column: column.numpy(), batch)
        yield chunk, (tf.nest.map_structure(operator.itemgetter(i), columns) for i in range(count))


def _gather(rows: Iterator[dict[str, Any]]) -> Iterator[Batch]:
    """Yields batches that are gathered from single rows."""
    while batch := list(itertools.islice(rows, CHUNK)):
        tokens = [[row.pop(side, ()) for row in batch] for side in SIDES]
        yield Chunk(*map(RaggedTokens.of, tokens)), batch


@contextlib.contextmanager
def reading_errors(what: str) -> Iterator[None]:
    """Context manager that turns errors in stored rows into a `ValueError` with a one-line message.

    Args:
      what: a description of the rows, which begins the message.

    Raises:
      ValueError: if TensorFlow or TFDS could not read the files.
    """
    from google.protobuf import json_format

    # TFDS does not validate what it reads, so damaged files cause errors of many kinds.
    builtin_errors = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
    try:
        yield
    except (tf.errors.OpError, json_format.Error, *builtin_errors) as error:
        text = getattr(error, "message", None) or str(error)
        reason = " ".join(re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*", "", text).split())[:200]
        # The error can also come from a user's function that looks up a feature that rows do not
        # have.
        own = ""
        if isinstance(error, LookupError):
            own = " If a function of your own task raised the error, correct the function instead."
        raise ValueError(
            f"{what} cannot be read ({reason or type(error).__name__}). {stored.REMEDY}{own}"
        ) from error


@functools.cache
def import_tensorflow() -> None:
    """Imports TensorFlow and SeqIO silently, and hides accelerators from TensorFlow.

    If TensorFlow saw the accelerators, it would allocate memory that JAX needs.
    """
    # JAX also sets this variable to 1 by default for its own messages, so the value is restored at
    # the end.
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3" if level == "1" else level
    # The messages are printed before their level can be set.
    with silent_stderr():
        # Importing SeqIO also imports TensorFlow Text, which prints the messages again.
        importlib.import_module("seqio")
        # If TensorFlow is already initialized, this call fails, and the caller's choice of devices
        # is kept.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = level
