"""Defines the commands `compare` and `report`, which write HTML pages about runs."""

from __future__ import annotations

import pathlib

import typer

from synthesizer_jax.base.files import absolute
from synthesizer_jax.cli.options import print_table


def report(runs: list[pathlib.Path], *, output: pathlib.Path = pathlib.Path("report.html")) -> None:
    """Show or compare runs in an HTML page with scores, curves, answers, speed and settings.

    Runs whose experiments differ only in their seeds are shown as one system,
    with standard errors and with bands around the curves. The command reads
    only the files of the runs, and does not load their models.

    Example: synthesizer-jax compare runs/rv-0 runs/rv-1 runs/vanilla-0 runs/vanilla-1

    Args:
      runs: the directories of one or more runs.
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
