"""`synthesizer-jax report`, `analyze` and `quickstart`: pages about runs."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import (
    DataDir,
    Imports,
    Overrides,
    Quiet,
    storage_argument,
    storage_option,
    to_storage_paths,
)
from synthesizer_jax.cli.recipes import load_recipe

if TYPE_CHECKING:
    from synthesizer_jax.distillation.static_attention import StaticAttention

RECIPES = {"Random + Vanilla": "random_vanilla", "Dot product": "dot_product"}
"""Names of the models that `quickstart` compares, and their recipes."""


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
    """Compare the logs of runs: print a table of metrics, and write a page with answers, losses, costs.

    Example: synthesizer-jax report runs/rv runs/vanilla
    """
    from synthesizer_jax.runs import code

    code.load_user_code(imports or ())
    _write_page({str(run): run for run in runs}, output, title="Comparison of runs")


def quickstart(
    workdir: Annotated[pathlib.Path, storage_option("Directory of the runs and the report.")],
    *,
    data_dir: DataDir = None,
    seed: Annotated[
        int, typer.Option(help="Seed of parameters, dropout and the order of the data.")
    ] = 0,
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Train a Synthesizer and a dot-product model on synthetic tasks and compare them.

    Prints a table of metrics per task and writes WORKDIR/report.html. The same command continues an
    interrupted training.
    """
    from synthesizer_jax.training.run import run

    data_dir = workdir / "data" if data_dir is None else data_dir
    seeds = [f"training.seed={seed}", f"data.seed={seed}"]
    for title, recipe in RECIPES.items():
        typer.echo(f"training {title} ({recipe})")
        experiment = load_recipe(f"quickstart:{recipe}", [*seeds, *(overrides or ())])
        run(experiment, workdir / recipe, data_dir=data_dir, visible=not quiet)
    runs = {title: workdir / recipe for title, recipe in RECIPES.items()}
    title = "Co-training eight tasks with a Synthesizer"
    _write_page(runs, workdir / "report.html", title=title)


def _write_page(runs: Mapping[str, pathlib.Path], output: pathlib.Path, *, title: str) -> None:
    """Writes the page that compares runs, and prints their metrics and how far their parameters moved."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.files import absolute
    from synthesizer_jax.reports.page import summarize_run, write_report

    summaries = [summarize_run(name, run) for name, run in runs.items()]
    write_report(output, summaries, title=title)
    console = Console(width=120, markup=False)
    table = Table("task", "metric", title="held-out metrics, percent", title_justify="left")
    for name in runs:
        table.add_column(name, justify="right")
    for task, metric in {k: m for s in summaries for k, m in s.metric_names.items()}.items():
        values = (f"{s.metrics[task]:.1f}" if task in s.metrics else "–" for s in summaries)
        table.add_row(task, metric, *values)
    if table.row_count:
        console.print(table)
    typer.echo(f"report: {absolute(output)}")


def analyze(
    run: Annotated[pathlib.Path, storage_argument("RUN, or RUN/checkpoints/STEP.")],
    *,
    data_dir: DataDir = None,
    output: Annotated[pathlib.Path, storage_option("The HTML file to write.")] = pathlib.Path(
        "static_attention.html"
    ),
    examples: Annotated[
        int, typer.Option(help="Training examples that static forms are fitted to.", min=1)
    ] = 1024,
    held_out: Annotated[
        int, typer.Option(help="Held-out examples on which they are measured.", min=1)
    ] = 512,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.", min=1)] = 16,
    tolerance: Annotated[
        float, typer.Option(help="Share by which the loss may rise.", min=0.0)
    ] = 0.01,
    imports: Imports = None,
) -> None:
    """Tell which heads of a model must read the tokens, and which could read a table instead.

    Static forms of attention, which depend on positions alone, are fitted to every head; a page shows
    what they explain, the loss when heads are replaced by tables, and what that saves.

    Example: synthesizer-jax analyze runs/t5 --data-dir DATA
    """
    from synthesizer_jax.distillation.analysis import analyze_run
    from synthesizer_jax.files import absolute
    from synthesizer_jax.reports.static_attention import sentences_about, write_static_attention
    from synthesizer_jax.runs import code
    from synthesizer_jax.runs.progress import show_phases
    from synthesizer_jax.training.initial_parameters import find_checkpoint
    from synthesizer_jax.training.run_directory import load_experiment

    code.load_user_code(imports or ())
    lengths = load_experiment(find_checkpoint(run)[0]).data.lengths
    with show_phases() as phase:
        found = analyze_run(
            run,
            data_dir=data_dir,
            examples=(examples, held_out),
            batch_size=batch_size,
            tolerance=tolerance,
            phase=phase,
        )
    title = f"How static the attention of {run} is"
    write_static_attention(output, found, title=title, lengths=lengths)
    _print_heads(found)
    for sentence in sentences_about(found):
        typer.echo(sentence)
    typer.echo(f"page: {absolute(output)}")


def _print_heads(found: StaticAttention) -> None:
    """Prints what each form misses of the heads of each layer."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.distillation.static_attention import FORMS

    table = Table(
        "layer", title="divergence of the heads from static forms, nats per query (mean over heads)"
    )
    for heading in ("equal weights", *FORMS, "must read tokens"):
        table.add_column(heading, justify="right")
    needed = found.heads[found.replaceable.replaced :]
    layers = sorted({(h.stack != "encoder", h.stack, h.layer) for h in found.heads})
    for _, stack, layer in layers:
        own = [h for h in found.heads if (h.stack, h.layer) == (stack, layer)]
        table.add_row(
            f"{stack} {layer + 1}",
            f"{statistics.fmean(h.uniform for h in own):.3f}",
            *(f"{statistics.fmean(h.divergences[name] for h in own):.3f}" for name in FORMS),
            f"{sum(h in needed for h in own)} of {len(own)}",
        )
    Console(width=120).print(table)
