"""Rows of Parquet and Arrow files, and the folders that Hugging Face's `datasets` saves."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from synthesizer_jax.registry import JSON
from synthesizer_jax.tasks.importers.reading import Row, import_error, parse_object
from synthesizer_jax.tasks.postprocessors import UNKNOWN

if TYPE_CHECKING:
    import pyarrow

SPLITS, STATE = "dataset_dict.json", "state.json"
"""Files of a saved folder of splits, and of one of a single split."""


def parquet_rows(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _arrow_rows(file.iter_batches())
    except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
        raise import_error(path, "the whole file", f"not Parquet ({error})") from None


def arrow_rows(path: pathlib.Path) -> Iterator[tuple[str, Row]]:
    """Yields the rows of an Arrow stream of `datasets`, labels replaced by their names."""
    import pyarrow as pa

    names = _label_names(path.parent)
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            for where, row in _arrow_rows(reader):
                yield where, {k: _named(v, names.get(k)) for k, v in row.items()}
    except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
        raise import_error(path, "the whole file", f"not Arrow ({error})") from None


def saved_splits(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns the files of every split that `datasets` saved in a folder, by the name of the split."""
    path = folder / SPLITS
    return {
        name: split_files(folder / name) for name in _names(_read_json(path).get("splits"), path)
    }


def _names(value: JSON, path: pathlib.Path) -> list[str]:
    """Returns a list of names of files or folders beside a JSON file that lists them.

    Raises:
      ValueError: it is something else, or a name lies outside of the folder.
    """
    if not isinstance(value, list):
        raise ValueError(f"{path} has no list of names; save the data set again with save_to_disk")
    for name in value:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise ValueError(f"{path} names the file {name!r}, outside of it")
    return [str(name) for name in value]


def split_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of one split of a folder that `datasets` saved, in its order."""
    path = folder / STATE
    listed = _read_json(path).get("_data_files")
    if isinstance(listed, list):
        listed = [file.get("filename") if isinstance(file, dict) else file for file in listed]
    return [folder / name for name in _names(listed, path)]


def _label_names(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns the names of the classes of the features that are labels, by feature."""
    path = folder / "dataset_info.json"
    features = _read_json(path).get("features") if path.is_file() else None
    if not isinstance(features, dict):
        return {}
    return {
        name: [str(n) for n in feature["names"]]
        for name, feature in features.items()
        if isinstance(feature, dict) and isinstance(feature.get("names"), list)
    }


def _named(value: JSON, names: list[str] | None) -> JSON:
    """Returns the name of a label, `UNKNOWN` for −1; other values as they are."""
    if names is None or not isinstance(value, int):
        return value
    return names[value] if 0 <= value < len(names) else UNKNOWN


def _read_json(path: pathlib.Path) -> Row:
    if not path.is_file():
        raise ValueError(f"{path} is missing; save the data set again with save_to_disk")
    return parse_object(path, 1, path.read_text(encoding="utf-8", errors="replace"))


def _arrow_rows(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[tuple[str, Row]]:
    """Yields the rows of Arrow batches, numbered from 1."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", {name: _as_json(value) for name, value in row.items()}


def _as_json(value: object) -> JSON:
    """Returns a value of Arrow as JSON has it: bytes are UTF-8 text, dates and the like their text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
