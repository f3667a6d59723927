"""TFDS data sets written to disk, from rows or by a builder of TFDS's own."""

from __future__ import annotations

import contextlib
import io
import pathlib
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
    return prepare(builder(config=config, data_dir=str(data_dir)))


def prepare(builder: Any, **options: Any) -> pathlib.Path:
    """Has TFDS write a builder's data set, without its progress bars; returns the directory.

    Raises:
      OSError: a file cannot be written.
    """
    import tensorflow as tf
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.utils import tqdm_utils

    bars = tqdm_utils._active
    tfds.display_progress_bar(False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces a download
            builder.download_and_prepare(**options)
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        found = error.__cause__ if isinstance(error, RuntimeError) else error  # TFDS wraps some
        if not isinstance(found, OSError | tf.errors.OpError):
            raise
        reason = getattr(found, "message", None) or str(found)
        raise OSError(
            f"{builder.data_dir} cannot be written ({reason}); every data set is as before"
        ) from error
    finally:
        tfds.display_progress_bar(bars)
    return pathlib.Path(builder.data_dir)
