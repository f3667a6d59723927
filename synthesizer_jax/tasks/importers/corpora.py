"""Import of benchmarks and corpora from the files as published.

Data sets have the features that TFDS's of the same name have, so that data prepared by TFDS can take their
place.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from etils import epy

from synthesizer_jax.files import storage_path
from synthesizer_jax.tasks.importers.layouts import (
    CORPORA,
    SAMPLE,
    Layout,
    SplitLayout,
    find_parts,
)
from synthesizer_jax.tasks.importers.reading import Cursor, ReadError, Row
from synthesizer_jax.tasks.stored import FeatureType, staging, write_dataset

with epy.lazy_imports():
    import tensorflow_datasets as tfds


@dataclasses.dataclass(frozen=True)
class SplitReport:
    """The report of one split.

    Attributes:
      file: the original file, or the pattern of its name if it is missing.
      dataset: the TFDS data set that it belongs to, such as `glue/cola`.
      split: the TFDS split, such as `validation_matched`.
      status: `complete` (the published size), `present` (no size to compare with), `subset` (a sample or
        some of the parts, any size) or `missing`.
      rows: number of examples written.
      dropped: number of rows that are left out because they lack something.
    """

    file: str
    dataset: str
    split: str
    status: str
    rows: int = 0
    dropped: int = 0


def report_lines(reports: Sequence[SplitReport]) -> Iterator[str]:
    """Yields the reports as aligned plain text: one line per split, then a summary."""
    width = max(len(f"{s.dataset}:{s.split}") for s in reports)
    for split in reports:
        name = f"{split.dataset}:{split.split}".ljust(width)
        dropped = f", {split.dropped} dropped" if split.dropped else ""
        rows = f"{split.status:8}  {split.rows:>7,} rows{dropped}  {split.file}"
        yield f"{name}  {f'missing ({split.file})' if split.status == 'missing' else rows}"
    present = [s.rows for s in reports if s.status != "missing"]
    yield f"{len(present)} of {len(reports)} splits, {sum(present):,} rows"


def import_corpus(
    name: str, source: pathlib.Path | str, data_dir: pathlib.Path | str, *, renew: bool = False
) -> list[SplitReport]:
    """Writes the TFDS data sets of a benchmark or corpus from its files; none if a row cannot be read.

    Splits whose files are not there are reported as missing. A split of which only some parts or a
    sample are there is reported as a subset.

    Args:
      name: a key of `CORPORA`.
      source: the directory of the files, or its parent if the directory is called `name`; files may be
        plain or gzip.
      data_dir: a TFDS data directory; created if it does not exist.
      renew: whether data sets that exist are replaced; otherwise their splits are kept.

    Raises:
      ValueError: no file was found, or a row is invalid, or a file does not have the published number
        of rows; the message has file, place and reason.
    """
    source, data_dir = storage_path(str(source)), storage_path(str(data_dir))
    source = source / name if (source / name).is_dir() else source
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the one that holds the files of {name}")
    found = {
        (layout, split): find_parts(split, source)
        for layout in CORPORA[name]
        for split in layout.splits
    }
    if not any(found.values()):
        lacking = ", ".join(layout.splits[0].parts[0][0] for layout in CORPORA[name])
        raise ValueError(f"{source} lacks {lacking}; nothing was imported")
    with staging(data_dir, renew=renew) as folder:
        imports = {pair: _SplitImport(*pair, parts) for pair, parts in found.items()}
        for layout in CORPORA[name]:
            there = [i for (of, _), i in imports.items() if of is layout and i.parts]
            if there:
                _write(layout, there, folder)
    return [split_import.report() for split_import in imports.values()]


@dataclasses.dataclass
class _SplitImport:
    """The reading of a split, and how many rows were read and left out."""

    layout: Layout
    split: SplitLayout
    parts: Sequence[Sequence[pathlib.Path]]
    rows: int = 0
    dropped: int = 0

    def read(self, cursor: Cursor) -> Iterator[Row]:
        """Yields the rows; it ends with an error where they are not as many as were published."""
        for paths in self.parts:
            cursor.where = ", ".join(map(str, paths[:3]))
            for row in cursor.follow(self.layout.read(paths)):
                if row is None:
                    self.dropped += 1
                else:
                    self.rows += 1
                    yield row
        expected = None if self._is_sample else self.split.rows
        if self.rows == 0 or expected not in (None, self.rows):
            size = f"{self.rows:,} of {expected:,} published rows" if expected else "no rows"
            left_out = f", without {self.dropped:,} that are left out," if self.dropped else ""
            files = [path for paths in self.parts for path in paths]
            raise ReadError(
                f"{self.layout.dataset}'s split {self.split.name!r} has {size}{left_out} in "
                f"{', '.join(map(str, files))}; get whole files, or name them {SAMPLE}{files[0].name} and "
                "so on if they are a sample; nothing was imported"
            )

    @property
    def _is_sample(self) -> bool:
        return any(path.name.startswith(SAMPLE) for paths in self.parts for path in paths)

    def report(self) -> SplitReport:
        """Returns the report of the split."""
        names = (self.layout.dataset, self.split.name)
        if not self.parts:
            return SplitReport(self.split.parts[0][0], *names, "missing")
        is_subset = self._is_sample or len(self.parts) < len(self.split.parts)
        status = "subset" if is_subset else "complete" if self.split.rows else "present"
        return SplitReport(str(self.parts[0][-1]), *names, status, self.rows, self.dropped)


def _write(layout: Layout, imports: Sequence[_SplitImport], folder: pathlib.Path) -> None:
    """Writes the data set of a layout."""
    cursor = Cursor()
    version, features = _features(layout, folder)
    with cursor.named():
        splits = {i.split.name: functools.partial(i.read, cursor) for i in imports}
        write_dataset(layout.dataset, version, features, splits, folder)


def _features(layout: Layout, folder: pathlib.Path) -> tuple[str, Mapping[str, FeatureType]]:
    """Returns the version and the features of a data set."""
    if not layout.features:
        builder = tfds.builder(layout.dataset, data_dir=folder)
        return str(builder.version), dict(builder.info.features.items())
    text = tfds.features.Text()
    texts = {name.rstrip("*"): name for name in layout.features}
    return "1.0.0", {
        name: tfds.features.Sequence(text) if kind.endswith("*") else text
        for name, kind in texts.items()
    }
