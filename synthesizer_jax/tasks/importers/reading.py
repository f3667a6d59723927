"""Reading of original files (plain or gzip, UTF-8) as lines with line numbers for error messages."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import IO, TypeAlias, cast

from synthesizer_jax.registry import JSON

Row: TypeAlias = dict[str, JSON]
"""A JSON object: one row of a file."""

LONGEST_LINE, MOST_SWOLLEN = 2**28, 200
"""Bytes of a line, and how many times as long as its file a longer text may be."""


def import_error(path: pathlib.Path, where: int | str, reason: str) -> ValueError:
    """Returns the error that stops an import; it has file, line (or entry) and reason."""
    location = f"line {where}" if isinstance(where, int) else where
    return ValueError(f"{path}, {location}: {reason}; nothing was imported")


def read_lines(path: pathlib.Path, *, whole: bool = False) -> Iterator[tuple[int, str]]:
    """Yields the number (from 1) and the text of every line, without line ends.

    As in Python's text mode, in which TFDS reads, CR and CRLF end a line too. A byte-order mark is
    omitted.

    Args:
      path: the file, plain or gzip.
      whole: whether blank lines at the end are kept, as others are, for files that are read side by side.

    Raises:
      ValueError: the file is not UTF-8; see also `raw_lines`.
    """
    blank_lines = list[tuple[int, str]]()
    for number, raw in raw_lines(path):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise import_error(path, number, f"byte {error.start} is not UTF-8") from error
        for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
            if not line:
                blank_lines.append((number, line))
                continue
            yield from blank_lines
            blank_lines.clear()
            yield number, line
    if whole:
        yield from blank_lines


def raw_lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number (from 1) and the bytes of every line, with line ends, without a byte-order mark.

    Args:
      path: the file, plain, gzip or zstd.

    Raises:
      ValueError: its compression is damaged, it exceeds `LONGEST_LINE` or `MOST_SWOLLEN`, or it is no
        regular file.
    """
    if not path.is_file():  # reading from a pipe may block
        raise ValueError(f"{path} is no regular file; nothing was imported")
    number, left = 0, max(LONGEST_LINE, MOST_SWOLLEN * path.stat().st_size)
    limits = f"a line of more than {LONGEST_LINE:,} bytes, or text {MOST_SWOLLEN} times as long as the file"
    try:
        with _open(path) as file:
            while raw := file.readline(LONGEST_LINE + 1):
                number, left = number + 1, left - len(raw)
                if left < 0 or len(raw) > LONGEST_LINE:
                    raise import_error(path, number, limits)
                yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise import_error(path, number + 1, f"damaged gzip stream ({error})") from error
    except OSError as error:
        if path.suffix == ".zst" and error.errno is None:
            raise import_error(path, number + 1, f"damaged zstd stream ({error})") from error
        # Unlike `open`, reading does not name the file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _open(path: pathlib.Path) -> IO[bytes]:
    """Opens a plain or compressed file to be read."""
    if path.suffix == ".zst":
        import pyarrow as pa

        # pyarrow's streams have no lines
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_json_lines(path: pathlib.Path) -> Iterator[tuple[int, Row]]:
    """Yields the line number and the JSON object of every line.

    Raises:
      ValueError: a line is not one JSON object.
    """
    for number, line in read_lines(path):
        yield number, parse_object(path, number, line)


def read_json_entries(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    """Yields the location and the value of every entry of a JSON object of objects.

    Raises:
      ValueError: the file is not a JSON object of objects.
    """
    entries = parse_object(path, 1, read_text(path))
    for key, entry in entries.items():
        if not isinstance(entry, dict):
            raise import_error(path, f"entry {key!r}", "not a JSON object")
        yield f"entry {key!r}", entry


def read_text(path: pathlib.Path) -> str:
    """Returns the lines of a file as one text; see `read_lines`."""
    return "\n".join(line for _, line in read_lines(path))


def parse_value(path: pathlib.Path, number: int, text: str) -> JSON:
    """Returns the JSON value in a text.

    Raises:
      ValueError: `text` is not JSON.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise import_error(path, number, f"not JSON ({error})") from error
    try:
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start].encode("unicode_escape").decode()
        raise import_error(
            path, number, f"{surrogate} is half a character and no Unicode text"
        ) from error
    return value


def parse_object(path: pathlib.Path, number: int, text: str) -> Row:
    """Returns the JSON object in a text.

    Raises:
      ValueError: `text` is not a JSON object.
    """
    value = parse_value(path, number, text)
    if not isinstance(value, dict):
        raise import_error(path, number, f"a JSON object was expected, not {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
