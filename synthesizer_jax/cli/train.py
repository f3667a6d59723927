"""`synthesizer-jax train`."""

from __future__ import annotations

from typing import Annotated

import typer

from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.places import DataDir, Workdir
from synthesizer_jax.cli.recipes import check_name, complete_recipe, load_with_code

Recipe = Annotated[
    str,
    typer.Argument(
        help="FILE.py[:recipe], or the name of a packaged recipe.", autocompletion=complete_recipe
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
        help="Import a package, or run a file, with classes and tasks of your own first. Repeatable.",
        metavar="PACKAGE|FILE.py",
    ),
]


def train(
    recipe: Recipe,
    workdir: Workdir,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    imports: Imports = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train a recipe; started again with the same workdir it continues where it was.

    Example: synthesizer-jax train quickstart --workdir runs/rv --set training.steps=200
    """
    check_name(recipe)
    from synthesizer_jax.sharding import hosts
    from synthesizer_jax.training.run import run
    from synthesizer_jax.training.survival import Preempted, farewell, leave_on_signals

    leave_on_signals()
    hosts.start()
    experiment, own = load_with_code(recipe, overrides or (), imports=imports or ())
    load_data_libraries()
    try:
        run(experiment, workdir, data_dir=data_dir, visible=not quiet, own=own)
    except Preempted as preempted:
        typer.echo(farewell(preempted), err=True)
        raise typer.Exit(preempted.exit_code) from None
