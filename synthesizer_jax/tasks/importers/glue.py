"""Conversion of GLUE files in any distributed form to the official tsv format that TFDS reads.

TFDS's own code interprets the rows (labels, ids, dropped rows). This module only checks them, so
that a row that TFDS cannot read, or silently misreads, is reported with its line number. Quoting is
disabled throughout: a quotation mark is an ordinary character.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from synthesizer_jax.tasks.importers import reading
from synthesizer_jax.tasks.importers.layouts import Source, Split, find_sibling
from synthesizer_jax.tasks.importers.reading import (
    import_error,
    read_json_entries,
    read_json_lines,
    read_lines,
)
from synthesizer_jax.tasks.importers.staged import Staged

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

Row = tuple[int | str, list[str]]

_COLA = ["source", "is_acceptable", "star", "sentence"]  # train and dev have no header line
_MRPC_TEXTS = ("#1 String", "#2 String")
_MRPC_IDS = ("#1 ID", "#2 ID")

_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?")
"""The format of scores; Python's ``float`` also accepts spaces, underscores and other digits."""


@dataclasses.dataclass(frozen=True)
class _Check:
    """The requirements of a row of one file; none may repeat the header line.

    Attributes:
      path: the file, for error messages.
      header: its columns.
      texts: columns without which TFDS drops a row.
      label: the label column; None in files without labels.
      classes: label names; None for a score from 0 to 5.
      drops_short_rows: whether TFDS drops short rows; False if it fails on them.
      allows_extra_fields: whether rows may have more fields than columns.
    """

    path: pathlib.Path
    header: list[str]
    texts: tuple[str, ...]
    label: str | None
    classes: list[str] | None
    drops_short_rows: bool = True
    allows_extra_fields: bool = False

    def __post_init__(self) -> None:
        for column in (*self.texts, *([self.label] if self.label else [])):
            if column not in self.header:
                raise import_error(self.path, 1, f"no column {column!r} among {self.header}")

    def keeps(self, where: int | str, fields: list[str]) -> bool:
        """Returns True if TFDS makes an example of this row, False if it drops the row.

        Raises:
          ValueError: the row is invalid.
        """
        if len(fields) > len(self.header) and not self.allows_extra_fields:
            raise self._field_count_error(where, fields)
        if fields == self.header and len(fields) > 1:
            raise import_error(self.path, where, "the header line is there again")
        longest = max(map(len, fields))
        if longest > csv.field_size_limit():
            limit = f"the {csv.field_size_limit():,} that TFDS reads"
            raise import_error(
                self.path, where, f"a field of {longest:,} characters, more than {limit}"
            )
        row = dict(zip(self.header, fields, strict=False))
        is_short = fields == [""] or any(text not in row for text in self.texts)
        if is_short and not self.drops_short_rows:
            raise self._field_count_error(where, fields)
        if is_short:
            return False
        if self.label is None:
            return self._is_numbered(where, row)
        if self.classes is None:
            return self._is_score(where, row.get(self.label, ""))
        return self._is_class(where, row.get(self.label, ""))

    def _is_numbered(self, where: int | str, row: dict[str, str]) -> bool:
        """Checks that the row number is a number; returns True.

        In files without labels only the row number shows that the columns are those of the header.
        """
        for column in ("index", "id"):
            if column in row and not row[column].strip().isdecimal():
                reason = f"{column!r} is {row[column][:40]!r}, not a number; are columns swapped?"
                raise import_error(self.path, where, reason)
        return True

    def _is_class(self, where: int | str, label: str) -> bool:
        assert self.classes is not None
        if label in self.classes or label in {str(i) for i in range(len(self.classes))}:
            return True
        if label or not self.drops_short_rows:
            allowed = f"{self.classes} or a number below {len(self.classes)}"
            raise import_error(self.path, where, f"label {label[:40]!r} is not one of {allowed}")
        return False

    def _is_score(self, where: int | str, label: str) -> bool:
        if not _NUMBER.fullmatch(label) or float(label) > 5:
            raise import_error(
                self.path, where, f"score {label[:40]!r} is not a number from 0 to 5"
            )
        return True

    def _field_count_error(self, where: int | str, fields: list[str]) -> ValueError:
        reason = f"{len(fields)} tab-separated fields where {len(self.header)} belong"
        return import_error(self.path, where, reason)


def stage(
    builder: tfds.core.GeneratorBasedBuilder,
    split: Split,
    source: Source,
    *,
    target: pathlib.Path,
) -> Staged:
    """Writes the rows of `source` to `target` in the format of TFDS's reader of this task.

    Args:
      builder: the TFDS builder of the task.
      split: the split to read.
      source: a tsv, jsonl (keys are TFDS's feature names) or json file (`text_a`, `text_b`,
        `label`).
      target: the file to write; files beside it may be written too.

    Raises:
      ValueError: a row is invalid.
    """
    config = builder.builder_config
    if config.name == "mrpc":
        return _stage_mrpc(config, split, source, target=target)
    is_test = split.name.startswith("test")
    headerless = config.name == "cola" and not is_test
    columns = [*config.text_features.values()]
    if not is_test:
        columns.append(config.label_column)
    columns = _COLA if headerless else columns
    header, rows = _read(source, config, columns=columns, headerless=headerless)
    check = _Check(
        path=source.path,
        header=header,
        texts=tuple(config.text_features.values()),
        label=None if is_test and config.label_column not in header else config.label_column,
        classes=config.label_classes,
        drops_short_rows=not headerless,
        allows_extra_fields=config.name == "qqp",
    )
    num_kept, num_dropped = _write(target, rows, header=None if headerless else header, check=check)
    arguments = {"data_file": str(target), "split": "test" if is_test else "train"}
    return Staged(source.path, arguments, num_kept, num_dropped)


