"""Arguments and options that several commands share, and what they open."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import typer
from typer.models import ArgumentInfo, OptionInfo

from synthesizer_jax.cli.recipes import complete_recipe
from synthesizer_jax.files import in_bucket, is_installed, storage_path

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.typing import PyTree

Path: TypeAlias = str | pathlib.Path


def _to_storage_path(path: Path | None) -> pathlib.Path | None:
    """Converts ``gs://BUCKET/…`` to a path in Google Cloud Storage, and other strings to local paths.

    None, the value of an option that is not given, stays None. For a path in a bucket, TensorFlow is
    loaded if it is installed, because its first import prints messages that must be suppressed.
    """
    if path is None:
        return None
    converted = storage_path(str(path))
    if in_bucket(converted) and is_installed("tensorflow"):
        _load_tensorflow()
    return converted


def to_storage_paths(paths: Iterable[Path] | None) -> list[pathlib.Path | None] | None:
    """Converts every path, also those in buckets."""
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


class OpenRun(NamedTuple):
    """A run whose checkpoints are used.

    Attributes:
      directory: its directory.
      experiment: its experiment.
      mesh: over which devices its variables are sharded.
      layout: how, see `place_variables`.
    """

    directory: pathlib.Path
    experiment: Experiment
    mesh: Mesh
    layout: PyTree

    def restore(self, step: int | None) -> tuple[int, PyTree]:
        """Returns the step and the variables of a checkpoint; None: the newest."""
        from synthesizer_jax.checkpoints.manager import restore_variables

        return restore_variables(self.directory / "checkpoints", step=step, layout=self.layout)


def open_run(directory: pathlib.Path, imports: Sequence[str] | None) -> OpenRun:
    """Opens a run with its code and the user's; its variables are to be sharded over all devices."""
    from synthesizer_jax.checkpoints.placement import place_variables
    from synthesizer_jax.runs import code
    from synthesizer_jax.training.run_directory import load_experiment

    code.load_user_code(imports or ())
    experiment = load_experiment(directory)
    mesh, layout = place_variables(experiment.model, experiment.example, experiment.mesh)
    return OpenRun(directory, experiment, mesh, layout)


EXTRAS = {
    "train": (
        "array_record",
        "msgpack",
        "rouge_score",
        "sacrebleu",
        "sklearn",
        "scipy",
        "tensorboardX",
    ),
    "data": ("tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio", "pyarrow"),
    "report": ("jinja2", "matplotlib"),
}
"""The extras of this package, and the modules that they install."""


def missing_extra_message(error: BaseException) -> str | None:
    """Returns the message for an import that needs an extra; None for other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{module} is not installed; run pip install 'synthesizer_jax[{extra}]'"
    return None


def load_data_libraries() -> None:
    """Imports TensorFlow and SeqIO without their messages, and hides the GPUs from TensorFlow.

    Raises:
      ModuleNotFoundError: TensorFlow or SeqIO is not installed.
    """
    _load_tensorflow()
    with _silent_stderr():
        import seqio  # noqa: F401 - imports TensorFlow Text, which prints the messages again


def _load_tensorflow() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _silent_stderr():
        import tensorflow as tf

        # TensorFlow would reserve all memory of the GPUs, which JAX needs.
        tf.config.set_visible_devices([], "GPU")


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discards what C++ code prints while it is imported, before the level of messages can be set."""
    sys.stderr.flush()
    own = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
