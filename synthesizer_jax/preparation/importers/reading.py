"""Rows of files: JSON lines, CSV, TSV and text, plain, gzip or zstd, and Parquet."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from etils import epy

from synthesizer_jax.base.files import decode_lines
from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import JSON

with epy.lazy_imports():
    import pyarrow as pa
    import pyarrow.parquet as pq

T = TypeVar("T")

Row: TypeAlias = dict[str, JSON]
"""One row of a file: its fields by name."""
Rows: TypeAlias = Iterator[tuple[str, Row]]
"""Rows, and where they are, such as ``train.csv, line 3``."""

COMPRESSIONS, TABLES = (".gz", ".zst"), (".csv", ".tsv")
FIELD_LIMIT = 2**24  # characters of a CSV field

_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
    *(RuntimeError, SyntaxError, csv.Error),
)
"""What readers and TFDS raise for rows that they cannot read or write."""


class ReadError(ValueError):
    """A file cannot be imported; the message has file, place and reason."""


class Cursor:
    """Remembers where the row is that was read last, for errors of reading and of writing it."""

    def __init__(self, where: str = ""):
        self.where = where

    def follow(self, rows: Iterable[tuple[str, T]]) -> Iterator[T]:
        """Yields the rows."""
        for where, row in rows:
            self.where = where
            yield row
            self.where = f"after {where}"

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Context manager that turns errors into `ReadError`, which says where the row is."""
        try:
            yield
        except ReadError:
            raise
        except _ERRORS as error:
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            reason = kind + " ".join(str(error).split())[:300]
            raise ReadError(f"{self.where}: {reason}; nothing was imported") from error


def read_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the number (from 1) and the text of every line; bytes that are not UTF-8 become U+FFFD.

    Raises:
      ReadError: the compression is damaged, the file is UTF-16, or it is no regular file.
    """
    if not path.is_file():  # reading from a pipe would block
        raise ReadError(f"{path} is no regular file; nothing was imported")
    number = 0
    try:
        file = io.BufferedReader(pa.input_stream(str(path), compression="detect"))
        if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ReadError(f"{path} is UTF-16; convert it to UTF-8; nothing was imported")
        for number, line in enumerate(decode_lines(file, "replace"), 1):
            yield number, line
    except OSError as error:
        raise ReadError(f"{path}, after line {number}: {error}; nothing was imported") from error


def read_rows(path: pathlib.Path, columns: Sequence[str] = ()) -> Rows:
    """Yields the rows of a file, which its suffix tells how to read.

    JSON lines are objects; CSV is quoted as in RFC 4180, where CRLF in a field becomes LF, TSV is not
    quoted; the lines of text are the field ``text``; blank lines are skipped. Bytes that are not UTF-8
    become U+FFFD.

    Args:
      path: the file.
      columns: names of the columns of a CSV or TSV file without a header line.

    Raises:
      ReadError: a row cannot be read.
    """
    kind = file_kind(path)
    for where, row in _READERS[kind](path, *[columns] * (kind in TABLES)):
        yield f"{path}, {where}", row


def _json_rows(path: pathlib.Path) -> Rows:
    for number, line in read_lines(path):
        if line.strip():
            with Cursor(f"{path}, line {number}").named():
                if line.lstrip().startswith("["):
                    raise ValueError("a JSON array; JSON lines are read: jq -c '.[]' FILE")
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise ValueError(f"a JSON object was expected, not {type(value).__name__}")
            yield f"line {number}", value


def _table_rows(path: pathlib.Path, columns: Sequence[str]) -> Rows:
    cursor = Cursor(str(path))
    with cursor.named():
        table = cursor.follow((f"{path}, line {row[0]}", row) for row in _cells(path))
        names = list(columns) or next(table, (0, []))[1]
        _check_names(names)
        if len(names) == 1 and ";" in names[0]:
            raise ValueError(f"{names[0]!r} is one column; separate columns by ',' (.tsv: tabs)")
        for number, values in table:
            if len(values) != len(names):
                raise ValueError(f"{len(values)} columns instead of {len(names)} ({', '.join(names)})")
            yield f"line {number}", dict(zip(names, values, strict=True))


def _cells(path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the (last) line and the cells of every row that is not blank."""
    lines = read_lines(path)
    if uncompressed(path).suffix == ".tsv":
        yield from ((number, line.split("\t")) for number, line in lines if line)
        return
    csv.field_size_limit(FIELD_LIMIT)
    reader = csv.reader((line + "\n" for _, line in lines), strict=True)
    yield from ((reader.line_num, cells) for cells in reader if cells)


