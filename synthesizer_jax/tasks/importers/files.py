"""Rows of users' files: JSON lines, CSV, TSV, Parquet, text, aligned text, saved `datasets` folders."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.registry import JSON
from synthesizer_jax.tasks.importers import arrow_files
from synthesizer_jax.tasks.importers.reading import Row, import_error, parse_object, raw_lines

COMPRESSIONS = (".gz", ".zst")
SPLIT_NAMES: Mapping[str, str] = {
    **{"train": "train", "training": "train", "test": "test"},
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
"""Beginnings of the names of files in a folder, and the splits that they are."""

TABLES = (".parquet", ".arrow")
"""Suffixes of files that are not lines of text."""

FIELD_LIMIT = 2**24
"""Maximum number of characters of a CSV field."""


@dataclasses.dataclass
class Rows:
    """The rows of one split.

    Attributes:
      files: its files; several are read one after the other, or line by line if they are `aligned`.
      aligned: whether the files are text that belongs together line by line, a field per file.
      columns: names of the columns of CSV and TSV files without a header line.
      undecodable: number of lines with bytes that are not UTF-8, in what was read; such bytes are
        replaced by U+FFFD.
    """

    files: tuple[pathlib.Path, ...]
    aligned: bool = False
    columns: tuple[str, ...] = ()
    undecodable: int = 0

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """Yields where a row is, such as ``train.csv, line 3``, and its fields.

        Raises:
          ValueError: a row cannot be read; the message has file, line, column and reason.
        """
        if self.aligned:
            yield from self._aligned_rows()
            return
        for path in self.files:
            for where, row in _READERS[_kind(path)](self, path):
                yield f"{path}, {where}", row

    @property
    def fields(self) -> list[str]:
        """The fields of aligned files: the ends of their names, or else the beginnings."""
        names = [_uncompressed(path) for path in self.files]
        ends = [name.suffix.removeprefix(".") for name in names]
        return ends if len(set(ends)) == len(ends) else [name.stem for name in names]

    def _aligned_rows(self) -> Iterator[tuple[str, Row]]:
        lines = [self.lines(path) for path in self.files]
        for rows in itertools.zip_longest(*lines):
            number = next(row[0] for row in rows if row is not None)
            for path, row in zip(self.files, rows, strict=True):
                if row is None:
                    raise import_error(path, number, "the file ends here, the others go on")
            texts = (row[1] for row in rows)
            yield f"{self.files[0]}, line {number}", dict(zip(self.fields, texts, strict=True))

    def lines(self, path: pathlib.Path) -> Iterator[tuple[int, str]]:
        """Yields the number (from 1) and the text of every line, without line ends.

        Raises:
          ValueError: see `raw_lines`.
        """
        for number, line in self._lines_with_ends(path):
            yield number, line.removesuffix("\n").removesuffix("\r")

    def _lines_with_ends(self, path: pathlib.Path) -> Iterator[tuple[int, str]]:
        for number, raw in raw_lines(path):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError:
                self.undecodable += 1
                line = raw.decode("utf-8", errors="replace")
            yield number, line

    def json_rows(self, path: pathlib.Path) -> Iterator[tuple[str, Row]]:
        """Yields the JSON object of every line; blank lines are skipped."""
        for number, line in self.lines(path):
            if line.strip():
                yield f"line {number}", parse_object(path, number, line)

    def table_rows(self, path: pathlib.Path) -> Iterator[tuple[str, Row]]:
        """Yields the rows of a CSV file (quoted as in RFC 4180) or of a TSV file (not quoted)."""
        tabs = _uncompressed(path).suffix == ".tsv"
        reader = csv.reader(
            (line for _, line in self._lines_with_ends(path)),
            delimiter="\t" if tabs else ",",
            quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL,
            strict=True,
        )
        limit = csv.field_size_limit(FIELD_LIMIT)  # of the whole process
        try:
            names = self.columns or tuple(next(reader, ()))
            _check_columns(names, path)
            for values in reader:
                if not values:
                    continue  # a blank line
                if len(values) != len(names):
                    raise import_error(
                        path,
                        reader.line_num,
                        f"{len(values)} columns instead of {len(names)} ({', '.join(names)})",
                    )
                yield f"line {reader.line_num}", dict(zip(names, values, strict=True))
        except csv.Error as error:
            raise import_error(path, reader.line_num, f"not CSV ({error})") from None
        finally:
            csv.field_size_limit(limit)

    def text_rows(self, path: pathlib.Path) -> Iterator[tuple[str, Row]]:
        """Yields every line that is not blank as the field ``text``."""
        for number, line in self.lines(path):
            if line.strip():
                yield f"line {number}", {"text": line}


_READERS: Mapping[str, Callable[[Rows, pathlib.Path], Iterator[tuple[str, Row]]]] = {
    ".jsonl": Rows.json_rows,
    ".json": Rows.json_rows,
    ".csv": Rows.table_rows,
    ".tsv": Rows.table_rows,
    ".txt": Rows.text_rows,
    ".parquet": lambda _, path: arrow_files.parquet_rows(path),
    ".arrow": lambda _, path: arrow_files.arrow_rows(path),
}
"""The readers by the suffix of the uncompressed file."""


def find_splits(sources: Sequence[str], *, columns: Sequence[str] = ()) -> dict[str, Rows]:
    """Returns the splits that arguments name.

    Args:
      sources: ``SPLIT=FILE`` (several separated by commas; ``FILE+FILE`` is aligned text; ``*`` in the
        name of a file stands for anything, and files of the same split follow one another), or one
        folder: of files whose names begin with a split's, or saved by `datasets`.
      columns: see `Rows`.

    Raises:
      ValueError: an argument names no file that can be read, or one that another names too.
      FileNotFoundError: there is no such file.
    """
    parts = [part for source in sources for part in source.split(",")]
    if len(parts) == 1 and "=" not in parts[0]:
        found = _splits_of_folder(pathlib.Path(parts[0]))
        return {split: _rows_of(paths, columns) for split, paths in found.items()}
    named: dict[str, list[pathlib.Path]] = {}
    aligned: dict[str, Rows] = {}
    for part in parts:
        split, equals, names = part.partition("=")
        if not (equals and split.isidentifier() and names):
            raise ValueError(f"--from {part!r}: write SPLIT=FILE, such as train=a.jsonl")
        if split in aligned or ("+" in names and split in named):
            raise ValueError(
                f"--from: the aligned files of {split!r} cannot be joined with other files"
            )
        if "+" in names:
            sides = [pathlib.Path(name) for name in names.split("+")]
            aligned[split] = _rows_of(sides, columns, aligned=True)
            continue
        paths = _named_files(names)
        if repeated := set(paths) & set(named.get(split, ())):
            raise ValueError(f"--from names {min(repeated)} twice for the split {split!r}")
        named.setdefault(split, []).extend(paths)
    return {split: _rows_of(paths, columns) for split, paths in named.items()} | aligned


def _named_files(name: str) -> list[pathlib.Path]:
    """Returns the files of a path, in whose last part ``*`` stands for anything, ordered by name."""
    path = pathlib.Path(name)
    if "*" not in path.name:
        return [path]
    found = sorted(path.parent.glob(path.name))
    if not found:
        raise FileNotFoundError(f"there is no file {name}")
    return found


def _rows_of(
    paths: Sequence[pathlib.Path], columns: Sequence[str], *, aligned: bool = False
) -> Rows:
    """Returns the rows of files that were named together."""
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no file {path}")
    rows = Rows(tuple(paths), aligned, tuple(columns))
    if not aligned:
        for path in paths:
            _kind(path)
    elif len(set(rows.fields)) < len(paths):
        raise ValueError(
            f"{', '.join(map(str, paths))} cannot be told apart: aligned files need names that end "
            "differently, such as train.en and train.de"
        )
    return rows


def _splits_of_folder(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns the files of every split in a folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; write --from SPLIT=FILE, such as train={folder}")
    if (folder / arrow_files.SPLITS).is_file():
        return _renamed(arrow_files.saved_splits(folder), folder)
    if (folder / arrow_files.STATE).is_file():
        return {SPLIT_NAMES.get(folder.name, "train"): arrow_files.split_files(folder)}
    found: dict[str, list[pathlib.Path]] = {}
    for path in sorted(folder.iterdir()):
        beginning = "".join(itertools.takewhile(str.isalpha, path.name.lower()))
        if beginning in SPLIT_NAMES and path.is_file():
            found.setdefault(SPLIT_NAMES[beginning], []).append(path)
    if not found:
        raise ValueError(
            f"{folder} has no file whose name begins with train, validation or test; name the files "
            "with --from SPLIT=FILE"
        )
    return found


def _renamed(
    saved: Mapping[str, list[pathlib.Path]], folder: pathlib.Path
) -> dict[str, list[pathlib.Path]]:
    """Returns the files of splits by the names that the splits have here."""
    found: dict[str, list[pathlib.Path]] = {}
    for name, files in saved.items():
        split = SPLIT_NAMES.get(name, name)
        if split in found:
            raise ValueError(
                f"{folder} has two splits that are {split!r} here; name the files instead"
            )
        found[split] = files
    return found


def _check_columns(names: Sequence[str], path: pathlib.Path) -> None:
    """Raises a `ValueError` where columns have no name or the same."""
    if not all(names) or len(set(names)) < len(names):
        raise import_error(
            path,
            1,
            f"the names of the columns are {', '.join(map(repr, names))}; every column needs a name of "
            "its own (--columns names those of a file without a header)",
        )


def _kind(path: pathlib.Path) -> str:
    """Returns the suffix that says how a file is read.

    Raises:
      ValueError: it is not known.
    """
    suffix = _uncompressed(path).suffix
    if suffix not in _READERS:
        raise ValueError(
            f"{path}: {suffix or 'no suffix'} is not known{did_you_mean(suffix, _READERS)}; files end in "
            f"{', '.join(_READERS)}, those of lines also with {' or '.join(COMPRESSIONS)}"
        )
    if suffix in TABLES and path.suffix in COMPRESSIONS:
        raise ValueError(f"{path}: {suffix} files are compressed inside; decompress it first")
    return suffix


def _uncompressed(path: pathlib.Path) -> pathlib.Path:
    """Returns a path without the suffix of a compression."""
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def value_text(value: JSON) -> str:
    """Returns a field as text: strings as they are, numbers and truth values as Python writes them.

    Raises:
      ValueError: the field is null, a list or an object, or no finite number.
    """
    if isinstance(value, str):
        return value
    infinite = isinstance(value, float) and not math.isfinite(value)
    if value is None or infinite or isinstance(value, list | dict):
        raise ValueError(f"{json.dumps(value)[:60]}, which is no text")
    return str(value)
