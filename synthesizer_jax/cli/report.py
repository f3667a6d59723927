"""`synthesizer-jax report` and `analyze`: pages about runs."""

from __future__ import annotations

import pathlib

import typer

from synthesizer_jax.cli.options import DataDir, Imports, print_table
from synthesizer_jax.files import absolute
from synthesizer_jax.typing import Count, NotNegative


def report(
    runs: list[pathlib.Path],
    *,
    output: pathlib.Path = pathlib.Path("report.html"),
    imports: Imports = None,
) -> None:
    """Compare the logs of runs: print a table of metrics, and write a page with answers, losses, costs.

    Example: synthesizer-jax report runs/rv runs/vanilla

    Args:
      runs: directories of runs.
      output: the HTML file to write.
    """
    from synthesizer_jax.reports.page import metric_rows, summarize_run, write_report
    from synthesizer_jax.runs import code

    code.load_user_code(imports or ())
    summaries = [summarize_run(str(run), run) for run in runs]
    write_report(output, summaries, title="Comparison of runs")
    rows = [[x if isinstance(x, str) else x.text for x in row] for row in metric_rows(summaries)]
    if rows:
        headings = ("task", "metric", *map(str, runs))
        print_table(headings, rows, title="held-out metrics, percent", left=2)
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
