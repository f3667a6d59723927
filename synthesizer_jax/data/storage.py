"""TFDS data sets on disk: written from rows, put into place when whole."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]


def write_dataset(
    name: str,
    config: str,
    *,
    version: str,
    description: str,
    features: Mapping[str, Any],
    splits: Mapping[str, Callable[[], Iterable[Row]]],
    data_dir: pathlib.Path,
) -> pathlib.Path:
    """Writes one TFDS data set; what reads it needs its files alone.

    Args:
      name: of the data set.
      config: its configuration.
      version: such as ``1.0.0``.
      description: what it is.
      features: TFDS feature types by name.
      splits: for every split a function that gives its rows.
      data_dir: a TFDS data directory.

    Returns:
      The directory ``data_dir/name/config/version``.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import registered

    def info(self: Any) -> Any:
        types = tfds.features.FeaturesDict(dict(features))
        return tfds.core.DatasetInfo(builder=self, description=description, features=types)

    def examples(self: Any, split: str) -> Iterator[tuple[int, Row]]:
        yield from enumerate(splits[split]())

    def split_generators(self: Any, dl_manager: Any) -> Any:
        return {split: self._generate_examples(split) for split in splits}

    members = {
        "name": name,
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)],
        "VERSION": tfds.core.Version(version),
        "pkg_dir_path": pathlib.Path(__file__).parent,
        "_info": info,
        "_split_generators": split_generators,
        "_generate_examples": examples,
    }
    with registered.skip_registration():
        builder = type("WrittenDataset", (tfds.core.GeneratorBasedBuilder,), members)
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces a download
        builder(config=config, data_dir=str(data_dir)).download_and_prepare()
    return data_dir / name / config / version


def put(new: pathlib.Path, place: pathlib.Path, work: pathlib.Path) -> None:
    """Moves a finished data set into place by renaming; one that is there goes to `work`."""
    place.parent.mkdir(parents=True, exist_ok=True)
    old = pathlib.Path(tempfile.mkdtemp(dir=work)) / "old"
    if place.exists():
        os.replace(place, old)
    try:
        os.replace(new, place)
    except OSError:
        if old.exists():
            os.replace(old, place)
        raise
