"""Conversion of GLUE files in any distributed form to the official tsv format that TFDS reads.

TFDS's own code interprets the rows (labels, ids, dropped rows). Quoting is disabled throughout: a
quotation mark is an ordinary character.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Sequence
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
    _check_header(source.path, header, columns)
    num_rows = _write(target, rows, header=None if headerless else header)
    arguments = {"data_file": str(target), "split": "test" if is_test else "train"}
    return Staged(source.path, arguments, num_rows)


def _check_header(path: pathlib.Path, header: Sequence[str], columns: Iterable[str]) -> None:
    """Raises a `ValueError` if a column is missing, whose value TFDS would take for hidden."""
    for column in columns:
        if column not in header:
            raise import_error(path, 1, f"no column {column!r} among {header}")


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


def _write(target: pathlib.Path, rows: Iterable[Row], *, header: list[str] | None) -> int:
    """Writes the rows, and returns their number."""
    number = 0
    with target.open("w", encoding="utf-8", newline="\n") as out:
        if header is not None:
            out.write("\t".join(header) + "\n")
        for _, fields in rows:
            number += 1
            out.write("\t".join(fields) + "\n")
    return number


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
    texts = _MRPC_TEXTS if is_test else (*_MRPC_IDS, *_MRPC_TEXTS, "Quality")
    _check_header(source.path, header, texts)
    ids: list[tuple[str, ...]] = []

    def iterate_rows() -> Iterator[Row]:
        for where, fields in rows:
            row = dict(zip(header, fields, strict=False))
            ids.append(tuple(row.get(column, "") for column in _MRPC_IDS))
            yield where, fields

    columns = [header[0] if is_test else "\ufeff" + header[0], *header[1:]]
    _write(target, iterate_rows(), header=columns)
    if is_test:
        return Staged(source.path, _mrpc_arguments("test", test=target))
    dev_ids = _mrpc_dev_ids(split, source, ids)
    listing = target.with_name(target.name + ".ids")
    listing.write_text(
        "".join("\t".join(pair) + "\n" for pair in sorted(dev_ids)), encoding="utf-8"
    )
    name = "train" if split.name == "train" else "dev"
    return Staged(source.path, _mrpc_arguments(name, train=target, dev_ids=listing))


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
