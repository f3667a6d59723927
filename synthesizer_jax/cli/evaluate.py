"""`synthesizer-jax eval`."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from synthesizer_jax.cli.train import DataDir

POLL_SECONDS = 10.0


def evaluate(
    workdir: Annotated[pathlib.Path, typer.Option(help="The run's directory.")],
    data_dir: DataDir = None,
    step: Annotated[
        int | None, typer.Option(help="Which checkpoint; the newest if left out.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint, and their best.")] = False,
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
) -> None:
    """Evaluate checkpoints task by task with T5's metrics and the benchmarks' averages.

    The model is rebuilt from the directory alone; results go to its evaluation/ folder.
    """
    from synthesizer_jax.data import tasks
    from synthesizer_jax.registry import replace
    from synthesizer_jax.training.checkpoints import restore_variables
    from synthesizer_jax.training.experiment import load_experiment
    from synthesizer_jax.training.run import open_data

    experiment = load_experiment(workdir)
    given = {
        "method": method,
        "split": split,
        "max_examples": max_examples,
        "batch_size": batch_size,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    _, evaluator = open_data(
        experiment,
        workdir,
        tasks.default_data_dir() if data_dir is None else data_dir,
        evaluation=replace(experiment.evaluation, **changes),
        only=task,
    )
    found = {}
    for number in chosen_steps(workdir, step, every=every, follow=follow):
        _, variables = restore_variables(workdir / "checkpoints", step=number)
        results, overall = evaluator.write(workdir, number, variables)
        found[number] = {r.task: r.metrics for r in results}
        show(number, results, overall)
    if len(found) > 1:
        show_best(found)


def chosen_steps(
    workdir: pathlib.Path, step: int | None, *, every: bool, follow: bool
) -> Iterator[int]:
    """The checkpoints to evaluate; with `follow` as they appear, until the run's last step."""
    from synthesizer_jax.training.checkpoints import finished_steps
    from synthesizer_jax.training.experiment import load_experiment

    directory = workdir / "checkpoints"
    steps = finished_steps(directory)
    if not follow:
        if not steps:
            raise FileNotFoundError(f"{directory} has no checkpoint yet; train first")
        yield from (steps if every else [steps[-1] if step is None else step])
        return
    seen: set[int] = set()
    last = load_experiment(workdir).training.steps
    while last not in seen:
        new = [s for s in finished_steps(directory) if s not in seen]
        seen.update(new)
        yield from new
        if not new:
            time.sleep(POLL_SECONDS)


def show(step: int, results: list[Any], overall: dict[str, Any]) -> None:
    """Prints one checkpoint's table."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.data.averages import BENCHMARKS

    table = Table(title=f"step {step:,}", title_justify="left")
    for heading in ("task", "split"):
        table.add_column(heading)
    table.add_column("n", justify="right")
    table.add_column("metrics")
    for r in results:
        metrics = "  ".join(f"{name} {value:.2f}" for name, value in r.metrics.items())
        table.add_row(r.task, r.split, f"{r.n:,}", metrics)
    console = Console()
    console.print(table)
    tasks = {r.task for r in results}
    for name, groups in BENCHMARKS.items():
        value = overall.get(name)
        if value is not None:
            console.print(f"{name} average: {value:.2f}", highlight=False)
        elif any(tasks.intersection(group) for group in groups):
            console.print(f"{name} average: incomplete, not computed", highlight=False)
    if "loss" in overall:
        console.print(
            f"held-out loss {overall['loss']:.4f} nats per token, "
            f"{overall['loss_per_example']:.4f} per example; the label prior's entropy is "
            f"{overall['label_prior_entropy']:.4f} given the task, "
            f"{overall['joint_label_prior_entropy']:.4f} over the joint mixture",
            highlight=False,
        )


def show_best(found: dict[int, dict[str, dict[str, float]]]) -> None:
    """Prints T5's choice (each group at its own best step) and the best single step."""
    from synthesizer_jax.data.averages import BENCHMARKS, best_average, best_single_step

    for benchmark in BENCHMARKS:
        single = best_single_step(found, benchmark)
        if single is not None:
            typer.echo(
                f"{benchmark}: {best_average(found, benchmark):.2f} with each task at its best "
                f"step, {single[1]:.2f} at the one step {single[0]}"
            )
