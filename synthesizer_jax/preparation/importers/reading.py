"""Reads the rows of files.

The module reads Parquet files, and files of JSON lines, CSV, TSV and text. All files except Parquet
may be compressed with gzip or zstd.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
import math
import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeAlias, TypeVar

from etils import epy

from synthesizer_jax.base.files import decode_lines
from synthesizer_jax.base.messages import did_you_mean, end_sentence
from synthesizer_jax.base.registry import JSON

with epy.lazy_imports():
    import pyarrow as pa
    import pyarrow.parquet as pq

T = TypeVar("T")

Row: TypeAlias = dict[str, JSON]
"""One row of a file, which is a mapping from names to fields."""
LocatedRows: TypeAlias = Iterator[tuple[str, Row]]
"""An iterator over pairs of a location, such as ``train.csv, line 3``, and a row."""

COMPRESSIONS = (".gz", ".zst")
"""The suffixes of compressed files."""

TABLES = (".csv", ".tsv")
"""The suffixes of files whose columns are separated by a single character."""

FIELD_LIMIT = 2**24
"""The largest number of characters in a CSV field."""

_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
    *(RuntimeError, SyntaxError, csv.Error),
)
"""The exceptions that readers and TFDS raise if a row cannot be read or written."""


class ReadError(ValueError):
    """An error that says why a file cannot be imported.

    Args:
      problem: the file, the location and the reason. The error message adds that nothing was
        imported.
    """

    def __init__(self, problem: str):
        super().__init__(f"{end_sentence(problem)} Nothing was imported.")


class Cursor:
    """Remembers the location of the last row, for errors while the row is read or written.

    Args:
      where: the location that error messages contain before the first row is read.
    """

    def __init__(self, where: str = ""):
        self.where = where

    def follow(self, rows: Iterable[tuple[str, T]]) -> Iterator[T]:
        """Yields the rows, and remembers the location of each row."""
        for where, row in rows:
            self.where = where
            yield row
            self.where = f"after {where}"

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Context manager that turns errors into a `ReadError` that contains the location."""
        try:
            yield
        except ReadError:
            raise
        except _ERRORS as error:
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            reason = kind + " ".join(str(error).split())[:300]
            raise ReadError(f"{self.where}: {reason}") from error


def is_blank(text: str) -> bool:
    """Returns whether a text has no visible characters.

    A text is blank if it is empty, or if all of its characters are white space, control characters
    or invisible characters. Invisible characters are, for example, zero-width spaces, byte-order
    marks and soft hyphens.
    """
    return all(unicodedata.category(character) in _INVISIBLE for character in text)


_INVISIBLE = frozenset(("Zs", "Zl", "Zp", "Cc", "Cf"))
"""Unicode's categories of separators, control characters and format characters."""

_SPREADSHEET = (
    "is a spreadsheet or an archive. Save the spreadsheet as 'CSV UTF-8', or unpack the archive."
)
_UTF16 = "is UTF-16. Convert it to UTF-8 (iconv -f utf-16 -t utf-8 {path} > NEW)."
_NO_TEXT: Mapping[bytes, str] = {
    codecs.BOM_UTF16_LE: _UTF16,
    codecs.BOM_UTF16_BE: _UTF16,
    b"\x1f\x8b": "is compressed with gzip. Rename it to {path}.gz.",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd. Rename it to {path}.zst.",
    b"BZh91AY&SY": "is compressed with bzip2. Unpack it with bunzip2.",
    b"\xfd7zXZ\x00": "is compressed with xz. Unpack it with unxz.",
    b"version https://git-lfs.github.com/": (
        "is a pointer of Git LFS. Fetch the file with git lfs pull."
    ),
    b"PAR1\x15": "is a Parquet file. Rename it to {path}.parquet.",
    b"PK\x03\x04": _SPREADSHEET,
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": _SPREADSHEET,
}
"""Maps the first bytes of files to the kind of file, and to what a user can do about it."""


