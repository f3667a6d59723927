"""Import of the data sets of tasks: from archives as published, or from files that a user names.

Data sets have the features that formats read, named as TFDS's, so that data prepared by TFDS can take
their place.
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
_TITLE = re.compile(r" = [^=].* = ?")


@dataclasses.dataclass
class SplitReport:
    """The import of one split.

    Attributes:
      dataset: the TFDS data set.
      split: the split.
      files: the files that are there.
      published: number of rows that were published; None: not known, or any.
      pattern: names the files of an archive; empty for files of a user's.
      rows: number of examples written.
      dropped: number of rows that are left out because they lack something.
      lossy: number of rows with the character U+FFFD, which other programs write for text that they
        could not read.
      blank_inputs: number of rows of a user's task with a blank input.
      targets: how often each label of a user's task occurs.
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
        """The TFDS data set and the split, such as `glue/mnli:validation_matched`."""
        return f"{self.dataset}:{self.split}"

    def convert(
        self, rows: Iterable[tuple[str, Row | None]], cursor: Cursor, convert: Callable[[Row], Row]
    ) -> Iterator[Row]:
        """Yields what a function makes of the rows, and counts them; None is a row that is left out."""
        for row in cursor.follow(rows):
            if row is None:
                self.dropped += 1
                continue
            values = convert(row)
            self.rows += 1
            self.lossy += any("\ufffd" in v for v in values.values() if isinstance(v, str))
            yield values
        if not self.rows:
            left_out = f", without {self.dropped:,} that are left out," if self.dropped else ""
            files = ", ".join(map(str, self.files))
            raise ReadError(f"{self.name} has no rows{left_out} in {files}; nothing was imported")


def report_lines(reports: Sequence[SplitReport]) -> Iterator[str]:
    """Yields the reports as aligned plain text: a line per split, its labels, and a summary."""
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
            yield "  targets: " + ", ".join(f"{word} {n:,}" for word, n in report.targets.most_common())
    present = [report.rows for report in reports if report.files]
    yield f"{len(present)} of {len(reports)} splits, {sum(present):,} rows"


def feature_values(row: Row, features: Mapping[str, FeatureType], labels: Mapping[str, str]) -> Row:
    """Returns the values of features by name, of which a row has a field each.

    Raises:
      ValueError: it lacks one, or its value is of another kind.
    """
    return {name: _value(row, name, kind, labels) for name, kind in features.items()}


def _value(row: Row, name: str, feature: FeatureType, labels: Mapping[str, str]) -> JSON:
    """Returns the value of a feature, whose field a row has."""
    value = find_field(row, name)
    if isinstance(feature, dict):
        fields = value if isinstance(value, dict) else {name: value}
        return {part: _value(fields, part, kind, labels) for part, kind in feature.items()}
    if isinstance(feature, tfds.features.Sequence):
        if not isinstance(value, list) or not value:
            raise ValueError(f"the field {name!r} is {str(value)[:60]!r}, which is no list of texts")
        return [value_text(text, name) for text in value]
    if isinstance(feature, tfds.features.ClassLabel):
        return _label(value, feature.names, labels)
    if not isinstance(feature, tfds.features.Text):
        is_number = isinstance(feature, tfds.features.Tensor) and feature.np_dtype == np.float32
        if is_number and not math.isfinite(float(value)):  # STS-B's
            raise ValueError(f"the field {name!r} is {value}, which is no finite number")
        return float(value) if is_number else value
    return value_text(value, name)


