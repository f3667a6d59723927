"""Conversion of the original GLUE and SuperGLUE files to TFDS data sets."""

from __future__ import annotations

import csv
import itertools
import pathlib
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING

from synthesizer_jax.files import storage_path
from synthesizer_jax.tasks.importers import glue, pronouns, super_glue
from synthesizer_jax.tasks.importers.layouts import (
    TASKS,
    Task,
    find_file,
    find_folder,
)
from synthesizer_jax.tasks.importers.reading import import_error
from synthesizer_jax.tasks.importers.report import ImportReport, SplitReport
from synthesizer_jax.tasks.importers.staged import Staged
from synthesizer_jax.tasks.storage import install, prepare_builder, temporary_folder

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

Example = tuple[Hashable, Mapping[str, object]]
"""A key and a row, as TFDS's builders yield them."""

LARGE = 8_000_000
"""Bytes of a file from which on a data set is written as `LARGE_SHARDS` files instead of one."""
LARGE_SHARDS = 8

_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
    *(RuntimeError, csv.Error),
)
"""What TFDS's builders raise on rows that they cannot read."""


def import_benchmark(
    name: str, source: pathlib.Path | str, data_dir: pathlib.Path | str, *, renew: bool = False
) -> ImportReport:
    """Writes TFDS data sets from a benchmark's original distribution files.

    The rows are converted by TFDS's own builders, so features, versions, ids, labels, the
    corrections of `wsc.fixed` and dropped rows are those of TFDS. Missing tasks and splits are
    reported and absent from the data sets. All are written beside `data_dir`'s before the first is
    put in its place, so that `data_dir` is unchanged if a row cannot be read.

    Args:
      name: `glue` or `super_glue` (with definite pronoun resolution, if its directory exists).
      source: the directory that contains the tasks' directories (`CoLA`, `SST-2`, …), or its parent
        if the directory is called `name`. Files may be plain or gzip.
      data_dir: a TFDS data directory; created if it does not exist.
      renew: whether data sets that exist are replaced; otherwise their splits are kept, see `keep_splits`.

    Returns:
      A report of every split.

    Raises:
      ValueError: `name` is unknown, no file was found, a row is invalid (the message has file, line
        and reason), or a complete split does not have its published size.
    """
    if name not in TASKS:
        raise ValueError(f"benchmark {name!r} is unknown; choose one of {', '.join(TASKS)}")
    root, data_dir = _root(name, storage_path(str(source))), storage_path(str(data_dir))
    with temporary_folder(data_dir) as folder:
        reports, directories = [], []
        for task in TASKS[name]:
            split_reports, task_directories = _import_task(task, root, folder)
            reports += split_reports
            directories += task_directories
        if not directories:
            folders = ", ".join(task.folders[0] for task in TASKS[name])
            raise ValueError(
                f"no {name} file in {root}; folders like these were expected: {folders}"
            )
        install(directories, folder, data_dir, renew=renew)
    return ImportReport(name, str(data_dir), tuple(reports))


def _root(name: str, source: pathlib.Path) -> pathlib.Path:
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the one that holds {name}'s task folders")
    return source / name if (source / name).is_dir() else source


def _import_task(
    task: Task, root: pathlib.Path, temporary: pathlib.Path
) -> tuple[list[SplitReport], list[pathlib.Path]]:
    """Builds one data set in `temporary`; returns its report and its version directory, if any.

    Raises:
      ValueError: a row is invalid, or a split does not have its published size.
    """
    folder = find_folder(root, task)
    sources = {split: find_file(folder, split) if folder else None for split in task.splits}
    found = {split: source for split, source in sources.items() if source}
    reports = {
        split: SplitReport(task.folders[0], task.config, split.name, "missing") for split in sources
    }
    if not found:
        return list(reports.values()), []
    builder = _builder(task, temporary)
    reader = {"glue": glue, "super_glue": super_glue}.get(task.config.partition("/")[0], pronouns)
    staged = {
        split: reader.stage(builder, split, source, target=temporary / f"{split.name}.txt")
        for split, source in found.items()
    }
    directory = _write(builder, {split.name: file for split, file in staged.items()})
    for split, source in found.items():
        written = builder.info.splits.get(split.name)
        rows = written.num_examples if written else 0
        lines = staged[split].lines
        dropped = 0 if lines is None else lines - rows
        if not rows or not (source.sample or rows in split.sizes):
            expected = " or ".join(f"{size:,}" for size in split.sizes)
            raise ValueError(
                f"{source.path}: {rows:,} rows after {dropped:,} dropped ones, where {task.config}'s "
                f"{split.name} has {expected}; get the whole file, or name it "
                f"subset_{source.path.name} if it is a sample; nothing was imported"
            )
        status = "subset" if source.sample else "complete"
        counts = (rows, dropped, str(source.path))
        reports[split] = SplitReport(task.folders[0], task.config, split.name, status, *counts)
    return list(reports.values()), [directory]


def _builder(task: Task, data_dir: pathlib.Path) -> tfds.core.GeneratorBasedBuilder:
    import tensorflow_datasets as tfds

    return tfds.builder(task.config, data_dir=str(data_dir))


def _write(builder: tfds.core.GeneratorBasedBuilder, staged: dict[str, Staged]) -> pathlib.Path:
    """Runs TFDS's builder on staged files; returns the version directory that it wrote."""
    import tensorflow_datasets as tfds

    def split_generators(manager: tfds.download.DownloadManager) -> dict[str, Iterator[Example]]:
        del manager
        return {name: _examples(builder, staged_file) for name, staged_file in staged.items()}

    size = max(file.source.stat().st_size for file in staged.values())
    shards = LARGE_SHARDS if size >= LARGE else 1
    config = tfds.download.DownloadConfig(try_download_gcs=False, num_shards=shards)
    builder._split_generators = split_generators
    return prepare_builder(builder, download_config=config)


def _examples(builder: tfds.core.GeneratorBasedBuilder, staged: Staged) -> Iterator[Example]:
    """Yields TFDS's examples of one file.

    Raises:
      ValueError: TFDS cannot read or write an example, or two have the same key; the message has its
        number.
    """
    rows, keys = builder._generate_examples(**staged.arguments), set[Hashable]()
    for number in itertools.count(1):
        try:
            key, example = next(rows)
            builder.info.features.serialize_example(example)
            if key in keys:
                raise ValueError(f"idx {key} is there twice")
            keys.add(key)
        except StopIteration:
            return
        except _ERRORS as error:
            text = " ".join(str(error).split())
            reason = f"TFDS cannot read it ({type(error).__name__}: {text})"
            raise import_error(staged.source, f"example {number}", reason) from error
        yield key, example
