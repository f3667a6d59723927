"""`synthesizer-jax distill`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.places import DataDir, Workdir, option
from synthesizer_jax.cli.recipes import check_name, load_with_code
from synthesizer_jax.cli.train import Imports, Overrides, Recipe


def distill(
    recipe: Recipe,
    teacher: Annotated[pathlib.Path, option("Directory of a finished training run.")],
    workdir: Workdir,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    imports: Imports = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Replace parts of a trained model and train the replacements to do what the parts did.

    The workdir is an ordinary run afterwards: eval and generate load it, train fine-tunes from it.

    Example: synthesizer-jax distill replace_attention:alr --teacher runs/vanilla --workdir runs/alr
    """
    check_name(recipe)
    from synthesizer_jax.sharding import hosts
    from synthesizer_jax.training import code
    from synthesizer_jax.training.distillation import Distillation
    from synthesizer_jax.training.distillation import distill as distill_run
    from synthesizer_jax.training.survival import Preempted, farewell, leave_on_signals

    leave_on_signals()
    hosts.start()
    named = code.load(imports or ())
    code.require(teacher)  # before the recipe, whose classes are the newer ones
    settings, own = load_with_code(recipe, overrides or (), kind=Distillation)
    load_data_libraries()
    try:
        distill_run(
            settings, teacher, workdir, data_dir=data_dir, visible=not quiet, own=named + own
        )
    except Preempted as preempted:
        typer.echo(farewell(preempted), err=True)
        raise typer.Exit(preempted.exit_code) from None
