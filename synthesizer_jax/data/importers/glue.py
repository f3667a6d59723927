"""GLUE files in any of their distributed forms, rewritten as the official tsv that TFDS reads.

What a row means (labels, ids, rows left out) stays TFDS's own code. Here every row is only
checked, so that what TFDS would trip over, or silently misread, is named with its line.
Quoting is off throughout: a quotation mark is an ordinary character.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from synthesizer_jax.data.importers.layouts import Source, Split, find_sibling
from synthesizer_jax.data.importers.reading import (
    broken,
    read_json_entries,
    read_json_lines,
    read_lines,
)
from synthesizer_jax.data.importers.staged import Staged

Row = tuple[int | str, list[str]]

_COLA = ["source", "is_acceptable", "star", "sentence"]  # train and dev have no header line
_MRPC_TEXTS = ("#1 String", "#2 String")
_MRPC_IDS = ("#1 ID", "#2 ID")

_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?")
"""What is read as a score; Python's ``float`` reads spaces, underscores and other digits too."""


@dataclasses.dataclass(frozen=True)
class _Check:
    """What a row of one file must be, besides being no second header line.

    Attributes:
      path: the file, for messages.
      header: its columns.
      texts: columns without which TFDS drops a row.
      label: the label column, None in files without labels.
      classes: label names; None for a score from 0 to 5.
      ragged: short rows are dropped by TFDS; False where they make it fail.
      wider: rows with more fields than columns are legal.
    """

    path: pathlib.Path
    header: list[str]
    texts: tuple[str, ...]
    label: str | None
    classes: list[str] | None
    ragged: bool = True
    wider: bool = False

    def __post_init__(self) -> None:
        for column in (*self.texts, *([self.label] if self.label else [])):
            if column not in self.header:
                raise broken(self.path, 1, f"no column {column!r} among {self.header}")

    def keeps(self, where: int | str, fields: list[str]) -> bool:
        """True if TFDS makes an example of this row, False if it drops it.

        Raises:
          ValueError: neither; the row is broken.
        """
        if len(fields) > len(self.header) and not self.wider:
            raise self._broken(where, fields)
        if fields == self.header and len(fields) > 1:
            raise broken(self.path, where, "the header line is there again")
        longest = max(map(len, fields))
        if longest > csv.field_size_limit():
            limit = f"the {csv.field_size_limit():,} that TFDS reads"
            raise broken(self.path, where, f"a field of {longest:,} characters, more than {limit}")
        row = dict(zip(self.header, fields, strict=False))
        short = fields == [""] or any(text not in row for text in self.texts)
        if short and not self.ragged:
            raise self._broken(where, fields)
        if short:
            return False
        if self.label is None:
            return self._is_numbered(where, row)
        if self.classes is None:
            return self._is_score(where, row.get(self.label, ""))
        return self._is_class(where, row.get(self.label, ""))

    def _is_numbered(self, where: int | str, row: dict[str, str]) -> bool:
        """Without labels a row's number alone shows that its columns are those of the header."""
        for column in ("index", "id"):
            if column in row and not row[column].strip().isdecimal():
                reason = f"{column!r} is {row[column][:40]!r}, not a number; are columns swapped?"
                raise broken(self.path, where, reason)
        return True

    def _is_class(self, where: int | str, label: str) -> bool:
        assert self.classes is not None
        if label in self.classes or label in {str(i) for i in range(len(self.classes))}:
            return True
        if label or not self.ragged:
            allowed = f"{self.classes} or a number below {len(self.classes)}"
            raise broken(self.path, where, f"label {label[:40]!r} is not one of {allowed}")
        return False

    def _is_score(self, where: int | str, label: str) -> bool:
        if not _NUMBER.fullmatch(label) or float(label) > 5:
            raise broken(self.path, where, f"score {label[:40]!r} is not a number from 0 to 5")
        return True

    def _broken(self, where: int | str, fields: list[str]) -> ValueError:
        reason = f"{len(fields)} tab-separated fields where {len(self.header)} belong"
        return broken(self.path, where, reason)


def stage(builder: Any, split: Split, source: Source, target: pathlib.Path) -> Staged:
    """Writes the rows of `source` to `target` as TFDS's reader of this task wants them.

    Args:
      builder: the TFDS builder of the task.
      split: the split being read.
      source: tsv, jsonl (TFDS's feature names as keys) or json (`text_a`, `text_b`, `label`).
      target: a file to write; its neighbours may be written too.

    Raises:
      ValueError: a row is broken.
    """
    config = builder.builder_config
    if config.name == "mrpc":
        return _stage_mrpc(config, split, source, target)
    test = split.name.startswith("test")
    headerless = config.name == "cola" and not test
    columns = [*config.text_features.values()]
    if not test:
        columns.append(config.label_column)
    header, rows = _read(source, config, _COLA if headerless else columns, headerless)
    check = _Check(
        path=source.path,
        header=header,
        texts=tuple(config.text_features.values()),
        label=None if test and config.label_column not in header else config.label_column,
        classes=config.label_classes,
        ragged=not headerless,
        wider=config.name == "qqp",
    )
    kept, dropped = _write(target, None if headerless else header, rows, check)
    arguments = {"data_file": str(target), "split": "test" if test else "train"}
    return Staged(source.path, arguments, kept, dropped)


