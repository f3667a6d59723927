"""`synthesizer-jax predict`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.evaluate import (
    BatchSize,
    MaxExamples,
    Method,
    Tasks,
    given,
    measure_step,
    open_run,
)
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
    max_examples: MaxExamples = None,
    batch_size: BatchSize = None,
    imports: Imports = None,
) -> None:
    """Predict all examples of a split, and write the files of GLUE's and SuperGLUE's leaderboards.

    Every task has a file TASK.jsonl of inputs, predictions and their scores; where examples have labels,
    metrics are shown. Predictions of a benchmark's test split are also written as its leaderboard reads
    them, except with --max-examples, glue/CoLA.tsv or super_glue/BoolQ.jsonl: a folder is what is to be
    zipped. There a prediction that is none of the labels becomes the first label, one that is no similarity
    score 0, and others are clipped to 0 to 5; invalid ones are counted.

    Example: synthesizer-jax predict --workdir runs/rv --split test --output predictions
    """
    from synthesizer_jax.checkpoints.manager import restore_variables
    from synthesizer_jax.evaluation import files
    from synthesizer_jax.evaluation.leaderboards import write_submission
    from synthesizer_jax.runtime import processes

    overrides: dict[str, object] = {"split": split, "max_examples": max_examples, "loss_batches": 0}
    overrides |= given(method=method, batch_size=batch_size)
    opened = open_run(workdir, data_dir=data_dir, overrides=overrides, tasks=task, imports=imports)
    number, variables = restore_variables(workdir / "checkpoints", step=step, layout=opened.layout)
    part = max_examples is not None
    folder = output or files.evaluation_folder(workdir, number, opened.other_split, part=part)
    results, _ = measure_step(opened, number, variables, folder=folder)
    if processes.is_process_zero() and split.startswith(TEST) and not part:
        answers = [r.predictions for r in results]
        written = write_submission(folder, list(zip(opened.evaluator.sets, answers, strict=True)))
        for path, replaced in written.items():
            invalid = f"; {replaced:,} predictions that are no valid answer are replaced"
            typer.echo(f"{path} is written{invalid if replaced else ''}")
        if not written:
            typer.echo("no leaderboard of GLUE or SuperGLUE takes these tasks")
