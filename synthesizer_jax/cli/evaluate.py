"""`synthesizer-jax eval`."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.places import DataDir, option
from synthesizer_jax.cli.train import Imports

if TYPE_CHECKING:
    from synthesizer_jax.evaluation import TaskResult
    from synthesizer_jax.training.evaluator import Evaluator

POLL_SECONDS = 10.0


def evaluate(
    workdir: Annotated[pathlib.Path, option("The run's directory.")],
    data_dir: DataDir = None,
    step: Annotated[
        int | None, typer.Option(help="Which checkpoint; the newest if left out.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every checkpoint, and each task's best.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Each checkpoint as a running job writes it.")
    ] = False,
    method: Annotated[
        str | None, typer.Option(help="greedy, beam or rank; the recipe's if left out.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split; the recipe's if left out.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this task; repeatable.")] = None,
    max_examples: Annotated[
        int | None, typer.Option(help="Examples per task, whole groups.", min=1)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per batch.", min=1)] = None,
    save_predictions: Annotated[
        bool,
        typer.Option(
            "--save-predictions",
            help="Write input, target, prediction and score of every example, a JSONL file per task.",
        ),
    ] = False,
    predictions_dir: Annotated[
        pathlib.Path | None,
        option("Where those files go; the run's evaluation/ if left out."),
    ] = None,
    submission: Annotated[
        pathlib.Path | None,
        option(
            "Write GLUE's and SuperGLUE's leaderboard files, of the test split, to this directory."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Evaluate checkpoints task by task with T5's metrics and the benchmarks' averages.

    The model is rebuilt from the directory alone and laid over all devices, of all processes where several
    were started, as in training; results go to its evaluation/ folder. Examples without a label, as in
    most test splits, are predicted and not scored.
    """
    from synthesizer_jax.evaluation import EVALUATION_DIRECTORY, write_results
    from synthesizer_jax.sharding import hosts
    from synthesizer_jax.training import code
    from synthesizer_jax.training.placement import place

    given: dict[str, Any] = {"method": method, "split": split, "max_examples": max_examples}
    given |= {"batch_size": batch_size}
    changes = {name: value for name, value in given.items() if value is not None}
    if submission is not None:
        if every or follow or max_examples is not None:
            raise ValueError(
                "--submission is for one checkpoint and all examples: give --step alone"
            )
        changes = {"split": "test", **changes, "max_examples": None}
    if predictions_dir is None and save_predictions:
        predictions_dir = workdir / EVALUATION_DIRECTORY
    hosts.start()
    code.load(imports or ())
    evaluator = open_evaluator(workdir, data_dir, changes, task)
    mesh, layout = place(evaluator.experiment)
    found = {}
    for number, variables in checkpoints(workdir, layout, step, every=every, follow=follow):
        results, overall = evaluator.measure(variables, mesh=mesh)
        found[number] = {r.task: r.metrics for r in results}
        if hosts.first():
            write_results(workdir, number, results, overall)
            show(number, results, overall)
            keep_predictions(evaluator, number, results, predictions_dir, submission)
    if len(found) > 1 and hosts.first():
        show_best(found)


def keep_predictions(
    evaluator: Evaluator,
    step: int,
    results: list[TaskResult],
    predictions_dir: pathlib.Path | None,
    submission: pathlib.Path | None,
) -> None:
    """Writes predictions and leaderboard files where they were asked for, and says so."""
    from synthesizer_jax.data.leaderboards import write_submission
    from synthesizer_jax.evaluation import write_predictions

    pairs = list(zip(evaluator.sets, results, strict=True))
    if predictions_dir is not None:
        for examples, result in pairs:
            write_predictions(predictions_dir, step, examples, result)
        typer.echo(f"predictions: {predictions_dir}/step_{step}.TASK.SPLIT.jsonl")
    if submission is not None:
        files = write_submission(submission, [(s, r.predictions) for s, r in pairs])
        typer.echo(f"submission: {', '.join(path.name for path in files)} in {submission}")


def open_evaluator(
    workdir: pathlib.Path,
    data_dir: pathlib.Path | None,
    changes: dict[str, Any],
    only: list[str] | None,
) -> Evaluator:
    """The run's examples; says which tasks are not evaluated.

    Args:
      workdir: the run's.
      data_dir: where data sets lie; None is the usual place.
      changes: fields of `Evaluation`.
      only: tasks to keep; None keeps all.
    """
    from synthesizer_jax.data import tasks
    from synthesizer_jax.registry import replace
    from synthesizer_jax.sharding import hosts
    from synthesizer_jax.training.experiment import load_experiment
    from synthesizer_jax.training.run import open_data

    experiment = load_experiment(workdir)
    load_data_libraries()
    evaluation = replace(experiment.evaluation, **changes)
    data_dir = tasks.default_data_dir() if data_dir is None else data_dir
    with hosts.one_after_the_first("data"):
        _, evaluator = open_data(experiment, workdir, data_dir, evaluation=evaluation, only=only)
    if evaluator.lacking and hosts.first():
        lacking = ", ".join(evaluator.lacking)
        typer.echo(f"without the split {evaluation.split!r} in {data_dir}: {lacking}")
    return evaluator


