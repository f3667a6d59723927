"""Finds the files that are the splits of a task that a user imports."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from synthesizer_jax.preparation.importers.reading import (
    ROWS_WITH_FIELDS,
    TABLES,
    LocatedRows,
    ReadError,
    Row,
    file_kind,
    is_blank,
    read_lines,
    read_rows,
    uncompressed,
)

SPLIT_NAMES: Mapping[str, str] = {
    **{"train": "train", "training": "train", "test": "test"},
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
"""A mapping from the beginning of a file's name to the split to which the file belongs."""


@dataclasses.dataclass(frozen=True)
class SplitFiles:
    """The files of one split.

    Attributes:
      files: the paths of the files. The files are read one after the other, or in parallel if they
        are `aligned`.
      aligned: whether line n of each file belongs to line n of the other files, as in a text and
        its translation. Each aligned file becomes one field of the rows.
      columns: the names of the columns of CSV and TSV files without a header line, or the names of
        the fields of aligned files.
    """

    files: tuple[pathlib.Path, ...]
    aligned: bool = False
    columns: tuple[str, ...] = ()

    def rows(self) -> LocatedRows:
        """Yields the location and the values of each row.

        Raises:
          ReadError: if a row cannot be read.
        """
        if self.aligned:
            for number, texts in _aligned_lines(self.files):
                yield f"{self.files[0]}, line {number}", dict(zip(self.fields, texts, strict=True))
        else:
            for path in self.files:
                yield from read_rows(path, self.columns)

    def whole_rows(self) -> Iterator[tuple[str, Row | None]]:
        """Yields the location and the values of each row.

        If a line of aligned files is blank, the values are `None`.
        """
        for where, row in self.rows():
            is_whole = not self.aligned or not any(is_blank(str(text)) for text in row.values())
            yield where, row if is_whole else None

    @property
    def fields(self) -> list[str]:
        """The names of the fields of aligned files.

        The names are `columns` if `columns` are given. If `columns` are not given, the names are
        the suffixes of the files, or the stems of the files if two suffixes are equal.
        """
        if self.columns:
            return list(self.columns)
        names = [uncompressed(path) for path in self.files]
        ends = [name.suffix.removeprefix(".") for name in names]
        return ends if len(set(ends)) == len(ends) else [name.stem for name in names]


def _aligned_lines(files: Sequence[pathlib.Path]) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line, and the text of the line with this number in every file.

    Raises:
      ReadError: if a file has fewer lines than another file.
    """
    for rows in itertools.zip_longest(*map(read_lines, files)):
        number = next(row[0] for row in rows if row is not None)
        if None in rows:
            short = files[rows.index(None)]
            raise ReadError(
                f"{short}, line {number}: The file has no such line, but the files that belong to "
                "it have one."
            )
        yield number, [row[1] for row in rows]


def find_splits(sources: Sequence[str], *, columns: Sequence[str] = ()) -> dict[str, SplitFiles]:
    """Returns the files of each split that the arguments specify.

    Args:
      sources: either the path of one folder, in which the names of files begin with the names of
        splits, or arguments of the form ``SPLIT=FILE``. An argument can contain several
        ``SPLIT=FILE``, separated by commas. ``FILE+FILE`` stands for aligned files. ``*`` in the
        name of a file stands for any characters. Several files of the same split are read one after
        the other.
      columns: see `SplitFiles`.

    Raises:
      ValueError: if an argument does not name a readable file, or if a file is named twice.
      FileNotFoundError: if a file does not exist.
    """
    parts = [part for source in sources for part in source.split(",")]
    if len(parts) == 1 and "=" not in parts[0]:
        named = _splits_of_folder(pathlib.Path(parts[0]))
        splits = {
            s: _checked(SplitFiles(tuple(p), columns=tuple(columns))) for s, p in named.items()
        }
        _check_columns(splits)
        return splits
    splits = {}
    for part in parts:
        split, equals, names = part.partition("=")
        if not (equals and split.isidentifier() and names):
            raise ValueError(f"--from {part!r}: Write SPLIT=FILE, such as train=a.jsonl.")
        if split == "all":
            raise ValueError(
                f"--from {part!r}: The name 'all' stands for all splits. Choose another name."
            )
        aligned = "+" in names
        before = splits.get(split, SplitFiles(()))
        if before.aligned or (aligned and before.files):
            raise ValueError(
                f"--from: The split {split!r} has aligned files, which cannot be combined with "
                "other files."
            )
        new = map(pathlib.Path, names.split("+")) if aligned else _named_files(names)
        files = (*before.files, *new)
        splits[split] = _checked(SplitFiles(files, aligned, tuple(columns)))
    _check_columns(splits)
    return splits


def _check_columns(splits: Mapping[str, SplitFiles]) -> None:
    """Raises a `ValueError` if column names are given, but no file has a format with columns."""
    for split in splits.values():
        if (
            not split.columns
            or split.aligned
            or any(file_kind(path) in TABLES for path in split.files)
        ):
            return
    files = [str(path) for split in splits.values() for path in split.files]
    raise ValueError(
        f"--columns names the columns of CSV and TSV files, but {files[0]} is neither. Leave "
        "--columns out."
    )


def _checked(split: SplitFiles) -> SplitFiles:
    """Checks that the files of a split exist and can be read, and returns the split.

    Raises:
      FileNotFoundError: if a file does not exist.
      ValueError: if the files of the split cannot be combined, or if the format of a file is not
        known.
    """
    for path in split.files:
        if not path.exists():
            raise FileNotFoundError(f"There is no file {path}.")
        if not split.aligned:
            file_kind(path)
        elif uncompressed(path).suffix in ROWS_WITH_FIELDS:
            raise ValueError(
                f"{path} has rows with fields, but aligned files must be plain text. Name such "
                "files without '+'."
            )
    if split.aligned and len(split.columns) not in (0, len(split.files)):
        raise ValueError(
            f"The number of names in --columns ({len(split.columns)}) differs from the number of "
            f"aligned files ({len(split.files)}). Give one name for each file."
        )
    names = split.fields if split.aligned else list(map(uncompressed, split.files))
    if len(set(names)) < len(names):
        raise ValueError(
            f"{', '.join(map(str, split.files))} cannot be told apart. Name every file only once, "
            "either plain or compressed. The names of aligned files must end differently, such as "
            "train.en and train.de."
        )
    return split


def _named_files(name: str) -> list[pathlib.Path]:
    """Returns the files that match a path, sorted by name.

    In the last part of the path, ``*`` stands for any characters.
    """
    path = pathlib.Path(name)
    if "*" not in path.name:
        return [path]
    files = sorted(path.parent.glob(path.name))
    if not files:
        raise FileNotFoundError(f"There is no file {name}.")
    return files


def _splits_of_folder(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns the files of each split in a folder.

    Raises:
      ValueError: if the path is not a folder, or if no name of a file in the folder begins with the
        name of a split.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a directory. Write --from SPLIT=FILE, such as --from train={folder}."
        )
    files: dict[str, list[pathlib.Path]] = {}
    for path in sorted(folder.iterdir()):
        beginning = "".join(itertools.takewhile(str.isalpha, path.name.lower()))
        if beginning in SPLIT_NAMES and path.is_file():
            files.setdefault(SPLIT_NAMES[beginning], []).append(path)
    if not files:
        raise ValueError(
            f"{folder} has no file whose name begins with train, validation or test. Name the "
            "files with --from SPLIT=FILE."
        )
    return files