def _check_names(names: Sequence[str]) -> None:
    if repeated := [repr(name) for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(
            f"several columns are called {', '.join(repeated)}; every column needs a name of its own "
            "(--columns names those of CSV and TSV without a header)"
        )


def _text_rows(path: pathlib.Path) -> Rows:
    for number, line in read_lines(path):
        if line.strip():
            yield f"line {number}", {"text": line}


def _parquet_rows(path: pathlib.Path) -> Rows:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            with Cursor(str(path)).named():
                _check_names(names)
            for batch in file.iter_batches():
                columns = zip(names, batch.columns, strict=True)
                for values in zip(*(_read_column(path, *pair) for pair in columns), strict=True):
                    number += 1
                    yield f"row {number}", dict(zip(names, values, strict=True))
    except (pa.ArrowException, OSError) as error:
        where = f"{path}, after row {number}"
        raise ReadError(f"{where}: not Parquet ({error}); nothing was imported") from None


def _read_column(path: pathlib.Path, name: str, column: pa.Array) -> list[JSON]:
    if pa.types.is_float32(column.type):  # 0.1 would be 0.10000000149011612
        column = column.cast(pa.string()).cast(pa.float64())
    with Cursor(f"{path}: write the column {name!r} as text").named():  # times that Python has not
        return list(column.to_pylist())


_READERS: Mapping[str, Callable[..., Rows]] = {
    **dict.fromkeys((".jsonl", ".json"), _json_rows),
    **dict.fromkeys(TABLES, _table_rows),
    **dict.fromkeys((".txt", ".tokens", ".raw"), _text_rows),  # the others are WikiText's
    ".parquet": _parquet_rows,
}
"""The readers by the suffix of the uncompressed file."""


def file_kind(path: pathlib.Path) -> str:
    """Returns the suffix that says how a file is read.

    Raises:
      ValueError: it is not known.
    """
    suffix = uncompressed(path).suffix
    if suffix not in _READERS:
        raise ValueError(
            f"{path}: {suffix or 'no suffix'} is not known{did_you_mean(suffix, _READERS)}; files end in "
            f"{', '.join(_READERS)}, those of lines also with {' or '.join(COMPRESSIONS)}"
        )
    return suffix


def uncompressed(path: pathlib.Path) -> pathlib.Path:
    """Returns a path without the suffix of a compression."""
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def find_field(row: Mapping[str, JSON], name: str, *, field: str = "") -> JSON:
    """Returns a field of a row, or of an object in one; `field` is how errors name it, by default `name`.

    Raises:
      ValueError: there is no such field.
    """
    if name not in row:
        raise ValueError(
            f"there is no field {field or name!r}{did_you_mean(name, row)}; there are {', '.join(row)}"
        )
    return row[name]


def value_text(value: JSON, field: str) -> str:
    """Returns a value of a field as text: strings and bytes as they are, others as Python writes them.

    Raises:
      ValueError: it is null, a list or an object, or no finite number.
    """
    infinite = isinstance(value, float) and not math.isfinite(value)
    if value is None or infinite or isinstance(value, list | dict):
        shown = json.dumps(value, default=str)[:60]
        raise ValueError(f"the field {field!r} is {shown}, which is no text")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
