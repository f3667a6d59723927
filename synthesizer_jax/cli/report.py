"""`synthesizer-jax report`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.cli.options import Imports, storage_option, to_storage_paths

if TYPE_CHECKING:
    from synthesizer_jax.reports import Report, RunReport


def report(
    runs: Annotated[
        list[pathlib.Path],
        typer.Argument(help="Directories of runs.", callback=to_storage_paths),
    ],
    output: Annotated[pathlib.Path, storage_option("The HTML file to write.")] = pathlib.Path(
        "report.html"
    ),
    imports: Imports = None,
) -> None:
    """Compare the logs of runs: print a table of metrics, and write a page with losses, costs and speeds.

    Example: synthesizer-jax report runs/rv runs/vanilla
    """
    from synthesizer_jax.files import absolute
    from synthesizer_jax.reports import Report, write_report
    from synthesizer_jax.runs import code

    code.load_user_code(imports or ())
    summaries = [summarize_run(str(run), run) for run in dict.fromkeys(runs)]
    metric_names: dict[str, str] = {}
    for _, names in summaries:
        for task, metric in names.items():
            metric_names.setdefault(task, metric)
    page = Report(
        title="Comparison of runs",
        lead="The newest evaluations, losses, costs and speeds that the runs logged.",
        runs=[run for run, _ in summaries],
        metric_names=metric_names,
        facts=provenance(),
    )
    write_report(output, page)
    print_comparison(page)
    for run in page.runs:
        print_movement(run)
    typer.echo(f"report: {absolute(output)}")


def summarize_run(title: str, directory: pathlib.Path) -> tuple[RunReport, dict[str, str]]:
    """Returns the costs and the logged results of a run, and the name of each task's first metric.

    Raises:
      FileNotFoundError: there is no run in the directory.
      ValueError: the run has logged no evaluation yet.
    """
    from synthesizer_jax.costs.summary import summarize
    from synthesizer_jax.reports import RunReport
    from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
    from synthesizer_jax.training.movement import read_movement
    from synthesizer_jax.training.run_directory import load_experiment

    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    costs = summarize(
        experiment.model, inputs_length=lengths["inputs"], targets_length=lengths["targets"]
    )
    log = directory / METRICS_FILE
    records = read_metrics(log) if log.exists() else []
    training = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    _, steps_per_second = _metric_series(training, "steps_per_second")
    _, tokens_per_second = _metric_series(training, "tokens_per_second")
    if not (steps_per_second and tokens_per_second and evaluations):
        raise ValueError(f"{log} holds no evaluation; continue the run until its first evaluation")
    newest = evaluations[-1]
    metric_names = _first_metrics(newest)
    run = RunReport(
        title=title,
        parameters=costs.parameters,
        cache_bytes=costs.cache_bytes_per_token,
        flops=costs.flops_per_token,
        losses=_metric_series(training, "loss"),
        held_out=_metric_series(evaluations, "loss"),
        steps_per_second=steps_per_second,
        tokens_per_second=tokens_per_second,
        metrics={task: newest[f"{task}/{name}"] for task, name in metric_names.items()},
        movement=read_movement(directory),
    )
    return run, metric_names


def _first_metrics(evaluation: Mapping[str, object]) -> dict[str, str]:
    """Returns each task's first metric, from the keys ``TASK/METRIC`` whose values are not null."""
    names: dict[str, str] = {}
    for key, value in evaluation.items():
        task, slash, metric = key.rpartition("/")
        if slash and value is not None:
            names.setdefault(task, metric)
    return names


def _metric_series(
    records: Sequence[Mapping[str, Any]], name: str
) -> tuple[list[int], list[float]]:
    """Returns the steps and values of a metric, without the records in which it is null or absent."""
    present = [record for record in records if record.get(name) is not None]
    return [record["step"] for record in present], [record[name] for record in present]


def provenance() -> dict[str, str]:
    """Returns the versions of the libraries that a report is made with."""
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


def print_comparison(page: Report) -> None:
    """Prints the metrics of a report's runs and baselines, if there are any."""
    from rich.console import Console
    from rich.table import Table

    if not page.metric_names:
        return
    systems = {run.title: run.metrics for run in page.runs} | dict(page.baselines)
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


def print_movement(run: RunReport) -> None:
    """Prints which parameters of a run moved, if it has finished."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.reports.page import movement_section

    if run.movement is None:
        return
    section = movement_section(run.title, run.movement)
    title = f"{section.run}: change of the parameters since {section.since}"
    table = Table(title=title, title_justify="left")
    table.add_column("parameters")
    for name in ("number", "frozen", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in section.rows:
        table.add_row(row.path, row.parameters, row.frozen, row.change)
    Console(width=120, markup=False).print(table)
