"""TFDS data sets on disk: which there are, and what is asked of them before TFDS opens them.

TFDS imports the classes that ``features.json`` names and opens the files that ``dataset_info.json``
points to, whatever they are. `check` lets it see only classes of its own and files of the data set.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from synthesizer_jax.files import in_bucket, size_of

INFO, FEATURES = "dataset_info.json", "features.json"

_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
_CLASS_KEYS = ("pythonClassName", "python_class_name", "type")
_NESTED_KEYS = ("json", "content")
_NAME_KEYS = ("name", "configName", "config_name", "version")
_TEMPLATE_KEYS = ("filepathTemplate", "filepath_template")
_AROUND_RECORD = 16
"""Bytes of a TFRecord's length and checksums."""

_REMEDY = "import it again with 'synthesizer-jax data import', or delete it"


def prepared(dataset: str, data_dir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Prepared versions of a data set such as ``glue/cola``, ``{version: directory}``, oldest first.

    Folders whose name is not of the form ``1.0.0`` are no versions.
    """
    found = {p.parent.name: p.parent for p in (data_dir / dataset).glob(f"*/{INFO}")}
    order = sorted((v for v in found if _VERSION.fullmatch(v)), key=_numbers)
    return {version: found[version] for version in order}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


@functools.cache
def stored_splits(directory: pathlib.Path) -> dict[str, int]:
    """Number of examples of every split of a prepared data set.

    Raises:
      ValueError: its ``dataset_info.json`` is damaged.
    """
    path = directory / INFO
    info = _load(path)
    try:
        return {s["name"]: sum(map(int, s.get("shardLengths", []))) for s in info["splits"]}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged (no list of splits with shardLengths); {_REMEDY}"
        ) from error


def check(directory: pathlib.Path) -> None:
    """Refuses a data set that would have TFDS import foreign code or open files outside of it.

    Args:
      directory: of one version.

    Raises:
      ValueError: ``features.json`` names a class that is not TFDS's, ``dataset_info.json`` points
        out of the directory, one of the two is damaged, a file is none, or a split's files are longer or
        shorter than ``dataset_info.json`` says.
      FileNotFoundError: one of the two is missing.
    """
    if not in_bucket(directory):
        for path in directory.iterdir():
            _check_no_pipe(path)
    for name in _class_names(_load(directory / FEATURES), directory / FEATURES):
        if not name.startswith("tensorflow_datasets."):
            raise ValueError(
                f"{directory / FEATURES} names the class {name!r}; only classes of "
                "tensorflow_datasets are imported because a file says so; if you trust the data set, "
                "write it again with TFDS's own features"
            )
    info = _load(directory / INFO)
    splits = info.get("splits", [])
    parts = [info, *(split for split in splits if isinstance(split, dict))]
    for part in parts:
        for key in (*_NAME_KEYS, *_TEMPLATE_KEYS):
            value = part.get(key, "")
            if not isinstance(value, str) or not _stays(value, key in _TEMPLATE_KEYS):
                raise ValueError(
                    f"{directory / INFO} points out of its directory ({key} is {value!r}); {_REMEDY}"
                )
    for split in parts[1:]:
        _check_size(directory, split)


def _check_size(directory: pathlib.Path, split: dict[str, Any]) -> None:
    """Raises a `ValueError` where a split's records cannot be those that TFDS has written.

    TensorFlow notices what is wrong within a record, but not one that is missing or there twice.
    """
    try:
        lengths, size = [int(n) for n in split["shardLengths"]], int(split["numBytes"])
        name = str(split["name"])
    except (LookupError, TypeError, ValueError):
        return  # `stored_splits` tells what is missing; sizes are not always there
    shards = list(directory.glob(f"*-{name}.tfrecord-?????-of-{len(lengths):05}"))
    with ThreadPoolExecutor() as pool:  # a bucket is asked for each
        found = sum(pool.map(size_of, shards))
    records = size + _AROUND_RECORD * sum(lengths)
    if len(shards) == len(lengths) and found not in (records, size):  # TFDS on Beam counts files
        raise ValueError(
            f"the files of the split {name} in {directory} have {found:,} bytes, but by {INFO} "
            f"it is {records:,}; {_REMEDY}"
        )


def _check_no_pipe(path: pathlib.Path) -> None:
    """A pipe or a device would be waited for."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is no regular file; {_REMEDY}")


def _stays(value: str, is_template: bool) -> bool:
    """Whether a name is the name of one file, or a template that of files below the directory."""
    path = pathlib.PurePosixPath(value)
    return ".." not in path.parts and not path.is_absolute() and (is_template or "/" not in value)


def _class_names(value: Any, path: pathlib.Path) -> Iterator[str]:
    """All class names in a `features.json`, also in the JSON texts that old TFDS versions wrote."""
    if isinstance(value, list):
        for part in value:
            yield from _class_names(part, path)
    elif isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, str) and key in _CLASS_KEYS:
                yield part
            elif isinstance(part, str) and key in _NESTED_KEYS:
                yield from _class_names(_parse(part, path), path)
            else:
                yield from _class_names(part, path)


def _load(path: pathlib.Path) -> dict[str, Any]:
    _check_no_pipe(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged (not UTF-8); {_REMEDY}") from error
    value = _parse(text, path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged (no JSON object); {_REMEDY}")
    return value


def _parse(text: str, path: pathlib.Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {_REMEDY}") from error


@contextlib.contextmanager
def reading(what: str, place: pathlib.Path | str) -> Iterator[None]:
    """Around whatever opens or reads stored rows: damage ends in one sentence.

    Args:
      what: the task and split that are read, for the message.
      place: the directory of the data set.

    Raises:
      ValueError: TensorFlow or TFDS could not read the files.
    """
    import tensorflow as tf
    from google.protobuf import json_format

    own = (AssertionError, AttributeError, LookupError, TypeError, ValueError)  # TFDS trips over it
    try:
        yield
    except (tf.errors.OpError, json_format.Error, *own) as error:
        text = getattr(error, "message", None) or str(error)
        reason = " ".join(re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*", "", text).split())[:200]
        raise ValueError(
            f"{what} cannot be read from {place} ({reason or type(error).__name__}); {_REMEDY}"
        ) from error
