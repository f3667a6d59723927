"""What an import found, wrote and missed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class SplitReport:
    """One split of one configuration.

    Attributes:
      task: the folder name of the task in the original distribution, such as `CoLA`.
      config: the TFDS data set it belongs to, such as `glue/cola`.
      split: the TFDS split, such as `validation_matched`.
      status: `complete` (the published size), `subset` (a known sample, any size) or `missing`.
      rows: examples written.
      dropped: rows of the file that TFDS itself leaves out.
      file: the original file, None when missing.
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
    """The outcome of one import, split by split.

    Attributes:
      benchmark: `glue` or `super_glue`.
      data_dir: where the TFDS data sets lie.
      splits: one entry for every split that the benchmark has.
    """

    benchmark: str
    data_dir: str
    splits: tuple[SplitReport, ...]

    def lines(self) -> Iterator[str]:
        """The report as aligned plain text, one line a split, a summary last."""
        width = max((len(f"{s.config}:{s.split}") for s in self.splits), default=0)
        for split in self.splits:
            name = f"{split.config}:{split.split}".ljust(width)
            if split.file is None:
                yield f"{name}  missing ({split.task})"
                continue
            dropped = f", {split.dropped} dropped" if split.dropped else ""
            yield f"{name}  {split.status:8}  {split.rows:>7,} rows{dropped}  {split.file}"
        found = [s for s in self.splits if s.file is not None]
        yield (
            f"{self.benchmark}: {len(found)} of {len(self.splits)} splits, "
            f"{sum(s.rows for s in found):,} rows, in {self.data_dir}"
        )
