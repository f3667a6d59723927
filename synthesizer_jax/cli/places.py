"""Options that are paths on a disk or in a bucket."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from synthesizer_jax.cli.libraries import load_tensorflow
from synthesizer_jax.files import READERS, in_bucket, is_installed, storage_path


def storage(given: Any) -> Any:
    """Has an option's path, or all of them, lead into a bucket where ``gs://BUCKET/…`` was typed.

    What reads buckets is loaded without its start-up notes.

    Raises:
      ValueError: it is an address of another kind.
      ModuleNotFoundError: what reads buckets is not installed.
    """
    if given is None:
        return None
    if isinstance(given, list | tuple):
        return [storage(one) for one in given]
    path = storage_path(str(given))
    if in_bucket(path) and is_installed(READERS[0]):
        load_tensorflow()
    return path


def option(help: str, *names: str, **options: Any) -> Any:
    """An option for a path, also in a bucket."""
    return typer.Option(*names, help=help, callback=storage, **options)


Workdir = Annotated[
    pathlib.Path, option("Where checkpoints and logs of the run lie; also gs://BUCKET/….")
]
DataDir = Annotated[
    pathlib.Path | None,
    option("Where prepared data sets lie; also gs://BUCKET/….", envvar="SYNTHESIZER_DATA_DIR"),
]
