"""Imports the data sets of tasks, from published archives or from files that a user names.

A data set has the features that the preprocessor of its task reads. These features have TFDS's
names, so an imported data set can be replaced by a data set that TFDS has prepared.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from etils import epy

from synthesizer_jax.base.messages import Phase, report_items, silent_phase
from synthesizer_jax.base.registry import JSON
from synthesizer_jax.preparation.importers.archives import ARCHIVES, read_split
from synthesizer_jax.preparation.importers.files import SplitFiles
from synthesizer_jax.preparation.importers.reading import (
    Cursor,
    ReadError,
    Row,
    find_field,
    is_blank,
    read_lines,
    value_text,
)
from synthesizer_jax.preparation.writing import FeatureType, staging, write_dataset
from synthesizer_jax.tasks import coreference, preprocessors
from synthesizer_jax.tasks.definitions import DEFINITIONS
from synthesizer_jax.tasks.stored import newest_version

with epy.lazy_imports():
    import tensorflow_datasets as tfds

VERSION = "1.0.0"
"""The version number of data sets that are not read from an archive."""
_TITLE = re.compile(r" = [^=].* = ?")


@dataclasses.dataclass
class SplitReport:
    """A report on the import of one split.

    Attributes:
      dataset: the name of the TFDS data set.
      split: the name of the split.
      files: the files of the split that were found.
      published: the published number of rows. `None` means that the number is not known, or that
        any number of rows is accepted.
      pattern: the pattern of the file names in an archive. The pattern is empty for files that a
        user names.
      rows: the number of rows that were written.
      dropped: the number of rows that were left out because they lack a value.
      lossy: the number of rows with the character U+FFFD, which other programs write in place of
        characters that they could not decode.
      blank_inputs: the number of rows of a user's task that have a blank input.
      targets: the number of rows with each label, for a user's task.
    """

    dataset: str
    split: str
    files: Sequence[pathlib.Path]
    published: int | None = None
    pattern: str = ""
    rows: int = 0
    dropped: int = 0
    lossy: int = 0
    blank_inputs: int = 0
    targets: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def name(self) -> str:
        """The name of the TFDS data set and the split, such as ``glue/mnli:validation_matched``."""
        return f"{self.dataset}:{self.split}"

    def convert(
        self,
        rows: Iterable[tuple[str, Row | None]],
        cursor: Cursor,
        convert: Callable[[Row], Row],
        *,
        phase: Phase = silent_phase,
    ) -> Iterator[Row]:
        """Converts and counts rows.

        Args:
          rows: pairs of a location and a row. `None` in place of a row means that the row is left
            out.
          cursor: remembers the location for errors.
          convert: a function that converts a row.
          phase: a function that reports progress.

        Yields:
          The converted rows.

        Raises:
          ReadError: if there are no rows.
        """
        advance = phase(f"importing {self.name}", self.published)
        for row in report_items(cursor.follow(rows), advance):
            if row is None:
                self.dropped += 1
                continue
            values = convert(row)
            self.rows += 1
            self.lossy += any("\ufffd" in v for v in values.values() if isinstance(v, str))
            yield values
        if not self.rows:
            files = ", ".join(map(str, self.files))
            problem = f"{self.name} has no rows in {files}."
            if self.dropped:
                problem += f" Incomplete rows that were left out: {self.dropped:,}."
            raise ReadError(problem)


def report_lines(reports: Sequence[SplitReport]) -> Iterator[str]:
    """Yields the reports as lines of aligned text.

    Each split has a line, and a second line if it has labels. The last line is a summary.
    """
    width = max(len(report.name) for report in reports)
    for report in reports:
        if not report.files:
            yield f"{report.name:{width}}  missing ({report.pattern})"
            continue
        rows = f"{report.rows:>7,} rows"
        if report.published not in (None, report.rows):
            rows += f" of {report.published:,} published"
        if report.dropped:
            rows += f", {report.dropped:,} left out"
        if report.lossy:
            rows += f", {report.lossy:,} with U+FFFD, which stands for lost text"
        if report.blank_inputs:
            rows += f", {report.blank_inputs:,} with a blank input"
        yield f"{report.name:{width}}  {rows}  {report.files[-1]}"
        if report.targets:
            yield "  targets: " + ", ".join(
                f"{word} {n:,}" for word, n in report.targets.most_common()
            )
    present = [report.rows for report in reports if report.files]
    yield f"{len(present)} of {len(reports)} splits, {sum(present):,} rows"


def feature_values(row: Row, features: Mapping[str, FeatureType], labels: Mapping[str, str]) -> Row:
    """Returns the value of every feature, which is the value of the row's field of the same name.

    Args:
      row: the row.
      features: the types of the features by name.
      labels: a dictionary that maps values in the row to the label words for which they stand.

    Raises:
      ValueError: if the row lacks a field, or if the value of a field has the wrong kind.
    """
    return {name: _value(row, name, kind, labels) for name, kind in features.items()}


def _value(row: Row, name: str, feature: FeatureType, labels: Mapping[str, str]) -> JSON:
    """Returns the value of a feature, which is the value of the row's field of the same name."""
    value = find_field(row, name)
    if isinstance(feature, dict):
        fields = value if isinstance(value, dict) else {name: value}
        return {part: _value(fields, part, kind, labels) for part, kind in feature.items()}
    if isinstance(feature, tfds.features.Sequence):
        if not isinstance(value, list) or not value:
            raise ValueError(
                f"The field {name!r} is {str(value)[:60]!r}, but it must be a list of texts."
            )
        return [value_text(text, name) for text in value]
    if isinstance(feature, tfds.features.ClassLabel):
        return _label(value, feature.names, labels)
    if not isinstance(feature, tfds.features.Text):
        is_number = isinstance(feature, tfds.features.Tensor) and feature.np_dtype == np.float32
        # The score of STS-B is the only floating-point feature.
        if is_number and not math.isfinite(float(value)):
            raise ValueError(f"The field {name!r} is {value}, which is not a finite number.")
        return float(value) if is_number else value
    return value_text(value, name)


