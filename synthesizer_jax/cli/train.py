"""`synthesizer-jax train`."""

from __future__ import annotations

from synthesizer_jax.cli.options import DataDir, Imports, Overrides, Quiet, Recipe, Workdir
from synthesizer_jax.cli.recipes import check_name, load_with_code


def train(
    recipe: Recipe,
    workdir: Workdir,
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Train a recipe, or continue the training in the same workdir.

    Example: synthesizer-jax train quickstart --workdir runs/rv --set training.steps=200
    """
    check_name(recipe)
    from synthesizer_jax.runtime import processes
    from synthesizer_jax.runtime.preemption import exit_on_signals
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.training.run import run

    exit_on_signals()
    processes.start_group()
    experiment, own = load_with_code(
        recipe, overrides or (), kinds=(Experiment,), imports=imports or ()
    )
    run(experiment, workdir, data_dir=data_dir, visible=not quiet, own=own)