def checkpoints(
    workdir: pathlib.Path, layout: Any, step: int | None, *, every: bool, follow: bool
) -> Iterator[tuple[int, Any]]:
    """The checkpoints to evaluate, with their variables.

    Of several those that cannot be read, or that a running training has deleted meanwhile, are passed
    over with a line on standard error.

    Raises:
      FileNotFoundError: there is none, or not the given one, or none of several that can be read.
      ValueError: the given one cannot be read.
    """
    from synthesizer_jax.sharding import hosts
    from synthesizer_jax.training.checkpoints import restore_variables

    directory = workdir / "checkpoints"
    if not every and not follow:
        yield restore_variables(directory, step=step, layout=layout)
        return
    tried, found_any = [], False
    for number in steps_of(workdir, follow=follow):
        try:
            found = restore_variables(directory, step=number, layout=layout)
        except (FileNotFoundError, ValueError) as error:
            tried.append(number)
            if hosts.first():
                typer.echo(f"step {number} is passed over: {error}", err=True)
            continue
        found_any = True
        yield found
    if not found_any:
        named = f" (tried {', '.join(map(str, tried))})" if tried else "; train first"
        raise FileNotFoundError(f"{directory} has no checkpoint that can be read{named}")


def steps_of(workdir: pathlib.Path, *, follow: bool) -> Iterator[int]:
    """The finished steps; with `follow` also later ones as they appear, until the run's last step."""
    from synthesizer_jax.sharding import hosts
    from synthesizer_jax.training import checkpoints
    from synthesizer_jax.training.experiment import load_experiment

    seen: set[int] = set()
    last = load_experiment(workdir).training.steps
    while True:
        found = checkpoints.finished_steps(workdir / "checkpoints")
        new = [s for s in hosts.Occasion("steps").everyone(found)[0] if s not in seen]
        seen.update(new)
        yield from new
        if not follow or last in seen:
            return
        if not new:
            time.sleep(POLL_SECONDS)


def show(step: int, results: list[TaskResult], overall: dict[str, Any]) -> None:
    """Prints one checkpoint's table."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.data.averages import BENCHMARKS

    table = Table(title=f"step {step:,}", title_justify="left")
    for heading in ("task", "split"):
        table.add_column(heading, overflow="fold")
    table.add_column("n", justify="right")
    table.add_column("metrics")
    table.add_column("loss", justify="right")
    for r in results:
        loss = "" if r.loss is None else f"{r.loss.per_token:.4f}"
        table.add_row(r.task, r.split, f"{r.n:,}", metrics_of(r), loss)
    console = Console()
    console.print(table)
    if not all(r.labelled for r in results):
        console.print("unlabelled examples are predicted, not scored", highlight=False)
    tasks = {r.task for r in results if r.metrics}
    for name, groups in BENCHMARKS.items():
        value = overall.get(name)
        if value is not None:
            console.print(f"{name} average: {value:.2f}", highlight=False)
        elif any(tasks.intersection(group) for group in groups):
            console.print(f"{name} average: incomplete, not computed", highlight=False)
    show_losses(overall)


def metrics_of(result: TaskResult) -> str:
    """A task's metrics, and how many of its examples they leave out."""
    if not result.labelled:
        return "unlabelled"
    shown = (
        "  ".join(f"{name} {value:.2f}" for name, value in result.metrics.items()) or "no metric"
    )
    hidden = result.n - result.labelled
    return f"{shown}  ({hidden:,} unlabelled)" if hidden else shown


def show_losses(overall: dict[str, Any]) -> None:
    """Prints the held-out losses over all tasks, as far as there are any."""
    if "loss" in overall:
        loss = overall["loss"]
        perplexity = math.exp(loss) if loss < 100 else math.inf
        typer.echo(f"held-out loss {loss:.4f} nats per target token, perplexity {perplexity:.4g}")
    if "label_loss" in overall:
        typer.echo(
            f"of label words {overall['label_loss']:.4f} nats per example; the label prior's entropy is "
            f"{overall['label_prior_entropy']:.4f} given the task, "
            f"{overall['joint_label_prior_entropy']:.4f} over the joint mixture"
        )


def show_best(found: dict[int, dict[str, dict[str, float]]]) -> None:
    """Prints every task's best step, T5's choice of averages (of those steps) and the best single step."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.data.averages import (
        BENCHMARKS,
        best_average,
        best_by_task,
        best_single_step,
    )

    table = Table(title="best steps", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("metrics")
    for task, step in best_by_task(found).items():
        shown = "  ".join(f"{name} {value:.2f}" for name, value in found[step][task].items())
        table.add_row(task, f"{step:,}", shown)
    if table.row_count:
        Console().print(table)
    for benchmark in BENCHMARKS:
        single = best_single_step(found, benchmark)
        if single is not None:
            typer.echo(
                f"{benchmark}: {best_average(found, benchmark):.2f} with each task at its best "
                f"step, {single[1]:.2f} at the one step {single[0]}"
            )
