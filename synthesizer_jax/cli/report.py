"""`synthesizer-jax compare`, `report` and `analyze`: pages about runs."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.options import DataDir, Imports, print_table
from synthesizer_jax.files import absolute
from synthesizer_jax.typing import Count, NotNegative


def report(
    runs: list[pathlib.Path],
    *,
    output: pathlib.Path = pathlib.Path("report.html"),
    imports: Annotated[list[str] | None, typer.Option("--import", hidden=True)] = None,
) -> None:
    """Show a run, or compare several: scores, curves, answers, speed and settings, in one page.

    Runs whose experiments differ in seeds alone are one system, with standard errors and bands. Only the
    files of the runs are read.

    Example: synthesizer-jax compare runs/rv-0 runs/rv-1 runs/vanilla-0 runs/vanilla-1

    Args:
      runs: directories of runs.
      output: the HTML file to write.
      imports: no longer needed.
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


def analyze(
    run: pathlib.Path,
    *,
    data_dir: DataDir = None,
    output: pathlib.Path = pathlib.Path("static_attention.html"),
    examples: Count = 1024,
    held_out: Count = 512,
    batch_size: Count = 16,
    tolerance: NotNegative = 0.01,
    imports: Imports = None,
) -> None:
    """Tell which heads of a model must read the tokens, and which could read a table instead.

    Static forms of attention, which depend on positions alone, are fitted to every head; a page shows
    what they explain, the loss when heads are replaced by tables, and what that saves.

    Example: synthesizer-jax analyze runs/t5 --data-dir DATA

    Args:
      run: RUN, or RUN/checkpoints/STEP.
      output: the HTML file to write.
      examples: training examples that static forms are fitted to.
      held_out: held-out examples on which they are measured.
      batch_size: examples per batch.
      tolerance: share by which the loss may rise.
    """
    from synthesizer_jax.distillation.static_attention import analyze_run
    from synthesizer_jax.reports.static_attention import sentences_about, write_static_attention
    from synthesizer_jax.runs import code
    from synthesizer_jax.runs.progress import show_phases

    code.load_user_code(imports or ())
    with show_phases() as phase:
        found = analyze_run(
            run,
            data_dir=data_dir,
            examples=(examples, held_out),
            batch_size=batch_size,
            tolerance=tolerance,
            phase=phase,
        )
    write_static_attention(output, found, title=f"How static the attention of {run} is")
    typer.echo("\n".join([*sentences_about(found), f"page: {absolute(output)}"]))
