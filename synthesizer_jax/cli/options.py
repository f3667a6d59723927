"""Commands from functions, and what several of them share: options, opening a run, printing a table."""

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
DataDir = Annotated[
    pathlib.Path | None,
    typer.Option(
        help="Directory of prepared data sets; also gs://BUCKET/….", envvar="SYNTHESIZER_DATA_DIR"
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress bar.")]


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that Typer makes a command of.

    Parameters before ``*`` are arguments, the others options; a string in an annotation is the option's
    name, a `Limit` is checked, and paths may be in buckets. The help texts are the `Args` of the docstring.
    """
    described, _, arguments = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    texts = dict(re.findall(r"^  (\w+): (.*(?:\n    .*)*)", arguments, re.MULTILINE))
    plain = typing.get_type_hints(function)
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        name, kind = parameter.name, plain[parameter.name]
        extras = getattr(hints[name], "__metadata__", ())
        names = [extra for extra in extras if isinstance(extra, str)]
        if kind is bool and parameter.default is False:
            names = names or [f"--{name.replace('_', '-')}"]
        is_option = parameter.kind is parameter.KEYWORD_ONLY
        info = typer.Option(*names) if is_option else typer.Argument()
        for extra in extras:
            info = copy.copy(extra) if isinstance(extra, ArgumentInfo | OptionInfo) else info
        text = " ".join(texts.get(name, "").split())
        info.help = info.help or text[:1].upper() + text[1:]
        if "Path" in str(kind):
            info.callback = _to_storage_paths
        parameters.append(parameter.replace(annotation=Annotated[kind, info]))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, value in values.items():
            limits = format_limits(hints[name])
            if limits and not matches_type(value, hints[name]):
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is {value!r}; allowed: {limits}")
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = described
    return command


def _to_storage_paths(path: Any) -> Any:
    """Converts ``gs://BUCKET/…`` to a path in Google Cloud Storage; None and other paths stay as they are.

    For a path in a bucket, TensorFlow is loaded if it is installed, because its first import prints
    messages that must be suppressed.
    """
    if path is None or isinstance(path, list | tuple):
        return path and [_to_storage_paths(one) for one in path]
    converted = storage_path(str(path))
    if in_bucket(converted) and is_installed("tensorflow"):
        from synthesizer_jax.preparation.rows import import_tensorflow

        import_tensorflow()
    return converted


def chosen_run(run: pathlib.Path | None, workdir: pathlib.Path | None) -> pathlib.Path:
    """Returns the run of a command that takes it as RUN or as --workdir RUN.

    Raises:
      ValueError: neither or both are given.
    """
    if (run is None) == (workdir is None):
        raise ValueError("give the directory of the run once, as RUN or as --workdir RUN")
    found = run or workdir
    assert found is not None
    return found


class OpenRun(NamedTuple):
    """A run whose checkpoints are used: over which mesh, and in which layout, see `place_variables`."""

    directory: pathlib.Path
    experiment: Experiment
    mesh: Mesh
    layout: PyTree

    def restore(self, step: int | None) -> tuple[int, PyTree]:
        """Returns the step and the variables of a checkpoint; None: the newest."""
        from synthesizer_jax.training.initial_parameters import restore_run

        return restore_run(self.directory, step=step, layout=self.layout)


def open_run(directory: pathlib.Path, imports: Sequence[str] | None) -> OpenRun:
    """Opens a run with its code and the user's; its variables are to be sharded over all devices."""
    from synthesizer_jax.checkpoints.placement import place_variables
    from synthesizer_jax.runs import code
    from synthesizer_jax.training.run_directory import load_experiment

    code.load_user_code(imports or ())
    experiment = load_experiment(directory)
    mesh, layout = place_variables(experiment.model, experiment.example, experiment.mesh)
    return OpenRun(directory, experiment, mesh, layout)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, left: int = 1
) -> None:
    """Prints a table whose first `left` columns are aligned left, and the others right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    console.width = console.width if console.is_terminal else 160
    console.print(table)
