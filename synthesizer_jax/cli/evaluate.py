"""`synthesizer-jax eval` and `synthesizer-jax predict`."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import (
    DataDir,
    Imports,
    OpenRun,
    RunDirectory,
    Step,
    open_run,
    storage_option,
)

if TYPE_CHECKING:
    from synthesizer_jax.evaluation.averages import Results
    from synthesizer_jax.evaluation.evaluator import Evaluator
    from synthesizer_jax.evaluation.scoring import TaskResult
    from synthesizer_jax.typing import PyTree

POLL_SECONDS = 10.0
TEST = "test"

Every = Annotated[
    bool, typer.Option("--all", help="Evaluate all checkpoints; show the best of each task.")
]
Follow = Annotated[
    bool, typer.Option("--follow", help="Evaluate checkpoints as a running training saves them.")
]
Method = Annotated[str | None, typer.Option(help="greedy, beam or rank; by default the recipe's.")]
Split = Annotated[str | None, typer.Option(help="Split; by default the recipe's.")]
Tasks = Annotated[list[str] | None, typer.Option(help="Only this task. Repeatable.")]
MaxExamples = Annotated[
    int | None, typer.Option(help="Maximum number of examples per task, in whole groups.", min=1)
]
BatchSize = Annotated[int | None, typer.Option(help="Examples per batch.", min=1)]
SavePredictions = Annotated[
    bool,
    typer.Option(
        help="Write input, target, prediction and score of every example to TASK.jsonl, beside the results."
    ),
]
Output = Annotated[
    pathlib.Path | None,
    storage_option(
        "Directory of the files; by default evaluation/STEP/SPLIT in the run's.", "--output"
    ),
]


def evaluate(
    workdir: RunDirectory,
    *,
    data_dir: DataDir = None,
    step: Step = None,
    every: Every = False,
    follow: Follow = False,
    method: Method = None,
    split: Split = None,
    task: Tasks = None,
    max_examples: MaxExamples = None,
    batch_size: BatchSize = None,
    save_predictions: SavePredictions = True,
    imports: Imports = None,
) -> None:
    """Evaluate checkpoints task by task, with T5's metrics and the benchmarks' averages.

    The model is restored from the run's directory and sharded over all devices of all processes, as in
    training. Results and predictions are written to evaluation/STEP in that directory, and those of a
    split that is not the recipe's to evaluation/STEP/SPLIT; with --task or --max-examples to the folder
    part in it, so that the results of the whole stay. Examples without a label, as in most test splits,
    are predicted and not scored.
    """
    from synthesizer_jax.evaluation import files
    from synthesizer_jax.runtime import processes

    processes.start_group()
    run = open_run(workdir, imports)
    options = {
        "method": method,
        "split": split,
        "max_examples": max_examples,
        "batch_size": batch_size,
    }
    given = {name: value for name, value in options.items() if value is not None}
    evaluator = _open_evaluator(run, data_dir, task, given)
    part = bool(task) or max_examples is not None
    metrics = {}
    for number, variables in _restore_checkpoints(run, step, every=every, follow=follow):
        folder = _folder(run, evaluator, number, part=part)
        results, overall = _measure(
            run, evaluator, number, variables, folder=folder if save_predictions else None
        )
        metrics[number] = {result.task: result.metrics for result in results}
        if processes.is_process_zero():
            files.write_results(folder, number, results, overall=overall)
    if len(metrics) > 1 and processes.is_process_zero():
        print_best_steps(metrics)


def predict(
    workdir: RunDirectory,
    *,
    data_dir: DataDir = None,
    split: Annotated[str, typer.Option(help="The split to predict.")] = TEST,
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
    from synthesizer_jax.evaluation.leaderboards import write_submission
    from synthesizer_jax.runtime import processes

    processes.start_group()
    run = open_run(workdir, imports)
    given: dict[str, object] = {"split": split, "max_examples": max_examples, "loss_batches": 0}
    given |= {} if method is None else {"method": method}
    given |= {} if batch_size is None else {"batch_size": batch_size}
    evaluator = _open_evaluator(run, data_dir, task, given)
    number, variables = run.restore(step)
    part = max_examples is not None
    folder = output or _folder(run, evaluator, number, part=part)
    results, _ = _measure(run, evaluator, number, variables, folder=folder)
    if processes.is_process_zero() and split.startswith(TEST) and not part:
        answers = [r.predictions for r in results]
        written = write_submission(folder, list(zip(evaluator.sets, answers, strict=True)))
        for path, replaced in written.items():
            invalid = f"; {replaced:,} predictions that are no valid answer are replaced"
            typer.echo(f"{path} is written{invalid if replaced else ''}")
        if not written:
            typer.echo("no leaderboard of GLUE or SuperGLUE takes these tasks")


def _open_evaluator(
    run: OpenRun,
    data_dir: pathlib.Path | None,
    tasks: list[str] | None,
    changes: Mapping[str, object],
) -> Evaluator:
    """Loads the examples of some tasks (None: all), and prints which tasks have none in the split.

    The evaluation is that of the experiment but for some fields.
    """
    from synthesizer_jax.registry import replace
    from synthesizer_jax.runtime import processes
    from synthesizer_jax.tasks.task_registry import default_data_dir
    from synthesizer_jax.training.run_data import open_data

    evaluation = replace(run.experiment.evaluation, **changes)
    data_dir = default_data_dir() if data_dir is None else data_dir
    experiment = replace(run.experiment, evaluation=evaluation)
    evaluator = open_data(experiment, run.directory, data_dir, only=tasks)
    if evaluator.lacking and processes.is_process_zero():
        lacking = ", ".join(evaluator.lacking)
        typer.echo(f"without the split {evaluation.split!r} in {data_dir}: {lacking}")
    return evaluator


def _folder(run: OpenRun, evaluator: Evaluator, step: int, *, part: bool) -> pathlib.Path:
    """Returns the folder for the files of an evaluation."""
    from synthesizer_jax.evaluation.files import evaluation_folder

    split = evaluator.evaluation.split
    other = None if split == run.experiment.evaluation.split else split
    return evaluation_folder(run.directory, step, other, part=part)


def _measure(
    run: OpenRun,
    evaluator: Evaluator,
    step: int,
    variables: PyTree,
    *,
    folder: pathlib.Path | None,
) -> tuple[list[TaskResult], dict[str, float]]:
    """Evaluates a checkpoint, prints its results and writes its predictions; see `Evaluator.measure`."""
    from synthesizer_jax.evaluation import files
    from synthesizer_jax.runs.progress import show_phases
    from synthesizer_jax.runtime import processes

    with show_phases(visible=processes.is_process_zero()) as phase:
        results, overall = evaluator.measure(variables, mesh=run.mesh, phase=phase)
    if processes.is_process_zero():
        print_results(step, results, overall)
        if folder is not None:
            for examples, result in zip(evaluator.sets, results, strict=True):
                files.write_predictions(folder, result, examples=examples)
            typer.echo(f"predictions: {folder}/TASK.jsonl")
    return results, overall


def _restore_checkpoints(
    run: OpenRun, step: int | None, *, every: bool, follow: bool
) -> Iterator[tuple[int, PyTree]]:
    """Yields the steps and variables of the selected checkpoints.

    If several are selected, those that cannot be read, or that a running training has deleted meanwhile,
    are skipped with a message.

    Raises:
      FileNotFoundError: the given checkpoint does not exist, or there is none that can be read.
      ValueError: the given checkpoint cannot be read.
    """
    from synthesizer_jax.runtime import processes

    if not every and not follow:
        yield run.restore(step)
        return
    skipped, any_restored = [], False
    for number in _iterate_steps(run, follow=follow):
        try:
            restored = run.restore(number)
        except (FileNotFoundError, ValueError) as error:
            skipped.append(number)
            if processes.is_process_zero():
                typer.echo(f"step {number} is skipped: {error}", err=True)
            continue
        any_restored = True
        yield restored
    if not any_restored:
        detail = f" (tried {', '.join(map(str, skipped))})" if skipped else "; train first"
        raise FileNotFoundError(
            f"{run.directory / 'checkpoints'} has no checkpoint that can be read{detail}"
        )


def _iterate_steps(run: OpenRun, *, follow: bool) -> Iterator[int]:
    """Yields the steps of finished checkpoints.

    With `follow`, waits for further checkpoints until that of the run's last step, or until it has
    stopped early.
    """
    from synthesizer_jax.checkpoints import manager
    from synthesizer_jax.runs.events import has_stopped
    from synthesizer_jax.runtime import processes

    yielded: set[int] = set()
    last = run.experiment.training.steps
    while True:
        # Before the checkpoints are listed: none is added to a run that has stopped.
        stopped = has_stopped(run.directory)
        finished = manager.finished_steps(run.directory / "checkpoints")
        # All processes must evaluate the same steps, so they use the list of process zero.
        shared, stopped = processes.all_gather("steps", (finished, stopped))[0]
        new = [step for step in shared if step not in yielded]
        yielded.update(new)
        yield from new
        if not follow or last in yielded or stopped:
            return
        if not new:
            time.sleep(POLL_SECONDS)


def print_results(step: int, results: Sequence[TaskResult], overall: Mapping[str, float]) -> None:
    """Prints a checkpoint's results by task, the benchmarks' averages, and the losses.

    Args:
      step: the checkpoint's step.
      results: one per task.
      overall: measures over all tasks; see `Evaluator.measure`.
    """
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.evaluation.averages import BENCHMARKS

    table = Table(title=f"step {step:,}", title_justify="left")
    for heading in ("task", "split"):
        table.add_column(heading, overflow="fold")
    table.add_column("n", justify="right")
    table.add_column("metrics")
    table.add_column("loss", justify="right")
    for result in results:
        nats = "" if result.loss is None else f"{result.loss.per_token:.4f}"
        table.add_row(result.task, result.split, f"{result.n:,}", _format_metrics(result), nats)
    console = Console()
    console.print(table)
    if not all(result.labeled for result in results):
        console.print("unlabeled examples are predicted, not scored", highlight=False)
    tasks = {result.task for result in results if result.metrics}
    for name, groups in BENCHMARKS.items():
        average = overall.get(name)
        if average is not None:
            console.print(f"{name} average: {average:.2f}", highlight=False)
        elif any(tasks.intersection(group) for group in groups):
            console.print(f"{name} average: incomplete, not computed", highlight=False)
    if "loss" in overall:
        loss = overall["loss"]
        perplexity = math.exp(loss) if loss < 100 else math.inf
        typer.echo(f"held-out loss {loss:.4f} nats per target token, perplexity {perplexity:.4g}")
    if "label_loss" in overall:
        typer.echo(
            f"loss of label words {overall['label_loss']:.4f} nats per example; entropy of the label prior "
            f"{overall['label_prior_entropy']:.4f} given the task, "
            f"{overall['joint_label_prior_entropy']:.4f} over the joint mixture"
        )


def _format_metrics(result: TaskResult) -> str:
    """Formats a task's metrics, and the number of examples without a label, which they exclude."""
    if not result.labeled:
        return "unlabeled"
    measures = result.metrics | result.text_metrics
    metrics = "  ".join(f"{name} {value:.2f}" for name, value in measures.items())
    unlabeled = result.n - result.labeled
    return (metrics or "no metric") + (f"  ({unlabeled:,} unlabeled)" if unlabeled else "")


def print_best_steps(results: Mapping[int, Results]) -> None:
    """Prints every task's best step, and for each benchmark two averages.

    The first average takes each task at its best step, as T5 does; the second is that of the best step.

    Args:
      results: metrics by step and task.
    """
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.evaluation import averages

    table = Table(title="best steps", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("metrics")
    for task, step in averages.best_by_task(results).items():
        metrics = "  ".join(f"{name} {value:.2f}" for name, value in results[step][task].items())
        table.add_row(task, f"{step:,}", metrics)
    if table.row_count:
        Console().print(table)
    for benchmark in averages.BENCHMARKS:
        if single := averages.best_single_step(results, benchmark):
            typer.echo(
                f"{benchmark}: {averages.best_average(results, benchmark):.2f} with each task at its best "
                f"step, {single[1]:.2f} at the single step {single[0]}"
            )