def _read(
    source: Source, config: Any, columns: list[str], headerless: bool
) -> tuple[list[str], Iterator[Row]]:
    """The columns of a file and its rows; forms without a header line get `columns`."""
    label = {config.label_column: "label"}
    if source.format == "jsonl":
        keys = {column: feature for feature, column in config.text_features.items()} | label
        return columns, _pick(source.path, read_json_lines(source.path), columns, keys)
    if source.format == "json":
        keys = dict(zip(config.text_features.values(), ("text_a", "text_b"), strict=False)) | label
        return columns, _pick(source.path, read_json_entries(source.path), columns, keys)
    rows = ((number, line.split("\t")) for number, line in read_lines(source.path))
    if headerless:
        return columns, rows
    if source.path.name.startswith("textfooler"):
        return [columns[-1], *columns[:-1]], rows
    _, header = next(rows, (1, [""]))
    return header, rows


def _pick(
    path: pathlib.Path,
    entries: Iterable[tuple[int | str, dict[str, Any]]],
    columns: list[str],
    keys: dict[str, str],
) -> Iterator[Row]:
    """The fields of JSON objects in the order of `columns`; those without a key are empty."""
    wanted = [keys.get(column) for column in columns]
    for where, entry in entries:
        fields = []
        for key in wanted:
            value = "" if key is None else entry.get(key)
            kinds = str | int | float if key == "label" else str
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise broken(path, where, f"{key!r} is missing or no text")
            if any(end in str(value) for end in "\t\n\r"):
                raise broken(path, where, f"{key!r} holds a tab or a line end")
            fields.append(str(value))
        yield where, fields


def _write(
    target: pathlib.Path, header: list[str] | None, rows: Iterable[Row], check: _Check
) -> tuple[int, int]:
    """Writes the rows; returns how many TFDS will keep and how many it will drop."""
    counts = {True: 0, False: 0}
    with target.open("w", encoding="utf-8", newline="\n") as out:
        if header is not None:
            out.write("\t".join(header) + "\n")
        for where, fields in rows:
            counts[check.keeps(where, fields)] += 1
            out.write("\t".join(fields) + "\n")
    return counts[True], counts[False]


def _stage_mrpc(config: Any, split: Split, source: Source, target: pathlib.Path) -> Staged:
    """MRPC: Microsoft's files and GLUE's list of dev ids, or GLUE's own files.

    TFDS cuts three bytes (the byte-order mark) off the training file, so the copy has one. From
    GLUE's own files `idx` counts within the file; in Microsoft's over train and dev together.
    """
    if source.format != "tsv":
        raise ValueError(f"{source.path}: MRPC is read from tsv files; nothing was imported")
    test = split.name == "test"
    rows = ((number, line.split("\t")) for number, line in read_lines(source.path))
    _, header = next(rows, (1, [""]))
    check = _Check(
        path=source.path,
        header=header,
        texts=_MRPC_TEXTS if test else (*_MRPC_IDS, *_MRPC_TEXTS),
        label=None if test else "Quality",
        classes=config.label_classes,
        ragged=False,
    )
    ids: list[tuple[str, ...]] = []

    def seen() -> Iterator[Row]:
        for where, fields in rows:
            row = dict(zip(header, fields, strict=False))
            ids.append(tuple(row.get(column, "") for column in _MRPC_IDS))
            yield where, fields

    bom = [header[0] if test else "\ufeff" + header[0], *header[1:]]
    total, _ = _write(target, bom, seen(), check)
    if test:
        return Staged(source.path, _mrpc_arguments("test", test=target), total)
    dev = _mrpc_dev_ids(split, source, ids)
    listing = target.with_name(target.name + ".ids")
    listing.write_text("".join("\t".join(pair) + "\n" for pair in sorted(dev)), encoding="utf-8")
    in_dev = sum(pair in dev for pair in ids)
    part, kept = ("train", total - in_dev) if split.name == "train" else ("dev", in_dev)
    return Staged(source.path, _mrpc_arguments(part, train=target, dev_ids=listing), kept)


def _mrpc_dev_ids(split: Split, source: Source, ids: list[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The id pairs that make the dev set: GLUE's list, or all or none of GLUE's own file."""
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
            raise broken(listing, number, "two tab-separated ids were expected")
        pairs.add((fields[0], fields[1]))
    return pairs


def _mrpc_arguments(split: str, **files: pathlib.Path) -> dict[str, Any]:
    names = {name: str(path) for name, path in files.items()}
    return {"data_file": "", "split": split, "mrpc_files": names}