def _refuse_blank(name: str, value: JSON) -> None:
    """Raises a `ValueError` if the value of a feature is a blank text or contains a blank text."""
    if isinstance(value, dict):
        for part, inner in value.items():
            _refuse_blank(part, inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_blank(name, inner)
    elif isinstance(value, str) and is_blank(value):
        raise ValueError(f"The field {name!r} has a blank text. Fill it in, or remove the row.")


def _label(value: JSON, words: Sequence[str], labels: Mapping[str, str]) -> JSON:
    """Returns a label as a label word or as an index. The index of a hidden label is −1.

    Raises:
      ValueError: if the value is not a label.
    """
    value = labels.get(str(value), value)
    if value in words:
        return value
    # In some files, the label is an index that is written as text.
    if value in map(str, range(-1, len(words))):
        return int(value)
    if not isinstance(value, int) or not -1 <= value < len(words):
        raise ValueError(
            f"The label {value!r} is neither a number below {len(words)} nor one of the words "
            f"{', '.join(words)}."
        )
    return int(value)


def import_archive(
    name: str,
    source: pathlib.Path,
    data_dir: pathlib.Path,
    *,
    renew: bool = False,
    phase: Phase = silent_phase,
) -> list[SplitReport]:
    """Writes the TFDS data sets of an archive. If a row cannot be read, nothing is written.

    If a split has no files, its report says that the split is missing.

    Args:
      name: a key of `ARCHIVES`.
      source: the directory of the files, or its parent if the directory has the name `name`. The
        files may be compressed with gzip.
      data_dir: a TFDS data directory. The directory is created if it does not exist.
      renew: whether existing data sets are replaced. If `renew` is `False`, the splits of existing
        data sets are kept.
      phase: a function that reports progress.

    Returns:
      A report for every split.

    Raises:
      ValueError: if no file was found, or a row is invalid. The message contains the file, the
        location and the reason.
    """
    source = source / name if (source / name).is_dir() else source
    if not source.is_dir():
        raise ValueError(
            f"{source} is not a directory. Give the directory that holds the files of {name}."
        )
    reports = archive_reports(name, source)
    if not any(report.files for report in reports):
        lacking = ", ".join(next(iter(s.values())).patterns[0] for s in ARCHIVES[name].values())
        raise ValueError(
            f"{source} has none of the files of {name}: {lacking}. Nothing was imported."
        )

    def read(report: SplitReport) -> Iterator[tuple[str, Row | None]]:
        return read_split(report.dataset, report.files)

    return _write(reports, read, data_dir, {}, renew=renew, phase=phase)


def archive_reports(name: str, source: pathlib.Path) -> list[SplitReport]:
    """Returns a report for every split of an archive's data sets, before the splits are read."""
    return [
        SplitReport(dataset, split, layout.find(source), layout.rows, layout.patterns[0])
        for dataset, splits in ARCHIVES[name].items()
        for split, layout in splits.items()
    ]


def import_dataset(
    dataset: str,
    splits: Mapping[str, SplitFiles],
    data_dir: pathlib.Path,
    *,
    labels: Mapping[str, str],
    renew: bool = False,
    phase: Phase = silent_phase,
) -> list[SplitReport]:
    """Writes a TFDS data set from files whose fields have the names of the data set's features.

    If there is an error, nothing is written. If a line of aligned files is blank, the row is left
    out. In other files, a blank text is an error. For WikiText, the rows are articles.

    Args:
      dataset: one of `archives.DATASETS`.
      splits: the files of each split.
      data_dir: a TFDS data directory.
      labels: a dictionary that maps values in the files to the label words for which they stand.
      renew: whether an existing data set is replaced. If `renew` is `False`, the existing splits
        are kept.
      phase: a function that reports progress.

    Returns:
      A report for every split.

    Raises:
      ValueError: if a row is invalid, if a split is unknown or empty, if a split exists already, or
        if the data set exists in a different version.
    """
    known = dict.fromkeys(s for task in DEFINITIONS if task.dataset == dataset for s in task.splits)
    for split in splits:
        if split not in known:
            raise ValueError(
                f"{dataset} has no split {split!r}. Its splits are {', '.join(known)}."
            )
    newest = newest_version(dataset, data_dir)
    if newest is not None and newest.name != VERSION:
        raise ValueError(
            f"{newest} is another version of the data set, and would be read instead of the new "
            "files. Delete it, or use another --data-dir."
        )
    reports = [SplitReport(dataset, split, files.files) for split, files in splits.items()]

    def read(report: SplitReport) -> Iterator[tuple[str, Row | None]]:
        if dataset.startswith("wikitext/"):
            return _articles(report.files)
        return splits[report.split].whole_rows()

    return _write(reports, read, data_dir, labels, renew=renew, phase=phase)


def _articles(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row | None]]:
    """Yields the articles of WikiText, without blank lines at their beginnings and ends.

    An article begins with a line of the form `` = Title = `` after a blank line.
    """
    for path in paths:
        # Keep the lines of the current article and the previous line.
        text: list[str] = []
        previous = ""
        for number, line in read_lines(path):
            if _TITLE.fullmatch(line) and not previous.strip() and text:
                yield f"{path}, before line {number}", {"text": "\n".join(text).rstrip()}
                text = []
            if text or line.strip():
                text.append(line)
            previous = line
        if text:
            yield f"{path}, the end", {"text": "\n".join(text).rstrip()}


