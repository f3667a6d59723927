"""Writing of TFDS data sets, from rows or with one of TFDS's builders, and adding splits to them."""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import json
import logging
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from synthesizer_jax.files import in_bucket, temporary_directory, write_atomic
from synthesizer_jax.tasks.stored import INFO, STAMP, check_dataset, stored_splits

if TYPE_CHECKING:
    import numpy as np
    import tensorflow_datasets as tfds

    FeatureType: TypeAlias = tfds.features.FeatureConnector | type[np.generic]

Row = Mapping[str, object]

_log = logging.getLogger(__name__)


def write_dataset(
    name: str,
    config: str | None,
    *,
    version: str,
    description: str,
    features: Mapping[str, FeatureType],
    splits: Mapping[str, Callable[[], Iterable[Row]]],
    data_dir: pathlib.Path,
) -> pathlib.Path:
    """Writes one TFDS data set; its files alone suffice to read it.

    Args:
      name: of the data set.
      config: name of its configuration; None: it has none.
      version: such as ``1.0.0``.
      description: of the data set.
      features: TFDS feature types by name.
      splits: for every split a function that returns its rows.
      data_dir: a TFDS data directory.

    Returns:
      The directory ``data_dir/name/config/version``, or without the configuration.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import registered

    def make_info(self: tfds.core.GeneratorBasedBuilder) -> tfds.core.DatasetInfo:
        feature_types = tfds.features.FeaturesDict(dict(features))
        return tfds.core.DatasetInfo(builder=self, description=description, features=feature_types)

    def generate_examples(
        self: tfds.core.GeneratorBasedBuilder, split: str
    ) -> Iterator[tuple[int, Row]]:
        del self
        yield from enumerate(splits[split]())

    def split_generators(
        self: tfds.core.GeneratorBasedBuilder, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, Row]]]:
        del dl_manager
        return {split: self._generate_examples(split) for split in splits}

    attributes = {
        "name": name,
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)] if config else [],
        "VERSION": tfds.core.Version(version),
        "pkg_dir_path": pathlib.Path(__file__).parent,
        "_info": make_info,
        "_split_generators": split_generators,
        "_generate_examples": generate_examples,
    }
    with registered.skip_registration():
        builder = type("WrittenDataset", (tfds.core.GeneratorBasedBuilder,), attributes)
    return prepare_builder(builder(config=config, data_dir=str(data_dir)))


def prepare_builder(
    builder: tfds.core.DatasetBuilder,
    *,
    download_config: tfds.download.DownloadConfig | None = None,
) -> pathlib.Path:
    """Writes a builder's data set without TFDS's progress bars and returns its directory.

    Raises:
      OSError: a file cannot be written.
    """
    import tensorflow as tf
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.utils import tqdm_utils

    was_active = tqdm_utils._active
    tfds.display_progress_bar(False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS prints about a download
            builder.download_and_prepare(download_config=download_config)
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) else error  # TFDS wraps some
        if not isinstance(cause, OSError | tf.errors.OpError):
            raise
        reason = getattr(cause, "message", None) or str(cause)
        raise OSError(
            f"{builder.data_dir} cannot be written ({reason}); no data set was changed"
        ) from error
    finally:
        tfds.display_progress_bar(was_active)
    directory = pathlib.Path(builder.data_dir)
    info = json.loads((directory / INFO).read_text(encoding="utf-8"))
    info["description"] += f"{STAMP}{datetime.datetime.now(datetime.UTC).isoformat()}"
    write_atomic(directory / INFO, json.dumps(info, indent=2))
    return directory


@contextlib.contextmanager
def temporary_folder(data_dir: pathlib.Path) -> Iterator[pathlib.Path]:
    """Context manager of a folder in a data directory for what is not yet whole; it is removed in the end.

    Raises:
      ValueError: the data directory is in a bucket.
    """
    if in_bucket(data_dir):
        raise ValueError(
            f"data sets are not written to a bucket ({data_dir}); write them to a directory and copy it: "
            f"gcloud storage cp --recursive 'DIRECTORY/*' {data_dir}/"
        )
    data_dir.mkdir(parents=True, exist_ok=True)
    with temporary_directory(data_dir, ".import") as folder:
        yield folder


def install(
    directories: Iterable[pathlib.Path],
    folder: pathlib.Path,
    data_dir: pathlib.Path,
    *,
    renew: bool,
) -> None:
    """Moves data sets to their places, one after another; each place holds a whole data set or none.

    Args:
      directories: version directories in `folder`.
      folder: a `temporary_folder` of `data_dir`.
      data_dir: a TFDS data directory.
      renew: see `keep_splits`, which may raise before anything is moved.
    """
    places = {new: data_dir / new.relative_to(folder) for new in directories}
    for new, place in places.items():
        keep_splits(place, new, renew=renew)
    for number, (new, place) in enumerate(places.items()):
        place.parent.mkdir(parents=True, exist_ok=True)
        replaced = folder / f"replaced-{number}"
        if place.exists():
            place.rename(replaced)
        try:
            new.rename(place)
        finally:
            if replaced.exists() and not place.exists():
                replaced.rename(place)


def keep_splits(installed: pathlib.Path, written: pathlib.Path, *, renew: bool) -> None:
    """Copies the splits of an installed data set into the one that is to take its place.

    Args:
      installed: the version directory of the data set, which may not exist.
      written: that of the new one.
      renew: whether the data set is replaced; then the log says which splits are removed.

    Raises:
      ValueError: without `renew`, both have a split, or they differ in more than their splits.
    """
    if not (installed / INFO).exists():
        return
    info = json.loads((written / INFO).read_text(encoding="utf-8"))
    new, here = {split["name"] for split in info["splits"]}, stored_splits(installed)
    for split in here.keys() - new:
        verb = "removes" if renew else "keeps"
        _log.warning("%s the split %r of %s, %d rows", verb, split, installed, here[split])
    if renew:
        return
    problems = [f"has the split {split!r} already" for split in here.keys() & new]
    for path in written.glob("*.json"):
        if path.name != INFO and path.read_bytes() != (installed / path.name).read_bytes():
            problems.append(f"was imported with another {path.name}")
    if problems:
        remedy = "replace the data set with --renew, or add other splits alone"
        raise ValueError(f"{installed} {problems[0]}; {remedy}; nothing was imported")
    check_dataset(installed)
    info["splits"] += json.loads((installed / INFO).read_text(encoding="utf-8"))["splits"]
    for path in itertools.chain(*(installed.glob(f"*-{split}.*-of-*") for split in here)):
        shutil.copy2(path, written)
    write_atomic(written / INFO, json.dumps(info, indent=2))
