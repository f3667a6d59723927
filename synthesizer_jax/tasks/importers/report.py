"""Reports of imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class SplitReport:
    """The report of one split of one configuration.

    Attributes:
      task: the name of the task's directory in the original distribution, such as `CoLA`.
      config: the TFDS data set that it belongs to, such as `glue/cola`.
      split: the TFDS split, such as `validation_matched`.
      status: `complete` (the published size), `present` (no size to compare with), `subset` (a known
        sample or some of the parts, any size) or `missing`.
      rows: number of examples written.
      dropped: number of rows of the file that TFDS drops.
      file: the original file; None if missing.
    """

    task: str
    config: str
    split: str
    status: str
    rows: int = 0
    dropped: int = 0
    file: str | None = None


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """The report of an import.

    Attributes:
      benchmark: name of the benchmark or corpus.
      data_dir: the directory of the TFDS data sets.
      splits: a report of every split of the benchmark.
    """

    benchmark: str
    data_dir: str
    splits: tuple[SplitReport, ...]

    def lines(self) -> Iterator[str]:
        """Yields the report as aligned plain text: one line per split, then a summary."""
        width = max((len(f"{s.config}:{s.split}") for s in self.splits), default=0)
        for split in self.splits:
            name = f"{split.config}:{split.split}".ljust(width)
            if split.file is None:
                yield f"{name}  missing ({split.task})"
                continue
            dropped = f", {split.dropped} dropped" if split.dropped else ""
            yield f"{name}  {split.status:8}  {split.rows:>7,} rows{dropped}  {split.file}"
        present = [s for s in self.splits if s.file is not None]
        yield (
            f"{self.benchmark}: {len(present)} of {len(self.splits)} splits, "
            f"{sum(s.rows for s in present):,} rows, in {self.data_dir}"
        )
