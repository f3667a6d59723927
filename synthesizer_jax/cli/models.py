"""`synthesizer-jax models`."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from typing import Annotated, Any

import typer


def models(
    pattern: Annotated[str, typer.Argument(help="Names to show, such as 'mesh_*'.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    inputs_length: Annotated[int, typer.Option(help="Encoder tokens that FLOPs count.")] = 512,
    targets_length: Annotated[int, typer.Option(help="Decoder tokens that FLOPs count.")] = 114,
) -> None:
    """List the named models with what they cost; nothing is allocated."""
    from synthesizer_jax.models import ZOO, stacks, summarize

    names = fnmatch.filter(ZOO, pattern)
    if not names:
        raise ValueError(f"no model is called {pattern!r}; 'synthesizer-jax models' lists all")
    rows = {}
    for name in names:
        model = ZOO[name]()
        lengths = lengths_of(model, inputs_length, targets_length)
        summary = summarize(model, inputs_length=lengths[0], targets_length=lengths[1])
        rows[name] = {
            "d_model": model.d_model,
            "layers": [stack.num_layers for stack in stacks(model).values()],
            "flops_lengths": lengths,
            **dataclasses.asdict(summary),
        }
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(rows, inputs_length, targets_length)


def lengths_of(model: Any, *asked: int) -> list[int]:
    """The lengths to count FLOPs for: those asked for, or the longest that a mixer addresses."""
    from synthesizer_jax.models import stacks

    limits = [
        getattr(run.block.self_mixer, "max_length", None)
        for stack in stacks(model).values()
        for run in stack.runs
    ]
    longest = min((limit for limit in limits if limit is not None), default=max(asked))
    return [min(length, longest) for length in asked]


def show(rows: dict[str, dict], inputs_length: int, targets_length: int) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Models ({inputs_length} + {targets_length} tokens for FLOPs)", title_justify="left"
    )
    table.add_column("name", no_wrap=True)
    headings = ("d_model", "layers", "parameters", "of these positions", "table / layer")
    for heading in (*headings, "constants", "MFLOPs / token", "cache B / token"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['d_model']:,}",
            "+".join(map(str, row["layers"])),
            f"{row['parameters']:,}",
            f"{row['positions']:,}",
            f"{row['tables_per_layer']:,}",
            f"{row['constants']:,}",
            f"{row['flops_per_token'] / 1e6:,.1f}",
            f"{row['cache_bytes_per_token']:,}",
        )
    Console(width=160).print(table)
