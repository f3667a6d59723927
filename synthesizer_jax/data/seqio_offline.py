"""The folders in which SeqIO's own caching keeps a task's tokens (``seqio_cache_tasks``)."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import seqio
import tensorflow as tf

from synthesizer_jax.data.stored import cached_until_written


def cached_splits(task: seqio.Task) -> dict[str, int]:
    """Returns the splits of a task that SeqIO has cached, and their numbers of examples.

    They are looked up in SeqIO's cache directories (`seqio.add_global_cache_dirs`).
    """
    directory = task.cache_dir if task.supports_caching else None
    if directory is None:
        return {}
    paths = sorted(tf.io.gfile.glob(seqio.get_cached_info_path(directory, "*")))
    splits = [pathlib.PurePath(path).stem.removeprefix("info.") for path in paths]
    return {split: int(task.get_cached_stats(split)["examples"]) for split in splits}


@cached_until_written
def read_cached(task: seqio.Task) -> seqio.Task:
    """Returns a task that reads its cached splits in the place of its source."""
    names = [type(step).__name__ for step in task.preprocessors]
    after = task.preprocessors[names.index("CacheDatasetPlaceholder") + 1 :]
    return task.replace(
        source=OfflineCache(task), preprocessors=[seqio.CacheDatasetPlaceholder(), *after]
    )


def describe_file(path: str) -> list[str | int]:
    """Returns the name of a file, its size in bytes and its time of modification in nanoseconds."""
    status = tf.io.gfile.stat(path)
    return [pathlib.PurePath(path).name, status.length, status.mtime_nsec]


class OfflineCache(seqio.DataSource):
    """The tokens that SeqIO has cached of a task.

    Args:
      task: the task, which has cached splits.
    """

    def __init__(self, task: seqio.Task):
        counts = cached_splits(task)
        super().__init__(splits=list(counts), num_input_examples=counts)
        self._task = task

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """False: files are divided."""
        return False

    def list_shards(self, split: str) -> Sequence[str]:
        """Returns the paths of a split's files."""
        return self._open(split).list_shards(split)

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **options: Any,
    ) -> tf.data.Dataset:
        """Returns the rows of a split; see `seqio.DataSource`."""
        return self._open(split).get_dataset(
            split, shuffle=shuffle, seed=seed, shard_info=shard_info, **options
        )

    def _open(self, split: str) -> seqio.DataSource:
        return self._task._get_cached_source(split)

    def __str__(self) -> str:
        return str(self._task.cache_dir)
