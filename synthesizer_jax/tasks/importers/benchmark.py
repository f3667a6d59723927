"""Conversion of the original GLUE and SuperGLUE files to TFDS data sets, all of them or none."""

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
    Source,
    Split,
    Task,
    find_file,
    find_folder,
)
from synthesizer_jax.tasks.importers.reading import import_error
from synthesizer_jax.tasks.importers.report import ImportReport, SplitReport
from synthesizer_jax.tasks.importers.staged import Staged
from synthesizer_jax.tasks.staging import Staging, staging
from synthesizer_jax.tasks.storage import prepare_builder

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

Example = tuple[Hashable, Mapping[str, object]]
"""A key and a row, as TFDS's builders yield them."""

LARGE = 50_000
"""Number of rows from which on a data set is written as `LARGE_SHARDS` files instead of one."""
LARGE_SHARDS = 8


def import_benchmark(
    name: str, source: pathlib.Path | str, data_dir: pathlib.Path | str, *, renew: bool = False
) -> ImportReport:
    """Writes TFDS data sets from a benchmark's original distribution files.

    The rows are converted by TFDS's own builders, so features, versions, ids, labels, the
    corrections of `wsc.fixed` and dropped rows are those of TFDS. Missing tasks and splits are
    reported and absent from the data sets. Everything is written to a staging directory and
    installed at the end, all or nothing: after an error `data_dir` is unchanged, and after a killed
    process the next import rolls back.

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
    root, data_dir = _root(name, pathlib.Path(source)), storage_path(str(data_dir))
    with staging(data_dir, name) as stage:
        reports, directories = [], []
        for task in TASKS[name]:
            split_reports, task_directories = _import_task(task, root, stage)
            reports += split_reports
            directories += task_directories
        if not directories:
            folders = ", ".join(task.folders[0] for task in TASKS[name])
            raise ValueError(
                f"no {name} file in {root}; folders like these were expected: {folders}"
            )
        stage.commit(directories, renew=renew)
    return ImportReport(name, str(data_dir), tuple(reports))


def _root(name: str, source: pathlib.Path) -> pathlib.Path:
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the one that holds {name}'s task folders")
    return source / name if (source / name).is_dir() else source


def _import_task(
    task: Task, root: pathlib.Path, stage: Staging
) -> tuple[list[SplitReport], list[pathlib.Path]]:
    """Builds one data set in `stage`; returns its report and its version directory, if any."""
    folder = find_folder(root, task)
    sources = [(split, find_file(folder, split) if folder else None) for split in task.splits]
    builder = _builder(task, stage.data) if any(source for _, source in sources) else None
    staged: dict[str, Staged] = {}
    reports = []
    for split, source in sources:
        if source is None:
            report = SplitReport(task.folders[0], task.config, split.name, "missing")
        else:
            target = stage.folder / f"{split.name}.txt"
            staged[split.name] = staged_file = _stage(
                builder, split, source, task=task, target=target
            )
            status = "subset" if source.sample else "complete"
            counts = (staged_file.rows, staged_file.dropped, str(source.path))
            report = SplitReport(task.folders[0], task.config, split.name, status, *counts)
        reports.append(report)
    return reports, [_write(builder, staged)] if builder else []


def _builder(task: Task, data_dir: pathlib.Path) -> tfds.core.GeneratorBasedBuilder:
    import tensorflow_datasets as tfds

    return tfds.builder(task.config, data_dir=str(data_dir))


def _stage(
    builder: tfds.core.GeneratorBasedBuilder,
    split: Split,
    source: Source,
    *,
    task: Task,
    target: pathlib.Path,
) -> Staged:
    """Checks one file and returns a copy of it that TFDS can read.

    Raises:
      ValueError: a row is invalid, or the split does not have its published size.
    """
    reader = {"glue": glue, "super_glue": super_glue}.get(task.config.partition("/")[0], pronouns)
    staged = reader.stage(builder, split, source, target=target)
    if not staged.rows or not (source.sample or staged.rows in split.sizes):
        expected = " or ".join(f"{size:,}" for size in split.sizes)
        raise ValueError(
            f"{source.path}: {staged.rows:,} rows after {staged.dropped:,} dropped ones, where "
            f"{task.config}'s {split.name} has {expected}; get the whole file, or name it "
            f"subset_{source.path.name} if it is a sample; nothing was imported"
        )
    return staged


def _write(builder: tfds.core.GeneratorBasedBuilder, staged: dict[str, Staged]) -> pathlib.Path:
    """Runs TFDS's builder on staged files; returns the version directory that it wrote."""
    import tensorflow_datasets as tfds

    def split_generators(manager: tfds.download.DownloadManager) -> dict[str, Iterator[Example]]:
        del manager
        return {name: _examples(builder, staged_file) for name, staged_file in staged.items()}

    is_large = max(staged_file.rows for staged_file in staged.values()) >= LARGE
    config = tfds.download.DownloadConfig(
        try_download_gcs=False, num_shards=LARGE_SHARDS if is_large else 1
    )
    builder._split_generators = split_generators
    directory = prepare_builder(builder, download_config=config)
    for name, staged_file in staged.items():
        num_written = builder.info.splits[name].num_examples
        if num_written != staged_file.rows:
            raise RuntimeError(
                f"{staged_file.source}: TFDS made {num_written} of {staged_file.rows} examples"
            )
    return directory


def _examples(builder: tfds.core.GeneratorBasedBuilder, staged: Staged) -> Iterator[Example]:
    """Yields TFDS's examples of one file.

    Raises:
      ValueError: TFDS cannot read an example; the message has its number.
    """
    rows = builder._generate_examples(**staged.arguments)
    for number in itertools.count(1):
        try:
            example = next(rows)
        except StopIteration:
            return
        except (AssertionError, LookupError, TypeError, ValueError, csv.Error) as error:
            reason = f"TFDS cannot read it ({type(error).__name__}: {error})"
            raise import_error(staged.source, f"example {number}", reason) from error
        yield example
