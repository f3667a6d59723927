"""`synthesizer-jax predict`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.evaluate import BatchSize, Method, Tasks, open_evaluator
from synthesizer_jax.cli.options import DataDir, Imports, RunDirectory, Step, storage_option

TEST = "test"

Split = Annotated[str, typer.Option(help="The split to predict.")]
Output = Annotated[
    pathlib.Path | None,
    storage_option(
        "Directory of the files; by default evaluation/STEP/SPLIT in the run's.", "--output"
    ),
]


def predict(
    workdir: RunDirectory,
    *,
    data_dir: DataDir = None,
    split: Split = TEST,
    output: Output = None,
    step: Step = None,
    method: Method = None,
    task: Tasks = None,
    batch_size: BatchSize = None,
    imports: Imports = None,
) -> None:
    """Predict all examples of a split, and write the files of GLUE's and SuperGLUE's leaderboards.

    Every task has a file TASK.jsonl of inputs, predictions and their scores. Predictions of a benchmark's
    test split are also written as its leaderboard reads them, glue/CoLA.tsv or super_glue/BoolQ.jsonl: a
    folder is what is to be zipped. There a prediction that is none of the labels becomes the first label,
    one that is no similarity score 0, and others are clipped to 0 to 5; invalid ones are counted.

    Example: synthesizer-jax predict --workdir runs/rv --split test --output predictions
    """
    from synthesizer_jax.checkpoints.manager import restore_variables
    from synthesizer_jax.checkpoints.placement import place_variables
    from synthesizer_jax.evaluation import files
    from synthesizer_jax.evaluation.leaderboards import write_submission
    from synthesizer_jax.runs import code
    from synthesizer_jax.runtime import processes
    from synthesizer_jax.training.run_directory import load_experiment

    given: dict[str, object] = {"method": method, "batch_size": batch_size}
    overrides: dict[str, object] = {"split": split, "max_examples": None, "loss_batches": 0}
    overrides |= {name: value for name, value in given.items() if value is not None}
    processes.start_group()
    code.load_user_code(imports or ())
    experiment = load_experiment(workdir)
    evaluator = open_evaluator(
        experiment, workdir, data_dir=data_dir, overrides=overrides, tasks=task
    )
    mesh, layout = place_variables(experiment.model, experiment.example, experiment.mesh)
    number, variables = restore_variables(workdir / "checkpoints", step=step, layout=layout)
    results, _ = evaluator.measure(variables, mesh=mesh)
    if not processes.is_process_zero():
        return
    is_recipes = split == experiment.evaluation.split
    folder = output or files.evaluation_folder(workdir, number, None if is_recipes else split)
    pairs = list(zip(evaluator.sets, results, strict=True))
    files.write_all_predictions(folder, pairs)
    for _, result in pairs:
        typer.echo(f"{folder / result.task}.jsonl: {result.n:,} examples")
    if split.startswith(TEST):
        written = write_submission(folder, [(e, result.predictions) for e, result in pairs])
        for path, replaced in written.items():
            note = (
                f"; {replaced:,} predictions that are no valid answer are replaced"
                if replaced
                else ""
            )
            typer.echo(f"{path} is written{note}")
        if not written:
            typer.echo("no leaderboard of GLUE or SuperGLUE takes these tasks")
