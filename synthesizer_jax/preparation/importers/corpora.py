"""Import of benchmarks and corpora from the files as published.

Data sets have the features of TFDS's of the same name, so that data prepared by TFDS can take their place.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from etils import epy

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.preparation.importers.layouts import (
    CORPORA,
    SAMPLE,
    Layout,
    SplitLayout,
    find_parts,
)
from synthesizer_jax.preparation.importers.reading import Cursor, ReadError, Row
from synthesizer_jax.preparation.writing import FeatureType, staging, write_dataset

with epy.lazy_imports():
    import tensorflow_datasets as tfds


@dataclasses.dataclass
class SplitReport:
    """The import of one split.

    Attributes:
      layout: that of the data set.
      files: that of the split.
      parts: the files of its parts that are there.
      rows: number of examples written.
      dropped: number of rows that are left out because they lack something.
    """

    layout: Layout
    files: SplitLayout
    parts: Sequence[Sequence[pathlib.Path]]
    rows: int = 0
    dropped: int = 0

    @property
    def name(self) -> str:
        """The TFDS data set and the split, such as `glue/mnli:validation_matched`."""
        return f"{self.layout.dataset}:{self.files.name}"

    @property
    def status(self) -> str:
        """`complete` (the published size), `present` (none to compare with), `subset` or `missing`."""
        if not self.parts:
            return "missing"
        is_subset = self._is_sample or len(self.parts) < len(self.files.parts)
        return "subset" if is_subset else "complete" if self.files.rows else "present"

    @property
    def _is_sample(self) -> bool:
        return any(path.name.startswith(SAMPLE) for paths in self.parts for path in paths)

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
        expected = None if self._is_sample else self.files.rows
        if self.rows == 0 or expected not in (None, self.rows):
            size = f"{self.rows:,} of {expected:,} published rows" if expected else "no rows"
            left_out = f", without {self.dropped:,} that are left out," if self.dropped else ""
            files = [path for paths in self.parts for path in paths]
            raise ReadError(
                f"{self.name} has {size}{left_out} in {', '.join(map(str, files))}; get whole files, or "
                f"name them {SAMPLE}{files[0].name} and so on if they are a sample; nothing was imported"
            )


def report_lines(reports: Sequence[SplitReport]) -> Iterator[str]:
    """Yields the reports as aligned plain text: one line per split, then a summary."""
    width = max(len(report.name) for report in reports)
    for report in reports:
        found = f"missing ({report.files.parts[0][0]})"
        if report.parts:
            dropped = f", {report.dropped} dropped" if report.dropped else ""
            rows = f"{report.rows:>7,} rows{dropped}"
            found = f"{report.status:8}  {rows}  {report.parts[0][-1]}"
        yield f"{report.name:{width}}  {found}"
    present = [report.rows for report in reports if report.parts]
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
    reports = [
        SplitReport(layout, split, find_parts(split, source))
        for layout in CORPORA[name]
        for split in layout.splits
    ]
    if not any(report.parts for report in reports):
        lacking = ", ".join(layout.splits[0].parts[0][0] for layout in CORPORA[name])
        raise ValueError(f"{source} lacks {lacking}; nothing was imported")
    cursor = Cursor()
    with staging(data_dir, renew=renew) as folder, cursor.named():
        for layout in CORPORA[name]:
            splits = {
                report.files.name: functools.partial(report.read, cursor)
                for report in reports
                if report.layout is layout and report.parts
            }
            if splits:
                write_dataset(layout.dataset, *_features(layout, folder), splits, folder)
    return reports


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
