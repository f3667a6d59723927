"""`synthesizer-jax distill`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.train import DataDir, Workdir


def distill(
    recipe: Annotated[
        str, typer.Argument(help="FILE.py[:recipe], or the name of a packaged recipe.")
    ],
    teacher: Annotated[pathlib.Path, typer.Option(help="Directory of a finished training run.")],
    workdir: Workdir,
    data_dir: DataDir = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a field, such as --set training.steps=200."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Replace parts of a trained model and train the replacements to do what the parts did.

    The workdir is an ordinary run afterwards: eval and generate load it, train fine-tunes from it.

    Example: synthesizer-jax distill replace_attention:alr --teacher runs/vanilla --workdir runs/alr
    """
    from synthesizer_jax.cli.recipes import load_recipe
    from synthesizer_jax.sharding import hosts
    from synthesizer_jax.training.distillation import Distillation
    from synthesizer_jax.training.distillation import distill as distill_run
    from synthesizer_jax.training.survival import Preempted, farewell, leave_on_signals

    leave_on_signals()
    hosts.start()
    settings = load_recipe(recipe, overrides or (), kind=Distillation)
    try:
        distill_run(settings, teacher, workdir, data_dir=data_dir, visible=not quiet)
    except Preempted as preempted:
        typer.echo(farewell(preempted), err=True)
        raise typer.Exit(preempted.exit_code) from None
