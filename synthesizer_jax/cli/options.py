"""Turns functions into commands, and contains the code that several commands share.

The shared code defines options, opens runs and prints tables.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pathlib
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.models import ArgumentInfo, OptionInfo

from synthesizer_jax.base.files import in_bucket, is_installed, storage_path
from synthesizer_jax.base.registry import format_limits, matches_type
from synthesizer_jax.cli.recipes import complete_recipe

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from synthesizer_jax.base.typing import PyTree
    from synthesizer_jax.training.experiment import Experiment

Recipe = Annotated[
    str,
    typer.Argument(
        help=(
            "A file FILE.py[:recipe], the name of a recipe of this package, or the directory of a "
            "run to start from."
        ),
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help=(
            "Change a field, for example --set training.steps=200. The command `recipes RECIPE` "
            "lists all fields. Repeatable."
        ),
        metavar="PATH=VALUE",
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help=(
            "A package or a file with your own classes or tasks, which is loaded first. Repeatable."
        ),
        metavar="PACKAGE|FILE.py",
    ),
]
DataDir = Annotated[
    pathlib.Path | None,
    typer.Option(
        help="The directory of data sets. It may be in a bucket, gs://BUCKET/….",
        envvar="SYNTHESIZER_DATA_DIR",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not show a progress bar.")]


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that Typer can register as a command.

    Parameters before ``*`` become arguments of the command, and the other parameters become
    options. If the metadata of an annotation contains a string, as in ``Annotated[..., "--all"]``,
    the string is the name of the option. If an annotation has limits, as `Count` has, the value is
    checked before the function is called. A path may be in a bucket (``gs://BUCKET/…``). The `Args`
    of the function's docstring become the help texts, and the docstring before `Args` becomes the
    description of the command.

    Args:
      function: the function, with annotations for all parameters.

    Returns:
      A function with the same parameters. The returned function raises a `ValueError` if a value is
      outside the limits of a parameter.
    """
    described, _, arguments = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    # Each match consists of the name of a parameter and its description, including continuation
    # lines.
    texts = dict(re.findall(r"^  (\w+): (.*(?:\n    .*)*)", arguments, re.MULTILINE))
    kinds = typing.get_type_hints(function)
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = [
        _typer_parameter(
            parameter,
            kinds[name],
            metadata=getattr(hints[name], "__metadata__", ()),
            text=texts.get(name, ""),
        )
        for name, parameter in inspect.signature(function).parameters.items()
    ]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, value in values.items():
            limits = format_limits(hints[name])
            if limits and not matches_type(value, hints[name]):
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is {value!r}, but it must be {limits}.")
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = described
    return command


def _typer_parameter(
    parameter: inspect.Parameter, kind: Any, *, metadata: Sequence[object], text: str
) -> inspect.Parameter:
    """Returns a copy of a parameter with an annotation that tells Typer how to parse the parameter.

    Args:
      parameter: the parameter. A keyword-only parameter becomes an option.
      kind: the type of the parameter.
      metadata: the metadata of the parameter's annotation. The metadata may contain names of the
        option, and one of Typer's objects with further properties.
      text: the help text from the docstring of the function.
    """
    names = [entry for entry in metadata if isinstance(entry, str)]
    if kind is bool and parameter.default is False and not names:
        # Name the option explicitly, so that Typer does not add an opposite option, such as
        # --no-quiet.
        names = [f"--{parameter.name.replace('_', '-')}"]
    is_option = parameter.kind is parameter.KEYWORD_ONLY
    info = typer.Option(*names) if is_option else typer.Argument()
    for entry in metadata:
        # Copy the object, because several commands share it, and each command may set a different
        # help text.
        if isinstance(entry, ArgumentInfo | OptionInfo):
            info = copy.copy(entry)
    text = " ".join(text.split())
    info.help = info.help or text[:1].upper() + text[1:]
    if "Path" in str(kind):
        info.callback = _to_storage_paths
    return parameter.replace(annotation=Annotated[kind, info])


def _to_storage_paths(path: Any) -> Any:
    """Converts ``gs://BUCKET/…`` to a path in Google Cloud Storage.

    `None` and paths outside of buckets are returned unchanged. The entries of a list are converted
    one by one. If the path is in a bucket and TensorFlow is installed, this function imports
    TensorFlow. This import suppresses the messages that TensorFlow would print when it is first
    imported.
    """
    if path is None:
        return None
    if isinstance(path, list | tuple):
        return [_to_storage_paths(entry) for entry in path]
    converted = storage_path(str(path))
    if in_bucket(converted) and is_installed("tensorflow"):
        from synthesizer_jax.preparation.rows import import_tensorflow

        import_tensorflow()
    return converted


def chosen_run(run: pathlib.Path | None, workdir: pathlib.Path | None) -> pathlib.Path:
    """Returns the directory of the run, which can be given as RUN or as --workdir RUN.

    Args:
      run: the directory that was given as an argument, or `None`.
      workdir: the directory that was given with --workdir, or `None`.

    Raises:
      ValueError: neither of the two directories is given, or both are given.
    """
    given = [directory for directory in (run, workdir) if directory is not None]
    if len(given) != 1:
        raise ValueError("Give the directory of the run once, either as RUN or as --workdir RUN.")
    return given[0]


class OpenRun(NamedTuple):
    """A run whose checkpoints can be restored.

    Attributes:
      directory: the directory of the run.
      experiment: the experiment of the run.
      mesh: the mesh over which the variables are sharded.
      layout: the shapes, dtypes and shardings of the variables; see `place_variables`.
    """

    directory: pathlib.Path
    experiment: Experiment
    mesh: Mesh
    layout: PyTree

    def restore(self, step: int | None) -> tuple[int, PyTree]:
        """Returns the step and the variables of a checkpoint.

        Args:
          step: the step of the checkpoint. `None` means the newest checkpoint.
        """
        from synthesizer_jax.training.initial_parameters import restore_run

        return restore_run(self.directory, step=step, layout=self.layout)


def open_run(directory: pathlib.Path, imports: Sequence[str] | None) -> OpenRun:
    """Opens a run, and plans how to shard the variables of the run over all devices.

    The function does not read any checkpoint.

    Args:
      directory: the directory of the run.
      imports: the user's packages or files. The packages and files are loaded before the run,
        because the run may need the user's classes or tasks.
    """
    from synthesizer_jax.checkpoints.placement import place_variables
    from synthesizer_jax.runs import code
    from synthesizer_jax.training.run_directory import load_experiment

    code.load_user_code(imports or ())
    experiment = load_experiment(directory)
    mesh, layout = place_variables(experiment.model, experiment.example, experiment.mesh)
    return OpenRun(directory, experiment, mesh, layout)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    left: int = 1,
) -> None:
    """Prints a table.

    Args:
      headings: the heading of each column.
      rows: the texts of the cells, as one sequence for each row.
      title: a title above the table.
      left: the number of columns that are aligned left. All following columns are aligned right.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    # If the output is a pipe or a file, which has no width, set a large width, so that each row of
    # the table stays on one line.
    if not console.is_terminal:
        console.width = 160
    console.print(table)
