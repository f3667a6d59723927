"""`synthesizer-jax train`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer


def directory(path: pathlib.Path | None) -> pathlib.Path | None:
    """Refuses a bucket's address, which would become a directory of that name."""
    if str(path).startswith("gs:"):
        raise ValueError(
            f"{path} is a bucket, not a directory; mount it (gcsfuse --implicit-dirs BUCKET DIRECTORY) "
            "and give the directory"
        )
    return path


Workdir = Annotated[
    pathlib.Path,
    typer.Option(help="Where checkpoints and logs of the run lie.", callback=directory),
]
DataDir = Annotated[
    pathlib.Path | None,
    typer.Option(
        envvar="SYNTHESIZER_DATA_DIR", help="Where prepared data sets lie.", callback=directory
    ),
]


def train(
    recipe: Annotated[
        str, typer.Argument(help="FILE.py[:recipe], or the name of a packaged recipe.")
    ],
    workdir: Workdir,
    data_dir: DataDir = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a field, such as --set training.steps=200."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train a recipe; started again with the same workdir it continues where it was.

    Example: synthesizer-jax train quickstart --workdir runs/rv --set training.steps=200
    """
    from synthesizer_jax.cli.recipes import load_recipe
    from synthesizer_jax.sharding import hosts
    from synthesizer_jax.training.run import run
    from synthesizer_jax.training.survival import Preempted, farewell, leave_on_signals

    leave_on_signals()
    hosts.start()
    experiment = load_recipe(recipe, overrides or ())
    try:
        run(experiment, workdir, data_dir=data_dir, visible=not quiet)
    except Preempted as preempted:
        typer.echo(farewell(preempted), err=True)
        raise typer.Exit(preempted.exit_code) from None
