"""TFDS data sets on disk: what is there, read without TFDS."""

from __future__ import annotations

import json
import pathlib
import re

from synthesizer_jax.base.files import describing
from synthesizer_jax.base.registry import JSON

INFO, FEATURES = "dataset_info.json", "features.json"
STAMP = ", written at "
"""What precedes the time in the description of a data set; rows of equal size are told apart by it."""

REMEDY = "import it again with 'synthesizer-jax data import', or delete it"


def newest_version(dataset: str, data_dir: pathlib.Path) -> pathlib.Path | None:
    """Returns the directory of the newest version of a data set such as ``glue/cola``; None: there is none.

    Directories whose name does not have the form ``1.0.0`` are ignored.
    """
    versions = [path.parent for path in (data_dir / dataset).glob(f"*/{INFO}")]
    versions = [path for path in versions if re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", path.name)]
    return max(versions, key=lambda path: [int(n) for n in path.name.split(".")], default=None)


def stored_splits(directory: pathlib.Path) -> dict[str, int]:
    """Returns the number of examples of every split of a data set.

    Raises:
      ValueError: its ``dataset_info.json`` is damaged.
    """
    with describing(directory / INFO, REMEDY):
        splits = load_info(directory / INFO)["splits"]
        return {s["name"]: sum(map(int, s.get("shardLengths", []))) for s in splits}


def describe_split(dataset: str, directory: pathlib.Path, split: str) -> str:
    """Returns a data set with its version, the sizes of the files of a split, and when it was written."""
    with describing(directory / INFO, REMEDY):
        info = load_info(directory / INFO)
        for record in info["splits"]:
            if record["name"] == split:
                sizes = f"{record.get('shardLengths')}, {record.get('numBytes')} bytes"
                _, stamp, time = str(info.get("description", "")).rpartition(STAMP)
                return f"{dataset}:{directory.name}, rows {sizes}" + (stamp and stamp + time)
    return f"{dataset}:{directory.name}"


def check_classes(directory: pathlib.Path) -> None:
    """Raises a `ValueError` if TFDS would import foreign code because a file of the data set says so."""
    with describing(directory / FEATURES, REMEDY):
        text = (directory / FEATURES).read_text(encoding="utf-8").replace("\\", "")
        for name in re.findall(r'"(?:type|pythonClassName|python_class_name)": *"([^"]*)"', text):
            if not name.startswith("tensorflow_datasets."):
                raise ValueError(f"it names the class {name!r}, which is not one of TFDS")


def load_info(path: pathlib.Path) -> dict[str, JSON]:
    """Returns the contents of ``dataset_info.json``."""
    return dict(json.loads(path.read_text(encoding="utf-8")))