def _refuse_blank(name: str, value: JSON) -> None:
    """Raises a `ValueError` if the value of a feature is, or holds, a blank text."""
    if isinstance(value, dict):
        for part, inner in value.items():
            _refuse_blank(part, inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_blank(name, inner)
    elif isinstance(value, str) and is_blank(value):
        raise ValueError(f"the field {name!r} has a blank text; write it, or remove the row")


def _label(value: JSON, words: Sequence[str], labels: Mapping[str, str]) -> JSON:
    """Returns a word of a label, its index, or −1 of a hidden one."""
    value = labels.get(str(value), value)
    if value in words or value in map(str, range(-1, len(words))):
        return value if value in words else int(value)
    if not isinstance(value, int) or not -1 <= value < len(words):
        raise ValueError(
            f"the label {value!r} is neither a number below {len(words)} nor one of {', '.join(words)}"
        )
    return int(value)


def import_archive(
    name: str, source: pathlib.Path, data_dir: pathlib.Path, *, renew: bool = False
) -> list[SplitReport]:
    """Writes the TFDS data sets of an archive from its files; none if a row cannot be read.

    Splits whose files are not there are reported as missing.

    Args:
      name: a key of `ARCHIVES`.
      source: the directory of the files, or its parent if the directory is called `name`; files may be
        plain or gzip.
      data_dir: a TFDS data directory; created if it does not exist.
      renew: whether data sets that exist are replaced; otherwise their splits are kept.

    Raises:
      ValueError: no file was found, or a row is invalid; the message has file, place and reason.
    """
    source = source / name if (source / name).is_dir() else source
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give the one that holds the files of {name}")
    reports = archive_reports(name, source)
    if not any(report.files for report in reports):
        lacking = ", ".join(next(iter(s.values())).patterns[0] for s in ARCHIVES[name].values())
        raise ValueError(f"{source} lacks {lacking}; nothing was imported")
    return _write(reports, lambda r: read_split(r.dataset, r.files), data_dir, {}, renew=renew)


def archive_reports(name: str, source: pathlib.Path) -> list[SplitReport]:
    """Returns the splits of all data sets of an archive, before they are read."""
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
) -> list[SplitReport]:
    """Writes a TFDS data set from files whose fields are its features; all of it or nothing.

    Rows of aligned files are left out if one of their lines is blank; in other files, a blank text is an
    error. The rows of WikiText are articles.

    Args:
      dataset: one of `archives.DATASETS`.
      splits: the files of its splits.
      data_dir: a TFDS data directory.
      labels: label words by the values that stand for them in the files.
      renew: whether a data set that exists is replaced; otherwise its splits are kept.

    Raises:
      ValueError: a row is broken, a split is empty, there already or unknown, or the data set is there
        in another version.
    """
    known = dict.fromkeys(s for task in DEFINITIONS if task.dataset == dataset for s in task.splits)
    if unknown := [split for split in splits if split not in known]:
        raise ValueError(f"{dataset} has no split {unknown[0]!r}; it has {', '.join(known)}")
    newest = newest_version(dataset, data_dir)
    if newest is not None and newest.name != VERSION:
        raise ValueError(f"{newest} would be read instead; delete it, or use another --data-dir")
    reports = [SplitReport(dataset, split, files.files) for split, files in splits.items()]

    def read(report: SplitReport) -> Iterator[tuple[str, Row | None]]:
        if dataset.startswith("wikitext/"):
            return _articles(report.files)
        return splits[report.split].whole_rows()

    return _write(reports, read, data_dir, labels, renew=renew)


def _articles(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, Row | None]]:
    """Yields WikiText's articles, without blank lines at both ends, which start with `` = Title = ``."""
    for path in paths:
        text, previous = list[str](), ""
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
) -> list[SplitReport]:
    """Writes the data sets of splits, whose rows a function reads, and returns the reports."""
    cursor = Cursor()

    def rows(report: SplitReport, features: Mapping[str, FeatureType]) -> Iterator[Row]:
        def values(row: Row) -> Row:
            found = feature_values(row, features, labels)
            for name in () if report.pattern else found:  # published texts stay as they are
                _refuse_blank(name, found[name])
            return found

        return report.convert(read(report), cursor, values)

    with staging(data_dir, renew=renew) as folder, cursor.named():
        present = (report for report in reports if report.files)
        for dataset, group in itertools.groupby(present, key=lambda report: report.dataset):
            version, features = dataset_features(dataset, folder)
            splits = {report.split: functools.partial(rows, report, features) for report in group}
            write_dataset(dataset, version, features, splits, folder)
    return reports


def dataset_features(dataset: str, folder: pathlib.Path) -> tuple[str, Mapping[str, FeatureType]]:
    """Returns the version and the features of a data set.

    Those of benchmarks are TFDS's; of others, they are what the format of their tasks reads.
    """
    task = next(task for task in DEFINITIONS if task.dataset == dataset)
    if dataset.startswith(("glue/", "super_glue/")):
        builder = tfds.builder(dataset, data_dir=folder)
        return str(builder.version), dict(builder.info.features.items())
    text, label = tfds.features.Text(), tfds.features.ClassLabel(names=task.label_words)
    texts, preprocess = tfds.features.Sequence(text), task.preprocess
    pronoun = {"sentence": text, "pronoun": text, "candidates": texts}
    if isinstance(preprocess, functools.partial) and "features" in preprocess.keywords:
        labeled = {"label": label} if task.label_words else {}
        return VERSION, {**dict.fromkeys(preprocess.keywords["features"], text), **labeled}
    features_of: Mapping[object, Mapping[str, FeatureType]] = {
        preprocessors.language_modeling: {"text": text},
        coreference.dpr: {**pronoun, "label": tfds.features.ClassLabel(num_classes=2)},
        preprocessors.dialogue: {"persona": texts, "history": texts, "reply": text},
        preprocessors.squad: {"question": text, "context": text, "answers": {"text": texts}},
    }
    return VERSION, features_of[getattr(preprocess, "func", preprocess)]