def _read(
    source: Source, config: tfds.core.BuilderConfig, *, columns: list[str], headerless: bool
) -> tuple[list[str], Iterator[Row]]:
    """Returns the columns of a file and its rows; forms without a header line have `columns`."""
    label = {config.label_column: "label"}
    if source.format == "jsonl":
        keys = {column: feature for feature, column in config.text_features.items()} | label
        return columns, _pick(source.path, read_json_lines(source.path), columns=columns, keys=keys)
    if source.format == "json":
        keys = dict(zip(config.text_features.values(), ("text_a", "text_b"), strict=False)) | label
        return columns, _pick(
            source.path, read_json_entries(source.path), columns=columns, keys=keys
        )
    rows = ((number, line.split("\t")) for number, line in read_lines(source.path))
    if headerless:
        return columns, rows
    if source.path.name.startswith("textfooler"):
        return [columns[-1], *columns[:-1]], rows
    _, header = next(rows, (1, [""]))
    return header, rows


def _pick(
    path: pathlib.Path,
    entries: Iterable[tuple[int | str, reading.Row]],
    *,
    columns: list[str],
    keys: dict[str, str],
) -> Iterator[Row]:
    """Yields the fields of JSON objects in the order of `columns`, empty for columns without a key."""
    column_keys = [keys.get(column) for column in columns]
    for where, entry in entries:
        fields = []
        for key in column_keys:
            value = "" if key is None else entry.get(key)
            types = str | int | float if key == "label" else str
            if isinstance(value, bool) or not isinstance(value, types):
                raise import_error(path, where, f"{key!r} is missing or no text")
            if any(separator in str(value) for separator in "\t\n\r"):
                raise import_error(path, where, f"{key!r} holds a tab or a line end")
            fields.append(str(value))
        yield where, fields


def _write(
    target: pathlib.Path, rows: Iterable[Row], *, header: list[str] | None, check: _Check
) -> tuple[int, int]:
    """Writes the rows; returns how many of them TFDS keeps and how many it drops."""
    counts = {True: 0, False: 0}
    with target.open("w", encoding="utf-8", newline="\n") as out:
        if header is not None:
            out.write("\t".join(header) + "\n")
        for where, fields in rows:
            counts[check.keeps(where, fields)] += 1
            out.write("\t".join(fields) + "\n")
    return counts[True], counts[False]


def _stage_mrpc(
    config: tfds.core.BuilderConfig, split: Split, source: Source, *, target: pathlib.Path
) -> Staged:
    """Stages MRPC from Microsoft's files and GLUE's list of validation ids, or GLUE's own files.

    TFDS removes three bytes (the byte-order mark) from the training file, so the copy begins with
    one. With GLUE's own files `idx` counts the rows of a file; with Microsoft's those of train and
    validation together.
    """
    if source.format != "tsv":
        raise ValueError(f"{source.path}: MRPC is read from tsv files; nothing was imported")
    is_test = split.name == "test"
    rows = ((number, line.split("\t")) for number, line in read_lines(source.path))
    _, header = next(rows, (1, [""]))
    check = _Check(
        path=source.path,
        header=header,
        texts=_MRPC_TEXTS if is_test else (*_MRPC_IDS, *_MRPC_TEXTS),
        label=None if is_test else "Quality",
        classes=config.label_classes,
        drops_short_rows=False,
    )
    ids: list[tuple[str, ...]] = []

    def iterate_rows() -> Iterator[Row]:
        for where, fields in rows:
            row = dict(zip(header, fields, strict=False))
            ids.append(tuple(row.get(column, "") for column in _MRPC_IDS))
            yield where, fields

    columns = [header[0] if is_test else "\ufeff" + header[0], *header[1:]]
    num_rows, _ = _write(target, iterate_rows(), header=columns, check=check)
    if is_test:
        return Staged(source.path, _mrpc_arguments("test", test=target), num_rows)
    dev_ids = _mrpc_dev_ids(split, source, ids)
    listing = target.with_name(target.name + ".ids")
    listing.write_text(
        "".join("\t".join(pair) + "\n" for pair in sorted(dev_ids)), encoding="utf-8"
    )
    num_dev = sum(pair in dev_ids for pair in ids)
    mrpc_split, num_kept = (
        ("train", num_rows - num_dev) if split.name == "train" else ("dev", num_dev)
    )
    return Staged(source.path, _mrpc_arguments(mrpc_split, train=target, dev_ids=listing), num_kept)


def _mrpc_dev_ids(split: Split, source: Source, ids: list[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Returns the id pairs of the validation split.

    With Microsoft's file these are GLUE's list; of GLUE's own files, a training file has none and a
    validation file has all of its ids.
    """
    if "msr_paraphrase" not in source.path.name:
        return set() if split.name == "train" else set(ids)
    listing = find_sibling(source.path, ("dev_ids.tsv", "mrpc_dev_ids.tsv"))
    if listing is None:
        raise ValueError(
            f"{source.path} needs GLUE's dev_ids.tsv beside it to tell train from validation; add "
            "it, or leave only train.tsv and dev.tsv there; nothing was imported"
        )
    pairs: set[tuple[str, ...]] = set()
    for number, line in read_lines(listing):
        fields = line.split("\t")
        if len(fields) < 2:
            raise import_error(listing, number, "two tab-separated ids were expected")
        pairs.add((fields[0], fields[1]))
    return pairs


def _mrpc_arguments(split: str, **files: pathlib.Path) -> dict[str, object]:
    names = {name: str(path) for name, path in files.items()}
    return {"data_file": "", "split": split, "mrpc_files": names}
