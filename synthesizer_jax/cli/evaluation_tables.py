"""The tables that `synthesizer-jax eval` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from synthesizer_jax.evaluation.averages import Results
    from synthesizer_jax.evaluation.scoring import TaskResult


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
        loss = "" if result.loss is None else f"{result.loss.per_token:.4f}"
        table.add_row(result.task, result.split, f"{result.n:,}", _format_metrics(result), loss)
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
    _print_losses(overall)


def _format_metrics(result: TaskResult) -> str:
    """Formats a task's metrics, and the number of examples without a label, which they exclude."""
    if not result.labeled:
        return "unlabeled"
    measures = result.metrics | result.text_metrics
    metrics = "  ".join(f"{name} {value:.2f}" for name, value in measures.items())
    unlabeled = result.n - result.labeled
    return (metrics or "no metric") + (f"  ({unlabeled:,} unlabeled)" if unlabeled else "")


def _print_losses(overall: Mapping[str, float]) -> None:
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


def print_best_steps(results: Mapping[int, Results]) -> None:
    """Prints every task's best step, and for each benchmark two averages.

    The first average takes each task at its best step, as T5 does; the second is that of the best step.

    Args:
      results: metrics by step and task.
    """
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.evaluation.averages import (
        BENCHMARKS,
        best_average,
        best_by_task,
        best_single_step,
    )

    table = Table(title="best steps", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("step", justify="right")
    table.add_column("metrics")
    for task, step in best_by_task(results).items():
        metrics = "  ".join(f"{name} {value:.2f}" for name, value in results[step][task].items())
        table.add_row(task, f"{step:,}", metrics)
    if table.row_count:
        Console().print(table)
    for benchmark in BENCHMARKS:
        single = best_single_step(results, benchmark)
        if single is not None:
            step, average = single
            typer.echo(
                f"{benchmark}: {best_average(results, benchmark):.2f} with each task at its best step, "
                f"{average:.2f} at the single step {step}"
            )
