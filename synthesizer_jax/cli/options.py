"""Arguments and options that several commands share."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import typer
from typer.models import ArgumentInfo, OptionInfo

from synthesizer_jax.cli.libraries import load_tensorflow
from synthesizer_jax.cli.recipes import complete_recipe
from synthesizer_jax.files import READERS, in_bucket, is_installed, storage_path

Path: TypeAlias = str | pathlib.Path


def _to_storage_path(path: Path | None) -> pathlib.Path | None:
    """Converts ``gs://BUCKET/…`` to a path in Google Cloud Storage, and other strings to local paths.

    None, the value of an option that is not given, stays None. For a path in a bucket, TensorFlow is
    loaded if it is installed, because its first import prints messages that must be suppressed.

    Raises:
      ValueError: the path has another scheme.
      ModuleNotFoundError: no library that reads buckets is installed.
    """
    if path is None:
        return None
    converted = storage_path(str(path))
    if in_bucket(converted) and is_installed(READERS[0]):
        load_tensorflow()
    return converted


def to_storage_paths(paths: Iterable[Path] | None) -> list[pathlib.Path | None] | None:
    """Converts every path; see `_to_storage_path`."""
    return None if paths is None else [_to_storage_path(path) for path in paths]


def storage_option(help: str, *names: str, envvar: str | None = None) -> OptionInfo:
    """Returns an option that takes a local path or a path in a bucket.

    Args:
      help: the help text.
      names: the option's names, such as ``--input``; by default its parameter's name.
      envvar: an environment variable that sets the default.
    """
    return typer.Option(*names, help=help, callback=_to_storage_path, envvar=envvar)


def storage_argument(help: str, metavar: str | None = None) -> ArgumentInfo:
    """Returns an argument that takes a local path or a path in a bucket."""
    return typer.Argument(help=help, metavar=metavar, callback=_to_storage_path)


Recipe = Annotated[
    str,
    typer.Argument(
        help="FILE.py[:recipe], the name of a packaged recipe, or the directory of a run to start from.",
        autocompletion=complete_recipe,
    ),
]
Check = Annotated[
    bool | None,
    typer.Option(
        help="Compare logits with transformers, and fail where they differ; by default they are only "
        "printed, if it is installed."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a field, such as --set training.steps=200; `recipes RECIPE` shows all. Repeatable.",
        metavar="PATH=VALUE",
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Package to import or file to run first, with your own classes or tasks. Repeatable.",
        metavar="PACKAGE|FILE.py",
    ),
]
Workdir = Annotated[
    pathlib.Path,
    storage_option("Directory of the run, for checkpoints and logs; also gs://BUCKET/…."),
]
RunDirectory = Annotated[pathlib.Path, storage_option("Directory of the run.")]
DataDir = Annotated[
    pathlib.Path | None,
    storage_option(
        "Directory of prepared data sets; also gs://BUCKET/….", envvar="SYNTHESIZER_DATA_DIR"
    ),
]
Step = Annotated[
    int | None, typer.Option(help="Step of the checkpoint; by default the newest one.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress bar.")]
