"""Finds and describes TFDS data sets on disk, without TFDS."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re

from synthesizer_jax.base.files import describing
from synthesizer_jax.base.registry import JSON

INFO, FEATURES = "dataset_info.json", "features.json"
STAMP = ", written at "
"""The text before the time in the description of a data set.

If the files of two versions of a data set have equal sizes, only the time tells the versions apart.
"""

REMEDY = "Import it again with 'synthesizer-jax data import', or delete it."
"""The last sentence of error messages about damaged data sets."""

_CLASS_KEYS = ("type", "pythonClassName", "python_class_name")
"""The keys under which versions of TFDS and of protobuf write the names of classes."""


def newest_version(dataset: str, data_dir: pathlib.Path) -> pathlib.Path | None:
    """Returns the directory of the newest version of a data set, or `None` if there is no version.

    Directories whose names do not have the form ``1.0.0`` are ignored.

    Args:
      dataset: the name of the data set, such as ``glue/cola``.
      data_dir: the data directory.
    """
    versions = [path.parent for path in (data_dir / dataset).glob(f"*/{INFO}")]
    versions = [path for path in versions if re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", path.name)]
    return max(versions, key=lambda path: [int(n) for n in path.name.split(".")], default=None)


def stored_splits(directory: pathlib.Path) -> dict[str, int]:
    """Returns the number of examples of every split of a data set.

    Args:
      directory: the directory of a version of the data set.

    Raises:
      ValueError: if its ``dataset_info.json`` is damaged.
    """
    with describing(directory / INFO, REMEDY):
        splits = load_info(directory / INFO)["splits"]
        return {s["name"]: sum(map(int, s.get("shardLengths", []))) for s in splits}


def describe_split(dataset: str, directory: pathlib.Path, split: str) -> str:
    """Returns a description of a split, which changes if the split is written again.

    The description contains the name and version of the data set, and the sizes of the split's
    files. If the time at which the files were written is known, the description also contains this
    time.

    Raises:
      ValueError: if ``dataset_info.json`` is damaged.
    """
    with describing(directory / INFO, REMEDY):
        info = load_info(directory / INFO)
        for record in info["splits"]:
            if record["name"] == split:
                sizes = f"{record.get('shardLengths')}, {record.get('numBytes')} bytes"
                _, stamp, time = str(info.get("description", "")).rpartition(STAMP)
                return f"{dataset}:{directory.name}, rows {sizes}" + (stamp and stamp + time)
    return f"{dataset}:{directory.name}"


def check_classes(directory: pathlib.Path) -> None:
    """Raises a `ValueError` if a data set names a class that is not part of TFDS.

    TFDS imports the classes that ``features.json`` names, so a downloaded file could run untrusted
    code.
    """
    with describing(directory / FEATURES, REMEDY):
        for name in _class_names((directory / FEATURES).read_text(encoding="utf-8")):
            if not name.startswith("tensorflow_datasets."):
                raise ValueError(f"The file names the class {name!r}, which is not part of TFDS.")


def _class_names(text: str) -> list[str]:
    """Returns the class names that occur in a JSON text.

    The content of a feature may be a string that contains JSON, which TFDS also reads.

    Raises:
      json.JSONDecodeError: if the text is not JSON.
    """
    names: list[str] = []

    def check(pairs: list[tuple[str, JSON]]) -> None:
        for key, value in pairs:
            if not isinstance(value, str):
                continue
            if key in _CLASS_KEYS:
                names.append(value)
            else:
                with contextlib.suppress(json.JSONDecodeError):  # most strings are plain text
                    names.extend(_class_names(value))

    # A hook is used because it receives every JSON object of the text, including duplicate keys.
    json.loads(text, object_pairs_hook=check)
    return names


def load_info(path: pathlib.Path) -> dict[str, JSON]:
    """Returns the contents of ``dataset_info.json``."""
    return dict(json.loads(path.read_text(encoding="utf-8")))
