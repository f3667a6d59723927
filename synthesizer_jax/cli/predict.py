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
    and one that is no similarity score becomes 0; the number of these is printed.

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
    folder = output or files.evaluation_folder(workdir, number, split)
    files.write_all_predictions(folder, evaluator.sets, results)
    for examples, result in zip(evaluator.sets, results, strict=True):
        typer.echo(f"{folder / result.task}.jsonl: {len(examples.examples):,} predictions")
    if split == TEST:
        pairs = [(e, r.predictions) for e, r in zip(evaluator.sets, results, strict=True)]
        for path, replaced in write_submission(folder, pairs).items():
            typer.echo(f"{path}: {replaced:,} of its predictions are no answers and are replaced")
