"""`synthesizer-jax predict`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.evaluate import BatchSize, Method, Tasks, given, open_run
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
    from synthesizer_jax.evaluation import files
    from synthesizer_jax.evaluation.leaderboards import write_submission
    from synthesizer_jax.runs.progress import show_phases
    from synthesizer_jax.runtime import processes

    overrides: dict[str, object] = {"split": split, "max_examples": None, "loss_batches": 0}
    overrides |= given(method=method, batch_size=batch_size)
    opened = open_run(workdir, data_dir=data_dir, overrides=overrides, tasks=task, imports=imports)
    number, variables = restore_variables(workdir / "checkpoints", step=step, layout=opened.layout)
    with show_phases(visible=processes.is_process_zero()) as phase:
        results, _ = opened.evaluator.measure(variables, mesh=opened.mesh, phase=phase)
    if not processes.is_process_zero():
        return
    folder = output or files.evaluation_folder(workdir, number, opened.other_split)
    pairs = list(zip(opened.evaluator.sets, results, strict=True))
    files.write_all_predictions(folder, pairs)
    for _, result in pairs:
        typer.echo(f"{folder / result.task}.jsonl: {result.n:,} examples")
    if split.startswith(TEST):
        written = write_submission(folder, [(e, result.predictions) for e, result in pairs])
        for path, replaced in written.items():
            invalid = f"; {replaced:,} predictions that are no valid answer are replaced"
            typer.echo(f"{path} is written{invalid if replaced else ''}")
        if not written:
            typer.echo("no leaderboard of GLUE or SuperGLUE takes these tasks")
