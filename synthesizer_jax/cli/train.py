"""Defines the commands `train`, `distill` and `quickstart`."""

from __future__ import annotations

import pathlib

from synthesizer_jax.cli.data import prepare_missing
from synthesizer_jax.cli.options import DataDir, Imports, Overrides, Quiet, Recipe
from synthesizer_jax.cli.recipes import load_with_code
from synthesizer_jax.cli.report import report


def train(
    recipe: Recipe,
    *,
    workdir: pathlib.Path,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Train a recipe, or continue its training if the workdir contains it already.

    Example: synthesizer-jax train quickstart --workdir runs/rv --set training.steps=200

    Args:
      workdir: the directory of the run, for checkpoints and logs. The directory may be in a bucket,
        gs://BUCKET/….
    """
    from synthesizer_jax.hosts import processes
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.training.run import run

    processes.start_group()
    experiment, user_code = load_with_code(
        recipe, overrides or (), kinds=(Experiment,), imports=imports or ()
    )
    run(
        experiment,
        workdir,
        data_dir=data_dir,
        prepare=prepare_missing,
        visible=not quiet,
        user_code=user_code,
    )


def quickstart(
    *,
    workdir: pathlib.Path = pathlib.Path("runs/quickstart"),
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Train two small models on generated tasks, and compare them in a report.

    The command takes about a minute on two CPU cores. The command needs no
    files and no network, but the extras data and report must be installed.

    Example: synthesizer-jax quickstart --set training.steps=1000

    Args:
      workdir: the directory for the two runs, their data and report.html.
    """
    runs = [workdir / name for name in ("random_vanilla", "dot_product")]
    for run in runs:
        train(
            f"quickstart:{run.name}",
            workdir=run,
            data_dir=workdir / "data",
            overrides=overrides,
            quiet=quiet,
        )
    report(runs, output=workdir / "report.html")


def distill(
    recipe: Recipe,
    *,
    teacher: pathlib.Path,
    workdir: pathlib.Path,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Replace parts of a trained model, and train the replacements to give the same outputs.

    The workdir becomes an ordinary run. You can use it with eval and generate,
    and fine-tune it with train.

    Example: synthesizer-jax distill papers.replacement:alr
    --teacher runs/vanilla --workdir runs/alr

    Args:
      teacher: the directory RUN of the trained run, whose newest checkpoint is used, or one
        checkpoint, RUN/checkpoints/STEP. If a distillation is continued, it uses the checkpoint
        with which it began.
      workdir: the directory of the run, for checkpoints and logs. The directory may be in a bucket,
        gs://BUCKET/….
    """
    from synthesizer_jax.distillation.distill import Distillation
    from synthesizer_jax.distillation.distill import distill as distill_run
    from synthesizer_jax.hosts import processes
    from synthesizer_jax.runs import code
    from synthesizer_jax.runs.saved import run_of

    processes.start_group()
    user_code = code.load_user_code(imports or ())
    # Load the teacher's code before the recipe, because the recipe may define newer versions of the
    # same classes.
    code.require_code(run_of(teacher))
    distillation, recipe_code = load_with_code(recipe, overrides or (), kinds=(Distillation,))
    distill_run(
        distillation,
        teacher,
        workdir,
        data_dir=data_dir,
        prepare=prepare_missing,
        visible=not quiet,
        user_code=user_code + recipe_code,
    )
