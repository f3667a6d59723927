"""Original files as lines: plain or gzip, UTF-8, each with its number for messages."""

from __future__ import annotations

import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any


def broken(path: pathlib.Path, where: int | str, reason: str) -> ValueError:
    """The error that stops an import: which file, which line (or entry), and why."""
    place = f"line {where}" if isinstance(where, int) else where
    return ValueError(f"{path}, {place}: {reason}; nothing was imported")


def read_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the number (from 1) and the text of every line, without line ends.

    As in Python's text mode, which TFDS reads with, CR and CRLF end a line too. A byte-order mark
    and blank lines at the end are left out; other blank lines are kept.

    Raises:
      ValueError: the file is not UTF-8, its gzip stream is damaged, or it is no regular file.
    """
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is no regular file; nothing was imported")
    opener = gzip.open if path.suffix == ".gz" else open
    number, blank = 0, list[tuple[int, str]]()
    try:
        with opener(path, "rb") as handle:
            for number, raw in enumerate(handle, 1):
                text = raw.decode("utf-8")
                if number == 1:
                    text = text.removeprefix("\ufeff")
                for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                    if not line:
                        blank.append((number, line))
                        continue
                    yield from blank
                    blank.clear()
                    yield number, line
    except UnicodeDecodeError as error:
        raise broken(path, number, f"byte {error.start} is not UTF-8") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise broken(path, number + 1, f"damaged gzip stream ({error})") from error
    except OSError as error:  # reading on does not name the file as opening does
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json_lines(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the JSON object of every line.

    Raises:
      ValueError: a line is not one JSON object.
    """
    for number, line in read_lines(path):
        yield number, parse_object(path, number, line)


def read_json_entries(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the key and the value of a file that is one JSON object of objects.

    Raises:
      ValueError: it is not.
    """
    whole = parse_object(path, 1, "\n".join(line for _, line in read_lines(path)))
    for key, entry in whole.items():
        if not isinstance(entry, dict):
            raise broken(path, f"entry {key!r}", "not a JSON object")
        yield f"entry {key!r}", entry


def parse_object(path: pathlib.Path, number: int, text: str) -> dict[str, Any]:
    """One JSON object.

    Raises:
      ValueError: `text` is something else.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise broken(path, number, f"not JSON ({error})") from error
    try:
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise broken(path, number, f"{half} is half a character and no Unicode text") from error
    if not isinstance(value, dict):
        raise broken(path, number, f"a JSON object was expected, not {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
