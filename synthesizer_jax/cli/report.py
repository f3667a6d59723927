"""`synthesizer-jax report`."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.cli.places import option, storage
from synthesizer_jax.cli.train import Imports

if TYPE_CHECKING:
    from synthesizer_jax.reports import Report, RunReport


def report(
    runs: Annotated[
        list[pathlib.Path],
        typer.Argument(help="Directories of runs.", callback=storage),
    ],
    output: Annotated[pathlib.Path, option("The page to write.")] = pathlib.Path("report.html"),
    imports: Imports = None,
) -> None:
    """Compare runs by what they logged: a table here, and a page with their losses, costs and speeds.

    Example: synthesizer-jax report runs/rv runs/vanilla
    """
    from synthesizer_jax.files import absolute
    from synthesizer_jax.reports import Report, write_report
    from synthesizer_jax.training import code

    code.load(imports or ())
    summaries = [summarise(str(run), run) for run in dict.fromkeys(runs)]
    names: dict[str, str] = {}
    for _, metrics in summaries:
        names |= {task: metric for task, metric in metrics.items() if task not in names}
    page = Report(
        title="Runs side by side",
        lead="What the runs logged: their newest evaluation, losses, costs and speeds.",
        runs=[run for run, _ in summaries],
        metric_names=names,
        facts=facts(),
    )
    write_report(output, page)
    show(page)
    typer.echo(f"report: {absolute(output)}")


def summarise(title: str, directory: pathlib.Path) -> tuple[RunReport, dict[str, str]]:
    """What a run logged, and the name of every task's first metric.

    Raises:
      FileNotFoundError: the directory holds no run.
      ValueError: the run has no evaluation yet.
    """
    from synthesizer_jax.models import summarize
    from synthesizer_jax.reports import RunReport
    from synthesizer_jax.training.experiment import load_experiment
    from synthesizer_jax.training.metrics import METRICS_FILE, read_metrics

    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    costs = summarize(
        experiment.model, inputs_length=lengths["inputs"], targets_length=lengths["targets"]
    )
    log = directory / METRICS_FILE
    records = read_metrics(log) if log.exists() else []
    trained = [r for r in records if r["kind"] == "train"]
    measured = [r for r in records if r["kind"] == "eval"]
    steps, tokens = (column(trained, f"{what}_per_second")[1] for what in ("steps", "tokens"))
    if not (steps and tokens and measured):
        raise ValueError(f"{log} holds no evaluation; let the run go on to its first one")
    metrics: dict[str, str] = {}
    for name in measured[-1]:
        task, slash, metric = name.rpartition("/")
        if slash and measured[-1][name] is not None:
            metrics.setdefault(task, metric)
    run = RunReport(
        title=title,
        parameters=costs.parameters,
        cache_bytes=costs.cache_bytes_per_token,
        flops=costs.flops_per_token,
        losses=column(trained, "loss"),
        held_out=column(measured, "loss"),
        steps_per_second=steps,
        tokens_per_second=tokens,
        metrics={task: measured[-1][f"{task}/{metric}"] for task, metric in metrics.items()},
    )
    return run, metrics


def column(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps of a log that have a finite number of that name, and the numbers."""
    found = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in found], [number for _, number in found]


def facts() -> dict[str, str]:
    """What the page was made with."""
    import platform

    import flax
    import jax

    from synthesizer_jax.version import __version__

    return {
        "synthesizer_jax": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "Python": platform.python_version(),
    }


def show(page: Report) -> None:
    """Prints the table of the page."""
    from rich.console import Console
    from rich.table import Table

    systems: dict[str, Any] = {run.title: run.metrics for run in page.runs} | dict(page.baselines)
    table = Table(title="held-out metrics, percent", title_justify="left")
    table.add_column("task", no_wrap=True)
    table.add_column("metric")
    if page.counts:
        table.add_column("n", justify="right")
    for name in systems:
        table.add_column(name, justify="right")
    for task, metric in page.metric_names.items():
        count = [f"{page.counts[task]:,}"] if page.counts else []
        values = (f"{system[task]:.1f}" if task in system else "–" for system in systems.values())
        table.add_row(task, metric, *count, *values)
    Console(width=120, markup=False).print(table)
