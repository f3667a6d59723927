"""Import of corpora from the files as published: readers of rows, one table of layouts, one function.

Benchmarks that TFDS's builders read are in `benchmark`. A layout writes the features that the TFDS data
set of the same name has, so that data prepared by TFDS can take its place.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from synthesizer_jax.files import storage_path
from synthesizer_jax.tasks.importers import question_readers
from synthesizer_jax.tasks.importers.corpus_layouts import CORPORA, Layout, SplitLayout, find_parts
from synthesizer_jax.tasks.importers.report import ImportReport, SplitReport
from synthesizer_jax.tasks.storage import Row, install, temporary_folder, write_dataset

if TYPE_CHECKING:
    from synthesizer_jax.tasks.storage import FeatureType

Parts = Sequence[Sequence[pathlib.Path]]
"""The files of the parts of a split that are there."""


def import_corpus(
    name: str, source: pathlib.Path | str, data_dir: pathlib.Path | str, *, renew: bool = False
) -> ImportReport:
    """Writes the TFDS data sets of a corpus from its files; none if a row cannot be read.

    Splits whose files are not there are reported as missing. A split of which only some parts or a
    sample are there is reported as a subset.

    Args:
      name: a key of `CORPORA`.
      source: the directory of the files, or its parent if the directory is called `name`; files may be
        plain or gzip.
      data_dir: a TFDS data directory; created if it does not exist.
      renew: whether data sets that exist are replaced; otherwise their splits are kept, see `keep_splits`.

    Returns:
      A report of every split.

    Raises:
      ValueError: no file was found, or a row is invalid, or a file does not have the published number
        of rows; the message has file, line and reason.
    """
    source, data_dir = storage_path(str(source)), storage_path(str(data_dir))
    source = source / name if (source / name).is_dir() else source
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the one that holds the files of {name}")
    reports: list[SplitReport] = []
    with temporary_folder(data_dir) as folder:
        directories = []
        for layout in CORPORA[name]:
            found = {split: find_parts(split, source) for split in layout.splits}
            if any(found.values()):
                counts = _write(layout, found, data_dir=folder)
                directories.append(folder / layout.dataset / layout.version)
            else:
                counts = {}
            reports += (_report(layout, split, found[split], counts) for split in layout.splits)
        if not directories:
            lacking = dict.fromkeys(report.task for report in reports)
            raise ValueError(f"{source} lacks {', '.join(lacking)}; nothing was imported")
        install(directories, folder, data_dir, renew=renew)
    return ImportReport(name, str(data_dir), tuple(reports))


def _write(
    layout: Layout, found: Mapping[SplitLayout, Parts], *, data_dir: pathlib.Path
) -> dict[str, tuple[int, int]]:
    """Writes a data set; returns the numbers of rows and of dropped rows of every split."""
    dataset, _, config = layout.dataset.partition("/")
    counts: dict[str, tuple[int, int]] = {}
    write_dataset(
        dataset,
        config or None,
        version=layout.version,
        description=f"{layout.dataset}, imported from its files.",
        features={name: _feature(kind) for name, kind in layout.features.items()},
        splits={
            split.name: functools.partial(_checked_rows, layout, split, parts, counts=counts)
            for split, parts in found.items()
            if parts
        },
        data_dir=data_dir,
    )
    return counts


def _checked_rows(
    layout: Layout, split: SplitLayout, parts: Parts, *, counts: dict[str, tuple[int, int]]
) -> Iterator[Row]:
    """Yields the rows of a split, and stores their number in `counts`.

    Raises:
      ValueError: the split does not have its published number of rows.
    """
    number, dropped = 0, 0
    for paths in parts:
        for _, row in (split.read or layout.read)(paths):
            if row is None:
                dropped += 1
            else:
                number += 1
                yield row
    counts[split.name] = (number, dropped)
    expected = None if split.is_sample(parts) else split.rows
    if number == 0 or expected not in (None, number):
        size = "no rows" if expected is None else f"{number:,} of {expected:,} published rows"
        left_out = f", without {dropped:,} that are left out," if dropped else ""
        files = ", ".join(str(path) for paths in parts for path in paths)
        raise ValueError(
            f"{layout.dataset}'s split {split.name!r} has {size}{left_out} in {files}; "
            "nothing was imported"
        )


def _report(
    layout: Layout, split: SplitLayout, parts: Parts, counts: Mapping[str, tuple[int, int]]
) -> SplitReport:
    task = split.parts[0][0].rpartition("/")[2]
    if not parts:
        return SplitReport(task, layout.dataset, split.name, "missing")
    is_subset = split.is_sample(parts) or len(parts) < len(split.parts)
    status = "subset" if is_subset else "complete" if split.rows else "present"
    file = str(parts[0][-1])
    return SplitReport(task, layout.dataset, split.name, status, *counts[split.name], file)


def _feature(kind: str) -> FeatureType:
    """Returns the TFDS feature type of a kind; see `Layout.features`."""
    import numpy as np
    import tensorflow_datasets as tfds

    text = tfds.features.Text()
    pages, results = question_readers.TRIVIA_PAGES, question_readers.TRIVIA_RESULTS
    return {
        "text": text,
        "texts": tfds.features.Sequence(text),
        "integer": np.int64,
        "answers": tfds.features.Sequence({"text": text, "answer_start": np.int32}),
        "aliases": {
            **dict.fromkeys(question_readers.TRIVIA_ANSWER, text),
            **dict.fromkeys(("aliases", "normalized_aliases"), tfds.features.Sequence(text)),
        },
        "pages": tfds.features.Sequence(
            dict.fromkeys(map(question_readers.snake_case, pages), text)
        ),
        "results": tfds.features.Sequence(
            dict.fromkeys(map(question_readers.snake_case, results), text) | {"rank": np.int32}
        ),
    }[kind]
