"""Listing and checking of TFDS data sets on disk before TFDS opens them.

TFDS imports any class that ``features.json`` names and opens any file that ``dataset_info.json``
points to. `check_dataset` only admits TFDS's own classes and files of the data set.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from synthesizer_jax.files import in_bucket, size_of
from synthesizer_jax.registry import JSON

INFO, FEATURES = "dataset_info.json", "features.json"

_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
_CLASS_KEYS = ("pythonClassName", "python_class_name", "type")
_NESTED_KEYS = ("json", "content")
_NAME_KEYS = ("name", "configName", "config_name", "version")
_TEMPLATE_KEYS = ("filepathTemplate", "filepath_template")
_RECORD_OVERHEAD = 16
"""Bytes that a TFRecord adds to its data: the length and two checksums."""

_REMEDY = "delete it, and import it again with 'synthesizer-jax data import'"


_Result = TypeVar("_Result")
_caches: list[functools._lru_cache_wrapper[Any]] = []


def cached_until_written(
    function: Callable[..., _Result],
) -> functools._lru_cache_wrapper[_Result]:
    """Decorates a function of stored data sets whose results are kept until one is written."""
    cached = functools.cache(function)
    _caches.append(cached)
    return cached


def forget_results() -> None:
    """Forgets what `cached_until_written` keeps, because data sets were written."""
    for cached in _caches:
        cached.cache_clear()


def prepared_versions(dataset: str, data_dir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the prepared versions of a data set such as ``glue/cola``, oldest first.

    Directories whose name does not have the form ``1.0.0`` are ignored.

    Args:
      dataset: name and configuration.
      data_dir: a TFDS data directory.

    Returns:
      ``{version: directory}``.
    """
    directories = {p.parent.name: p.parent for p in (data_dir / dataset).glob(f"*/{INFO}")}
    versions = sorted((v for v in directories if _VERSION.fullmatch(v)), key=_version_key)
    return {version: directories[version] for version in versions}


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


@cached_until_written
def stored_splits(directory: pathlib.Path) -> dict[str, int]:
    """Returns the number of examples of every split of a prepared data set.

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


def describe_split(directory: pathlib.Path, split: str) -> list[JSON]:
    """Returns the version of a prepared data set and what its ``dataset_info.json`` says of a split."""
    info = json.loads((directory / INFO).read_text(encoding="utf-8"))
    return [directory.name, [s for s in info.get("splits", []) if s.get("name") == split]]


def check_dataset(directory: pathlib.Path) -> None:
    """Raises an error if reading the data set may import foreign code or open files outside of it.

    Args:
      directory: of one version.

    Raises:
      ValueError: ``features.json`` names a class that is not TFDS's, ``dataset_info.json`` points
        out of the directory, one of the two is damaged, a file is not a regular file, or the size
        of a split's files is not the one in ``dataset_info.json``.
      FileNotFoundError: one of the two is missing.
    """
    if not in_bucket(directory):
        for path in directory.iterdir():
            _check_regular(path)
    for name in _class_names(_load(directory / FEATURES), directory / FEATURES):
        if not name.startswith("tensorflow_datasets."):
            raise ValueError(
                f"{directory / FEATURES} names the class {name!r}; only classes of "
                "tensorflow_datasets are imported because a file says so; if you trust the data set, "
                "write it again with TFDS's own features"
            )
    info = _load(directory / INFO)
    splits = info.get("splits", [])
    records = [info, *(split for split in splits if isinstance(split, dict))]
    for record in records:
        for key in (*_NAME_KEYS, *_TEMPLATE_KEYS):
            value = record.get(key, "")
            if not isinstance(value, str) or not _stays_inside(value, key in _TEMPLATE_KEYS):
                raise ValueError(
                    f"{directory / INFO} points out of its directory ({key} is {value!r}); {_REMEDY}"
                )
    for split in records[1:]:
        _check_size(directory, split)


def _check_size(directory: pathlib.Path, split: dict[str, JSON]) -> None:
    """Raises a `ValueError` if a split's files cannot contain exactly the records that TFDS wrote.

    TensorFlow detects a damaged record, but not a missing or duplicate one.
    """
    try:
        lengths, num_bytes = [int(n) for n in split["shardLengths"]], int(split["numBytes"])
        name = str(split["name"])
    except (LookupError, TypeError, ValueError):
        return  # `stored_splits` reports what is missing; sizes are optional
    shards = list(directory.glob(f"*-{name}.tfrecord-?????-of-{len(lengths):05}"))
    with ThreadPoolExecutor() as pool:  # one request per file in a bucket
        actual_size = sum(pool.map(size_of, shards))
    expected_size = num_bytes + _RECORD_OVERHEAD * sum(lengths)
    # TFDS on Beam stores the size of the files as `numBytes`.
    if len(shards) == len(lengths) and actual_size not in (expected_size, num_bytes):
        raise ValueError(
            f"the files of the split {name} in {directory} have {actual_size:,} bytes, but by {INFO} "
            f"it is {expected_size:,}; {_REMEDY}"
        )


def _check_regular(path: pathlib.Path) -> None:
    """Raises a `ValueError` for a pipe or a device, reading from which may block."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is no regular file; {_REMEDY}")


def _stays_inside(value: str, is_template: bool) -> bool:
    """Returns whether `value` is a plain file name, or a template of files below the directory."""
    path = pathlib.PurePosixPath(value)
    return ".." not in path.parts and not path.is_absolute() and (is_template or "/" not in value)


def _class_names(value: JSON, path: pathlib.Path) -> Iterator[str]:
    """Yields all class names in `features.json`.

    Old TFDS versions embed JSON strings in it; those are searched as well.
    """
    if isinstance(value, list):
        for child in value:
            yield from _class_names(child, path)
    elif isinstance(value, dict):
        for key, child in value.items():
            if isinstance(child, str) and key in _CLASS_KEYS:
                yield child
            elif isinstance(child, str) and key in _NESTED_KEYS:
                yield from _class_names(_parse(child, path), path)
            else:
                yield from _class_names(child, path)


def _load(path: pathlib.Path) -> dict[str, JSON]:
    _check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged (not UTF-8); {_REMEDY}") from error
    value = _parse(text, path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged (no JSON object); {_REMEDY}")
    return value


def _parse(text: str, path: pathlib.Path) -> JSON:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {_REMEDY}") from error


@contextlib.contextmanager
def reading_errors(what: str, place: pathlib.Path | str) -> Iterator[None]:
    """Context manager that turns errors of opening or reading stored rows into one-line messages.

    Args:
      what: the task and split that are read, for the message.
      place: the directory of the data set.

    Raises:
      ValueError: TensorFlow or TFDS could not read the files.
    """
    import tensorflow as tf
    from google.protobuf import json_format

    # TFDS does not validate what it reads.
    builtin_errors = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
    try:
        yield
    except (tf.errors.OpError, json_format.Error, *builtin_errors) as error:
        text = getattr(error, "message", None) or str(error)
        reason = " ".join(re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*", "", text).split())[:200]
        raise ValueError(
            f"{what} cannot be read from {place} ({reason or type(error).__name__}); {_REMEDY}"
        ) from error
