"""`synthesizer-jax compare`, `report` and `inspect`: pages about runs."""

from __future__ import annotations

import functools
import pathlib

import typer

from synthesizer_jax.base.files import absolute
from synthesizer_jax.base.typing import Count
from synthesizer_jax.cli.options import DataDir, Imports, print_table


def report(runs: list[pathlib.Path], *, output: pathlib.Path = pathlib.Path("report.html")) -> None:
    """Show a run, or compare several: scores, curves, answers, speed and settings, in one page.

    Runs whose experiments differ in seeds alone are one system, with standard errors and bands. Only the
    files of the runs are read.

    Example: synthesizer-jax compare runs/rv-0 runs/rv-1 runs/vanilla-0 runs/vanilla-1

    Args:
      runs: directories of runs.
      output: the HTML file to write.
    """
    from synthesizer_jax.reports.logged import read_systems
    from synthesizer_jax.reports.page import write_report

    systems = read_systems(runs)
    scores = write_report(output, systems)
    rows = [[row[0].text, row[0].note, *(cell.text for cell in row[1:])] for row in scores]
    if rows:
        headings = ("task", "metric", *(system.name for system in systems))
        print_table(headings, rows, title="held-out examples", left=2)
    typer.echo(f"report: {absolute(output)}")


def inspect(
    run: pathlib.Path,
    *,
    data_dir: DataDir = None,
    output: pathlib.Path = pathlib.Path("inspection.html"),
    mixture: str | None = None,
    examples: Count = 256,
    batch_size: Count = 16,
    static_forms: bool = True,
    imports: Imports = None,
) -> None:
    """Show what the layers of a model have learned: where heads look, how sharp, local and static they are.

    A page, and a JSON file beside it, hold attention maps, histograms of the weights before and after
    training, distances, ranks, mixture weights, projections and likeness of heads. They say what static
    forms of attention, which depend on positions alone, miss of every head.

    Example: synthesizer-jax inspect runs/rv --data-dir DATA --output rv.html

    Args:
      run: RUN, or RUN/checkpoints/STEP.
      output: the HTML file to write.
      mixture: task or mixture whose examples are read; by default the run's.
      examples: examples of the evaluation sets that are read.
      batch_size: examples per batch.
      static_forms: fit static forms to the heads, and measure the loss with tables in their places.
    """
    from synthesizer_jax.cli.data import prepare_missing
    from synthesizer_jax.inspection.run import inspect_run
    from synthesizer_jax.reports.inspection import summary, write_inspection
    from synthesizer_jax.runs import code
    from synthesizer_jax.runs.progress import show_phases

    code.load_user_code(imports or ())
    with show_phases() as phase:
        inspection = inspect_run(
            run,
            data_dir=data_dir,
            prepare=functools.partial(prepare_missing, trains=False),
            mixture=mixture,
            phase=phase,
            examples=examples,
            batch_size=batch_size,
            fits=static_forms,
        )
    numbers = write_inspection(output, inspection, title=f"What {run} has learned")
    pages = f"page: {absolute(output)}", f"numbers: {absolute(numbers)}"
    typer.echo("\n".join([*summary(inspection), *pages]))
