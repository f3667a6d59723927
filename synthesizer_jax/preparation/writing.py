"""Writes TFDS data sets. A data set is written completely or not at all."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import itertools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from etils import epy

from synthesizer_jax.base.files import (
    in_bucket,
    name_write_errors,
    temporary_directory,
    write_atomic,
)
from synthesizer_jax.tasks.stored import INFO, STAMP, load_info, stored_splits

with epy.lazy_imports():
    import numpy as np
    import tensorflow as tf
    import tensorflow_datasets as tfds

FeatureType: TypeAlias = "tfds.features.FeatureConnector | type[np.generic]"
"""A feature type of TFDS, or a dtype of NumPy."""

_log = logging.getLogger(__name__)


def write_dataset(
    dataset: str,
    version: str,
    features: Mapping[str, FeatureType],
    splits: Mapping[str, Callable[[], Iterable[Mapping[str, Any]]]],
    data_dir: pathlib.Path,
) -> pathlib.Path:
    """Writes a TFDS data set, which TFDS can read without a builder class for the data set.

    Args:
      dataset: the name of the data set, and its configuration if it has one, such as ``glue/cola``.
      version: the version, such as ``1.0.0``.
      features: the TFDS feature types by name.
      splits: for every split, a function that returns its rows.
      data_dir: a TFDS data directory. The function creates the directory ``dataset/version`` in it.

    Returns:
      The directory of the data set.

    Raises:
      OSError: if a file cannot be written.
    """
    from tensorflow_datasets.core import registered

    name, _, config = dataset.partition("/")
    description = f"{dataset}{STAMP}{datetime.datetime.now(datetime.UTC).isoformat()}"

    def make_info(self: tfds.core.GeneratorBasedBuilder) -> tfds.core.DatasetInfo:
        feature_types = tfds.features.FeaturesDict(dict(features))
        return tfds.core.DatasetInfo(builder=self, description=description, features=feature_types)

    attributes = {
        "name": name,
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)] if config else [],
        "VERSION": tfds.core.Version(version),
        "pkg_dir_path": pathlib.Path(__file__).parent,
        "_info": make_info,
        "_split_generators": lambda self, manager: {
            split: ((_key(row, number), row) for number, row in enumerate(read()))
            for split, read in splits.items()
        },
        "_generate_examples": None,
    }
    with registered.skip_registration():
        builder_class = type("WrittenDataset", (tfds.core.GeneratorBasedBuilder,), attributes)
    builder = builder_class(config=config or None, data_dir=str(data_dir))
    tfds.display_progress_bar(False)
    try:
        # Hide the messages of TFDS about a download, because nothing is downloaded.
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        # TFDS may raise a `RuntimeError` whose cause is the original error.
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError | tf.errors.OpError):
            raise
        reason = getattr(cause, "message", None) or str(cause)
        # Replace the message of TFDS, because it contains the size of the data set, which is not
        # known.
        if "Not enough disk space" in reason:
            reason = os.strerror(errno.ENOSPC)
        raise OSError(
            f"{builder.data_dir} cannot be written ({reason}). No data set was changed."
        ) from error
    return pathlib.Path(builder.data_dir)


def _key(row: Mapping[str, Any], number: int) -> Hashable:
    """Returns the key of a row, which determines the position of the row in the files.

    The key is the index that TFDS uses, or the number of the row if the row has no index.
    """
    index = row.get("idx", number)
    # The index of a row of ReCoRD or MultiRC consists of several numbers.
    if isinstance(index, Mapping):
        return index["query"] if "query" in index else "_".join(map(str, index.values()))
    return index


@contextlib.contextmanager
def staging(data_dir: pathlib.Path, *, renew: bool) -> Iterator[pathlib.Path]:
    """Context manager that yields a temporary folder, and installs the data sets in it at the end.

    When the context ends, the data sets in the folder are moved to the data directory. A data set
    replaces an existing data set with the same name and version. If there is an error, nothing is
    moved.

    Args:
      data_dir: the TFDS data directory to which the data sets are moved. The data directory must be
        on a disk. The directory is created if it does not exist.
      renew: whether existing data sets are replaced. If `renew` is `False`, the splits of an
        existing data set are kept, and the new splits are added.

    Raises:
      OSError: if the disk is full.
      ValueError: if the data directory is in a bucket, or if splits exist already.
    """
    if in_bucket(data_dir):
        raise ValueError(
            f"Data sets cannot be written to a bucket ({data_dir}). Write them to a directory, and "
            f"copy it (gcloud storage cp --recursive 'DIRECTORY/*' {data_dir}/)."
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(name_write_errors(data_dir, "No data set was changed"))
        data_dir.mkdir(parents=True, exist_ok=True)
        folder = stack.enter_context(temporary_directory(data_dir, ".import"))
        yield folder
        # Find the destination of every data set that was written to the folder.
        targets = {
            path.parent: data_dir / path.parent.relative_to(folder) for path in folder.rglob(INFO)
        }
        for written, target in targets.items():
            _keep_splits(target, written, renew=renew)
        for number, (written, target) in enumerate(targets.items()):
            target.parent.mkdir(parents=True, exist_ok=True)
            replaced = folder / f"replaced-{number}"
            if target.exists():
                target.rename(replaced)
            try:
                written.rename(target)
            except OSError:
                # If the new data set cannot be moved, move the old data set back.
                if replaced.exists():
                    replaced.rename(target)
                raise


def _keep_splits(installed: pathlib.Path, written: pathlib.Path, *, renew: bool) -> None:
    """Copies the splits of an installed data set into the new data set that will replace it.

    Args:
      installed: the directory of the installed data set, which may not exist.
      written: the directory of the new data set.
      renew: whether the installed splits are dropped instead of being copied. See `staging`.

    Raises:
      ValueError: if both data sets have a split of the same name, or if their features or
        definitions differ.
    """
    if not (installed / INFO).exists():
        return
    info = load_info(written / INFO)
    new = {split["name"] for split in info["splits"]}
    here = stored_splits(installed)
    for split in here.keys() - new:
        verb = "removed" if renew else "kept"
        _log.warning("The split %r of %s with %d rows is %s.", split, installed, here[split], verb)
    if renew:
        return
    problems = [f"has the split {split!r} already" for split in here.keys() & new]
    for path in written.glob("*.json"):
        if path.name != INFO and path.read_bytes() != (installed / path.name).read_bytes():
            problems.append(f"was imported with another {path.name}")
    if problems:
        raise ValueError(
            f"{installed} {problems[0]}. Give other splits and the same options as before, or "
            "replace the data set with --renew. Nothing was imported."
        )
    info["splits"] += load_info(installed / INFO)["splits"]
    for path in itertools.chain(*(installed.glob(f"*-{split}.*-of-*") for split in here)):
        shutil.copy2(path, written)
    write_atomic(written / INFO, json.dumps(info, indent=2))
