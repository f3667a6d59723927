"""Listing and checking of TFDS data sets on disk before TFDS opens them.

TFDS imports any class that ``features.json`` names and opens any file that ``dataset_info.json``
points to. `check_dataset` only admits TFDS's own classes and files of the data set.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from collections.abc import Iterator

from synthesizer_jax.files import describing
from synthesizer_jax.registry import JSON

INFO, FEATURES = "dataset_info.json", "features.json"
STAMP = ", written at "
"""What precedes the time in the description of a data set; rows of equal size are told apart by it."""

_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
_CLASS_KEYS = ("pythonClassName", "python_class_name", "type")
_NESTED_KEYS = ("json", "content")
_NAME_KEYS = ("name", "configName", "config_name", "version")
_TEMPLATE_KEYS = ("filepathTemplate", "filepath_template")
_REMEDY = "import it again with 'synthesizer-jax data import', or delete it"


def prepared_versions(dataset: str, data_dir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the versions of a data set such as ``glue/cola``, oldest first.

    Directories whose name does not have the form ``1.0.0`` are ignored.

    Args:
      dataset: name and configuration.
      data_dir: a TFDS data directory.

    Returns:
      ``{version: directory}``.
    """
    directories = {p.parent.name: p.parent for p in (data_dir / dataset).glob(f"*/{INFO}")}
    versions = [version for version in directories if _VERSION.fullmatch(version)]
    versions.sort(key=lambda version: [int(n) for n in version.split(".")])
    return {version: directories[version] for version in versions}


def stored_splits(directory: pathlib.Path) -> dict[str, int]:
    """Returns the number of examples of every split of a data set.

    Raises:
      ValueError: its ``dataset_info.json`` is damaged.
    """
    with describing(directory / INFO, _REMEDY):
        splits = _load(directory / INFO)["splits"]
        return {s["name"]: sum(map(int, s.get("shardLengths", []))) for s in splits}


def describe_split(dataset: str, directory: pathlib.Path, split: str) -> str:
    """Returns a data set with its version, and the sizes of the files of a split."""
    with describing(directory / INFO, _REMEDY):
        for record in _load(directory / INFO)["splits"]:
            if record["name"] == split:
                sizes = f"{record.get('shardLengths')}, {record.get('numBytes')} bytes"
                return f"{dataset}:{directory.name}, rows {sizes}{_stamp(directory)}"
    return f"{dataset}:{directory.name}"


def _stamp(directory: pathlib.Path) -> str:
    """Returns when this package has written a data set; empty for those that TFDS has prepared."""
    text = str(_load(directory / INFO).get("description", ""))
    return "".join(text.rpartition(STAMP)[1:]) if STAMP in text else ""


def check_dataset(directory: pathlib.Path) -> None:
    """Raises an error if reading the data set may import foreign code or open files outside of it.

    Args:
      directory: of one version.

    Raises:
      ValueError: ``features.json`` names a class that is not TFDS's, ``dataset_info.json`` points
        out of the directory, or one of the two is damaged.
      FileNotFoundError: one of the two is missing.
    """
    with describing(directory / FEATURES, _REMEDY):
        for name in _class_names(_load(directory / FEATURES)):
            if not name.startswith("tensorflow_datasets."):
                raise ValueError(
                    f"it names the class {name!r}; only classes of tensorflow_datasets are imported "
                    "because a file says so"
                )
    with describing(directory / INFO, _REMEDY):
        info = _load(directory / INFO)
        for record in (info, *info.get("splits", [])):
            for key in (*_NAME_KEYS, *_TEMPLATE_KEYS):
                if not _stays_inside(record.get(key, ""), key in _TEMPLATE_KEYS):
                    raise ValueError(
                        f"it points out of its directory ({key} is {record.get(key)!r})"
                    )


def _stays_inside(value: JSON, is_template: bool) -> bool:
    """Returns whether `value` is a plain file name, or a template of files below the directory."""
    if not isinstance(value, str):
        return False
    path = pathlib.PurePosixPath(value)
    return ".." not in path.parts and not path.is_absolute() and (is_template or "/" not in value)


def _class_names(value: JSON) -> Iterator[str]:
    """Yields all class names in `features.json`.

    Old TFDS versions embed JSON strings in it; those are searched as well.
    """
    if isinstance(value, list):
        for child in value:
            yield from _class_names(child)
    elif isinstance(value, dict):
        for key, child in value.items():
            if isinstance(child, str) and key in _CLASS_KEYS:
                yield child
            elif isinstance(child, str) and key in _NESTED_KEYS:
                yield from _class_names(json.loads(child))
            else:
                yield from _class_names(child)


def _load(path: pathlib.Path) -> dict[str, JSON]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


@contextlib.contextmanager
def reading_errors(what: str) -> Iterator[None]:
    """Context manager that turns errors of opening or reading stored rows into one-line messages.

    Args:
      what: the task and split that are read, and where from.

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
            f"{what} cannot be read ({reason or type(error).__name__}); {_REMEDY}"
        ) from error