def _write(
    reports: list[SplitReport],
    read: Callable[[SplitReport], Iterator[tuple[str, Row | None]]],
    data_dir: pathlib.Path,
    labels: Mapping[str, str],
    *,
    renew: bool,
    phase: Phase,
) -> list[SplitReport]:
    """Writes the data sets of splits, and returns the reports.

    Args:
      reports: the splits.
      read: a function that reads the rows of a split.
      data_dir: a TFDS data directory.
      labels: a dictionary that maps values in the files to the label words for which they stand.
      renew: whether existing data sets are replaced.
      phase: a function that reports progress.
    """
    cursor = Cursor()

    def rows(report: SplitReport, features: Mapping[str, FeatureType]) -> Iterator[Row]:
        def values(row: Row) -> Row:
            found = feature_values(row, features, labels)
            # A blank text is an error only in a user's files, because published data sets contain
            # blank texts.
            for name in () if report.pattern else found:
                _refuse_blank(name, found[name])
            return found

        return report.convert(read(report), cursor, values, phase=phase)

    with staging(data_dir, renew=renew) as folder, cursor.named():
        present = (report for report in reports if report.files)
        for dataset, group in itertools.groupby(present, key=lambda report: report.dataset):
            version, features = dataset_features(dataset, folder)
            splits = {report.split: functools.partial(rows, report, features) for report in group}
            write_dataset(dataset, version, features, splits, folder)
    return reports


def dataset_features(dataset: str, folder: pathlib.Path) -> tuple[str, Mapping[str, FeatureType]]:
    """Returns the version and the features of a data set.

    For GLUE and SuperGLUE, the version and the features are the same as in TFDS. For other data
    sets, the features are those that the preprocessor of the data set's task reads.
    """
    task = next(task for task in DEFINITIONS if task.dataset == dataset)
    if dataset.startswith(("glue/", "super_glue/")):
        builder = tfds.builder(dataset, data_dir=folder)
        return str(builder.version), dict(builder.info.features.items())

    text = tfds.features.Text()
    preprocess = task.preprocess
    if isinstance(preprocess, functools.partial) and "features" in preprocess.keywords:
        features: dict[str, FeatureType] = dict.fromkeys(preprocess.keywords["features"], text)
        if task.label_words:
            features["label"] = tfds.features.ClassLabel(names=task.label_words)
        return VERSION, features

    texts = tfds.features.Sequence(text)
    features_of: Mapping[object, Mapping[str, FeatureType]] = {
        preprocessors.language_modeling: {"text": text},
        coreference.dpr: {
            "sentence": text,
            "pronoun": text,
            "candidates": texts,
            "label": tfds.features.ClassLabel(num_classes=2),
        },
        preprocessors.dialogue: {"persona": texts, "history": texts, "reply": text},
        preprocessors.squad: {"question": text, "context": text, "answers": {"text": texts}},
    }
    return VERSION, features_of[getattr(preprocess, "func", preprocess)]
