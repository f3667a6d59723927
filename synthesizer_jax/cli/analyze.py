"""`synthesizer-jax analyze`."""

from __future__ import annotations

import pathlib
import statistics
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import DataDir, Imports, storage_argument, storage_option

if TYPE_CHECKING:
    from synthesizer_jax.distillation.static_attention import StaticAttention


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
    from synthesizer_jax.cli.report import provenance
    from synthesizer_jax.distillation.analysis import analyze_run
    from synthesizer_jax.files import absolute
    from synthesizer_jax.reports.static_attention import (
        summarize_static_attention,
        warnings_about,
        write_static_attention,
    )
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
    write_static_attention(
        output,
        found,
        title=f"How static the attention of {run} is",
        lengths=lengths,
        facts=provenance(),
    )
    _print_heads(found)
    for sentence in (summarize_static_attention(found), *warnings_about(found)):
        typer.echo(sentence)
    typer.echo(f"page: {absolute(output)}")


def _print_heads(found: StaticAttention) -> None:
    """Prints what each form misses of the heads of each layer."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.distillation.static_attention import FORMS

    table = Table(
        title="divergence of the heads from static forms, nats per query (mean over heads)",
        title_justify="left",
    )
    table.add_column("layer", no_wrap=True)
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
