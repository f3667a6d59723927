"""`synthesizer-jax average`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.options import Imports, storage_argument


def average(
    run: Annotated[pathlib.Path, storage_argument("Directory of the run.")],
    directory: Annotated[pathlib.Path, storage_argument("The new directory.", "DIR")],
    *,
    last: Annotated[
        int | None,
        typer.Option(help="Number of the newest checkpoints; by default all that are kept.", min=2),
    ] = None,
    imports: Imports = None,
) -> None:
    """Average the newest checkpoints of a run: write a run whose parameters are their mean.

    A run keeps its training.keep_latest newest and training.keep_best best checkpoints; both kinds count.
    The steps that were averaged are printed. `eval`, `generate` and `export` take the new run, and
    `train DIR` starts from it.

    Example: synthesizer-jax average runs/cola runs/cola-mean --last 5
    """
    from synthesizer_jax.runs import code
    from synthesizer_jax.training.checkpoint_average import average_checkpoints

    code.load_user_code(imports or ())
    steps = average_checkpoints(run, directory, last=last)
    typer.echo(f"{directory} holds the mean of the steps {', '.join(map(str, steps))} of {run}")
