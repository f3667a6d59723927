"""The rows of tasks, read by SeqIO."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping

from etils import epy

from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.tasks import preprocessors, stored
from synthesizer_jax.tasks.seqio_tasks import RegisteredTask, seqio_vocabulary
from synthesizer_jax.tasks.task import Preprocessor, Task

with epy.lazy_imports():
    import seqio
    import tensorflow as tf
    import tensorflow_datasets as tfds


def to_seqio(task: Task, vocabulary: Vocabulary, data_dir: pathlib.Path) -> seqio.Task:
    """Returns the SeqIO task over the newest version of a task's data set.

    Raises:
      FileNotFoundError: the data set is not in `data_dir`.
      ValueError: its files name classes that are not TFDS's.
    """
    if isinstance(task, RegisteredTask):
        return task.to_seqio(vocabulary, data_dir)
    directory = stored.newest_version(task.dataset, data_dir)
    if directory is None:
        raise FileNotFoundError(f"the data set {task.dataset} is not in {data_dir}; import it")
    stored.check_classes(directory)
    theirs = seqio_vocabulary(vocabulary)
    return seqio.Task(
        task.name,
        source=seqio.TfdsDataSource(
            f"{task.dataset}:{directory.name}",
            tfds_data_dir=str(data_dir),
            splits=list(task.stored_splits(data_dir)),
        ),
        preprocessors=seqio_preprocessors(task, vocabulary),
        postprocess_fn=task.postprocess,
        output_features={
            "inputs": seqio.Feature(theirs, add_eos=True, required=False),
            "targets": seqio.Feature(theirs, add_eos=True),
        },
        metric_fns=list(task.metrics),
    )


def seqio_preprocessors(task: Task, vocabulary: Vocabulary) -> list[Preprocessor]:
    """Returns the SeqIO preprocessors that turn a task's stored rows into token ids."""
    steps = [] if task.preprocess is None else [task.preprocess]
    steps += [seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()]
    if task.sentinel:
        sentinel = vocabulary.vocab_size - 1
        steps.append(functools.partial(preprocessors.append_sentinel, sentinel=sentinel))
    return [*steps, seqio.preprocessors.append_eos_after_trim]


def read_task(
    task: seqio.Task,
    split: str,
    *,
    lengths: Mapping[str, int] | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> tf.data.Dataset:
    """Returns the rows of a split, or of one of its shards, with their tokens, in stored order, once.

    Rows are truncated to `lengths` if they are given; the seed is that of the task's random steps.
    """
    import_tensorflow()
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