def read_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the line number, counted from 1, and the text of every line of a UTF-8 file.

    The file may be plain or compressed.

    Raises:
      ReadError: if the path is not a regular file, if the file is not text, if the compressed data
        is damaged, or if a line is not UTF-8.
    """
    # Accept only regular files, because reading from a pipe would block.
    if not path.is_file():
        raise ReadError(f"{path} is not a regular file")
    number = 0
    try:
        file = io.BufferedReader(pa.input_stream(str(path), compression="detect"))
        beginning = file.peek(64)
        for signature, problem in _NO_TEXT.items():
            if beginning.startswith(signature):
                raise ReadError(f"{path} {problem.format(path=path)}")
        for number, line in enumerate(decode_lines(file, path), 1):
            if "\0" in line:
                raise ReadError(
                    f"{path}, line {number}: The line contains a NUL character, so the file is "
                    "probably UTF-16 or not text. Convert it to UTF-8 text, or remove it."
                )
            yield number, line
    except ReadError:
        raise
    except ValueError as error:
        raise ReadError(str(error)) from error
    except OSError as error:
        raise ReadError(f"{path}, after line {number}: {error}") from error


def read_rows(path: pathlib.Path, columns: Sequence[str] = ()) -> LocatedRows:
    """Yields the location and the values of each row of a file.

    The suffix determines how the file is read. JSON lines are objects. CSV is quoted as in RFC
    4180, and CRLF in a field becomes LF. TSV is not quoted. Each line of a text file is a row with
    the field ``text``. Blank lines are skipped.

    Args:
      path: the file.
      columns: the names of the columns of a CSV or TSV file without a header line.

    Raises:
      ReadError: if a row cannot be read.
    """
    kind = file_kind(path)
    rows = _table_rows(path, columns) if kind in TABLES else _READERS[kind](path)
    for where, row in rows:
        yield f"{path}, {where}", row


def _json_rows(path: pathlib.Path) -> LocatedRows:
    """Yields the rows of a file of JSON lines."""
    for number, line in read_lines(path):
        if line.strip():
            with Cursor(f"{path}, line {number}").named():
                row = _parse_json(line)
            yield f"line {number}", row


def _parse_json(line: str) -> Row:
    """Returns the JSON object in a line.

    Raises:
      ValueError: if the line is not a JSON object.
    """
    if line.lstrip().startswith("["):
        raise ValueError(
            "The line begins a JSON array, but every line must be a JSON object. Convert the file "
            "(jq -c '.[]' FILE > NEW)."
        )
    try:
        value = json.loads(line, object_pairs_hook=_json_object)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"The line is not JSON ({error.msg} in column {error.colno}). Write one object per "
            "line (jq -c . FILE > NEW)."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"The line must be a JSON object, but it holds a value of the Python type "
            f"{type(value).__name__}."
        )
    return value


def _json_object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    """Returns a JSON object, whose names must be different.

    If an object contains a name twice, there is no way to know which of the two values is meant.

    Raises:
      ValueError: if a name occurs twice.
    """
    names = dict(pairs)
    if len(names) < len(pairs):
        written = [name for name, _ in pairs]
        repeated = next(name for name in names if written.count(name) > 1)
        raise ValueError(
            f"An object has two fields with the name {repeated!r}. Remove or rename one of them."
        )
    return names


def _table_rows(path: pathlib.Path, columns: Sequence[str]) -> LocatedRows:
    """Yields the rows of a CSV or TSV file."""
    cursor = Cursor(str(path))
    with cursor.named():
        # Read pairs of the line number and the cells of a row.
        table = cursor.follow((f"{path}, line {row[0]}", row) for row in _cells(path))
        first, cells = next(table, (0, []))
        _check_separator(path, cells, named=bool(columns))
        names = list(columns) or cells
        _check_names(names)
        header = set(map(_folded, names))
        if columns and cells:
            # The columns are named, so the first line is a row and not a header.
            table = itertools.chain([(first, cells)], table)
        for number, values in table:
            # Look at the first cell before all other cells. This test is cheap, and shows for
            # nearly every row that the row is not a header.
            if _folded(values[0]) in header and set(map(_folded, values)) == header:
                _refuse_header(is_first=number == first, named=bool(columns))
            if len(values) != len(names):
                raise ValueError(
                    f"The row has {len(values)} columns instead of {len(names)} "
                    f"({', '.join(names)})."
                )
            yield f"line {number}", dict(zip(names, values, strict=True))


def _folded(name: str) -> str:
    """Returns the name of a column in a form that can be compared with other names.

    Names are equal if they differ only in case and in the blanks around them.
    """
    return name.strip().casefold()


def _check_separator(path: pathlib.Path, cells: Sequence[str], *, named: bool) -> None:
    """Raises a `ValueError` if the first line of a table shows that it has a different separator.

    Args:
      path: the table.
      cells: the cells of the first line.
      named: whether the names of the columns are given separately. If `named` is `False`, the first
        line is the header.
    """
    is_tsv = uncompressed(path).suffix == ".tsv"
    rule = "Columns are separated by commas in .csv files and by tabs in .tsv files."
    if cells and re.fullmatch("sep=.?", cells[0], re.IGNORECASE):
        raise ValueError(f"{cells[0]!r} is a note that Excel adds, not a row. Remove it. {rule}")
    others = ";,|" if is_tsv else ";|\t"
    if not named and len(cells) == 1 and any(separator in cells[0] for separator in others):
        raise ValueError(f"The header {cells[0][:60]!r} has only one column. {rule}")


def _refuse_header(*, is_first: bool, named: bool) -> NoReturn:
    """Raises a `ValueError` for a row that consists of the names of the columns.

    Args:
      is_first: whether the row is the first row of the file.
      named: whether the option ``--columns`` names the columns.
    """
    if named and is_first:
        raise ValueError(
            "The line is a header with the names that --columns gives. Leave --columns out."
        )
    remedy = "choose other names with --columns" if named else "rename the columns in the header"
    raise ValueError(f"The line repeats the header. Remove it, or {remedy} if it is a row.")


def _cells(path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the cells of every row that is not blank.

    If a row has several lines, the line number is the number of the row's last line.
    """
    lines = read_lines(path)
    if uncompressed(path).suffix == ".tsv":
        for number, line in lines:
            if line:
                yield number, _tsv_cells(line, f"{path}, line {number}")
        return
    csv.field_size_limit(FIELD_LIMIT)
    reader = csv.reader((line + "\n" for _, line in lines), strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        known = (problem for part, problem in _CSV_ERRORS.items() if part in str(error))
        raise ValueError(next(known, str(error))) from error


def _tsv_cells(line: str, where: str) -> list[str]:
    """Returns the cells of a line of TSV, in which quotes are ordinary characters.

    Some programs quote the cells of TSV as in CSV. A quoted cell can be recognized if it contains
    doubled quotes.

    Raises:
      ValueError: if a cell is quoted as in CSV.
    """
    cells = line.split("\t")
    if '""' not in line:
        return cells
    quoted = next(filter(_CSV_CELL.fullmatch, cells), None)
    if quoted is not None:
        with Cursor(where).named():
            raise ValueError(
                f"The cell {quoted[:40]}… is quoted as in CSV, but cells of TSV files are not "
                "quoted. Save the file as CSV."
            )
    return cells


_CSV_CELL = re.compile('"(?=.*"".*")([^"]|"")+"')
"""A pattern for cells that are quoted as in CSV and contain doubled quotes."""
_CSV_ERRORS: Mapping[str, str] = {
    "new-line": (
        "A carriage return (CR) is outside of quotes. End lines with LF (tr '\\r' '\\n' < FILE > "
        "NEW)."
    ),
    "end of data": (
        "A quoted cell is not closed. Close its quotes, and double the quotes inside the cell."
    ),
    "expected after": (
        "Text follows the closing quote of a cell. Double the quotes inside the cell."
    ),
    "field limit": (
        f"A cell has more than {FIELD_LIMIT:,} characters, probably because its quotes are not "
        "closed. Close them."
    ),
}
"""Maps a part of an error message of the module `csv` to what the user is told."""


def _check_names(names: Sequence[str]) -> None:
    """Raises a `ValueError` if several columns have the same name."""
    repeated = [repr(name) for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise ValueError(
            f"Several columns have the name {' or '.join(repeated)}. Give every column its own "
            "name. If a CSV or TSV file has no header, give the names with --columns."
        )


def _text_rows(path: pathlib.Path) -> LocatedRows:
    """Yields the lines of a text file that are not blank."""
    for number, line in read_lines(path):
        if not is_blank(line):
            yield f"line {number}", {"text": line}


def _parquet_rows(path: pathlib.Path) -> LocatedRows:
    """Yields the rows of a Parquet file."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            with Cursor(str(path)).named():
                _check_names(names)
            for batch in file.iter_batches():
                columns = zip(names, batch.columns, strict=True)
                where = f"{path}, after row {number}"
                for values in zip(*(_read_column(where, *pair) for pair in columns), strict=True):
                    number += 1
                    yield f"row {number}", dict(zip(names, values, strict=True))
    except (pa.ArrowException, OSError) as error:
        raise ReadError(
            f"{path}, after row {number}: The file cannot be read as Parquet ({error})."
        ) from None


def _read_column(where: str, name: str, column: pa.Array) -> list[JSON]:
    """Returns the values of a column of a Parquet file."""
    # Convert float32 numbers to text first, because the float32 number 0.1 would otherwise become
    # the float64 number 0.10000000149011612.
    if pa.types.is_float32(column.type):
        column = column.cast(pa.string()).cast(pa.float64())
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        raise ReadError(
            f"{where}: The column {name!r} has a text that is not UTF-8 ({error.object[:40]!r}). "
            "Write the column again from its source."
        ) from error
    except _ERRORS as error:
        # Some Parquet values, such as certain times, cannot be converted to Python objects.
        raise ReadError(
            f"{where}: The column {name!r} cannot be read ({error}). Write it as text."
        ) from error


_READERS: Mapping[str, Callable[..., LocatedRows]] = {
    **dict.fromkeys((".jsonl", ".json"), _json_rows),
    **dict.fromkeys(TABLES, _table_rows),
    # WikiText's text files have the suffixes .tokens and .raw.
    **dict.fromkeys((".txt", ".tokens", ".raw"), _text_rows),
    ".parquet": _parquet_rows,
}
"""The functions that read files, by the file's suffix without compression."""

ROWS_WITH_FIELDS = (".jsonl", ".json", *TABLES, ".parquet")
"""The suffixes of files whose rows have fields. All other files are text."""


def file_kind(path: pathlib.Path) -> str:
    """Returns the suffix that determines how a file is read.

    Raises:
      ValueError: if the suffix is not known.
    """
    suffix = uncompressed(path).suffix
    if suffix not in _READERS:
        problem = f"the unknown suffix {suffix!r}" if suffix else "no suffix"
        hint = did_you_mean(suffix, _READERS) or "."
        raise ValueError(
            f"{path} has {problem}{hint} The name of a file must end in "
            f"{', '.join(_READERS)}. Files of lines may also be compressed "
            f"({' or '.join(COMPRESSIONS)})."
        )
    return suffix


def uncompressed(path: pathlib.Path) -> pathlib.Path:
    """Returns a path without the suffix of its compression."""
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def find_field(row: Mapping[str, JSON], name: str, *, field: str = "") -> JSON:
    """Returns the value of a field of a row, or of a field of an object in a row.

    Args:
      row: the row or object.
      name: the name of the field.
      field: the name that errors show. The default is `name`.

    Raises:
      ValueError: if the row or object has no such field.
    """
    if name not in row:
        hint = did_you_mean(name, row) or "."
        fields = f"The fields are {', '.join(row)}." if row else "The row or object has no fields."
        raise ValueError(f"There is no field {field or name!r}{hint} {fields}")
    return row[name]


def value_text(value: JSON, field: str) -> str:
    """Returns the value of a field as text.

    Strings are returned unchanged, and bytes are decoded from UTF-8. Other values are converted by
    Python's `str`.

    Raises:
      ValueError: if the value is null, a list, an object, not a finite number, or not UTF-8.
    """
    infinite = isinstance(value, float) and not math.isfinite(value)
    if value is None or infinite or isinstance(value, list | dict):
        shown = json.dumps(value, default=str)[:60]
        raise ValueError(f"The field {field!r} is {shown}, which is not text.")
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"The field {field!r} is {value[:40]!r}, which is not UTF-8. Write the column as text."
        ) from None
