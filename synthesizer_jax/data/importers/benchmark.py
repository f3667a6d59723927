"""Original GLUE and SuperGLUE files become TFDS data sets, all of them or none."""

from __future__ import annotations

import csv
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from synthesizer_jax.data.importers import glue, pronouns, super_glue
from synthesizer_jax.data.importers.layouts import (
    TASKS,
    Source,
    Split,
    Task,
    find_file,
    find_folder,
)
from synthesizer_jax.data.importers.reading import broken
from synthesizer_jax.data.importers.report import ImportReport, SplitReport
from synthesizer_jax.data.importers.staged import Staged
from synthesizer_jax.data.staging import Staging, staging
from synthesizer_jax.data.storage import prepare
from synthesizer_jax.files import storage_path

LARGE = 50_000
"""Data sets with a split of this many rows are written as `LARGE_SHARDS` files, others as one."""
LARGE_SHARDS = 8


def import_benchmark(
    name: str, source: pathlib.Path | str, data_dir: pathlib.Path | str
) -> ImportReport:
    """Writes TFDS data sets from a benchmark's original distribution files.

    The rows go through TFDS's own builders, so features, versions, ids, labels, `wsc.fixed`
    clean-ups and dropped rows are TFDS's. Tasks and splits that are not there are reported, and
    absent from the data sets. Everything is written aside and put into place at the end, all or
    none: after an error `data_dir` is as before, after a kill the next import makes it so. A data
    set that was there already is replaced; one whose files are no longer in `source` is left alone.

    Args:
      name: `glue` or `super_glue` (with definite pronoun resolution, if its folder is there).
      source: the folder that holds the tasks' folders (`CoLA`, `SST-2`, …), or its parent when
        it is called `name`. Files may be plain or gzip.
      data_dir: a TFDS data directory; made if need be.

    Returns:
      What was found, split by split.

    Raises:
      ValueError: `name` is unknown, nothing was found, a row is broken (with file, line and
        reason), or a complete split has not its published size.
    """
    if name not in TASKS:
        raise ValueError(f"benchmark {name!r} is unknown; choose one of {', '.join(TASKS)}")
    root, data_dir = _root(name, pathlib.Path(source)), storage_path(str(data_dir))
    with staging(data_dir, name) as stage:
        reports, written = [], []
        for task in TASKS[name]:
            splits, made = _import_task(task, root, stage)
            reports += splits
            written += made
        if not written:
            folders = ", ".join(task.folders[0] for task in TASKS[name])
            raise ValueError(
                f"no {name} file in {root}; folders like these were expected: {folders}"
            )
        stage.put(written)
    return ImportReport(name, str(data_dir), tuple(reports))


def _root(name: str, source: pathlib.Path) -> pathlib.Path:
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the one that holds {name}'s task folders")
    return source / name if (source / name).is_dir() else source


def _import_task(
    task: Task, root: pathlib.Path, stage: Staging
) -> tuple[list[SplitReport], list[pathlib.Path]]:
    """Builds one data set in `stage`; returns its report and its version folder, if any."""
    folder = find_folder(root, task)
    found = [(split, find_file(folder, split) if folder else None) for split in task.splits]
    builder = _builder(task, stage.data) if any(source for _, source in found) else None
    staged: dict[str, Staged] = {}
    reports = []
    for split, source in found:
        if source is None:
            report = SplitReport(task.folders[0], task.config, split.name, "missing")
        else:
            target = stage.folder / f"{split.name}.txt"
            staged[split.name] = one = _stage(task, builder, split, source, target)
            status = "subset" if source.sample else "complete"
            counts = (one.rows, one.dropped, str(source.path))
            report = SplitReport(task.folders[0], task.config, split.name, status, *counts)
        reports.append(report)
    return reports, [_write(builder, staged)] if builder else []


def _builder(task: Task, data_dir: pathlib.Path) -> Any:
    import tensorflow_datasets as tfds

    return tfds.builder(task.config, data_dir=str(data_dir))


def _stage(task: Task, builder: Any, split: Split, source: Source, target: pathlib.Path) -> Staged:
    """Checks one file and its size."""
    reader = {"glue": glue, "super_glue": super_glue}.get(task.config.partition("/")[0], pronouns)
    staged = reader.stage(builder, split, source, target)
    if not staged.rows or not (source.sample or staged.rows in split.sizes):
        expected = " or ".join(f"{size:,}" for size in split.sizes)
        raise ValueError(
            f"{source.path}: {staged.rows:,} rows after {staged.dropped:,} dropped ones, where "
            f"{task.config}'s {split.name} has {expected}; get the whole file, or name it "
            f"subset_{source.path.name} if it is a sample; nothing was imported"
        )
    return staged


def _write(builder: Any, staged: dict[str, Staged]) -> pathlib.Path:
    """Runs TFDS's builder on staged files; returns the folder of the version it wrote."""
    import tensorflow_datasets as tfds

    def split_generators(manager: Any) -> dict[str, Iterator[tuple[Any, dict[str, Any]]]]:
        del manager
        return {name: _examples(builder, one) for name, one in staged.items()}

    large = max(one.rows for one in staged.values()) >= LARGE
    settings = tfds.download.DownloadConfig(
        try_download_gcs=False, num_shards=LARGE_SHARDS if large else 1
    )
    builder._split_generators = split_generators
    directory = prepare(builder, download_config=settings)
    for name, one in staged.items():
        written = builder.info.splits[name].num_examples
        if written != one.rows:
            raise RuntimeError(f"{one.source}: TFDS made {written} of {one.rows} examples")
    return directory


def _examples(builder: Any, staged: Staged) -> Iterator[tuple[Any, dict[str, Any]]]:
    """TFDS's examples of one file; what it still trips over is named with its place."""
    rows = builder._generate_examples(**staged.arguments)
    for number in itertools.count(1):
        try:
            example = next(rows)
        except StopIteration:
            return
        except (AssertionError, LookupError, TypeError, ValueError, csv.Error) as error:
            reason = f"TFDS cannot read it ({type(error).__name__}: {error})"
            raise broken(staged.source, f"example {number}", reason) from error
        yield example
