"""`synthesizer-jax models`."""

from __future__ import annotations

import fnmatch
import importlib.resources
import json
from typing import Annotated, Any

import typer

INPUTS_LENGTH, TARGETS_LENGTH = 512, 114
"""Lengths whose costs come with the package."""


def complete_model(incomplete: str) -> list[str]:
    """What a shell offers for the name of a model."""
    return [name for name in known_costs() if name.startswith(incomplete)]


def models(
    pattern: Annotated[
        str,
        typer.Argument(help="Names to show, such as 'mesh_*'.", autocompletion=complete_model),
    ] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    inputs_length: Annotated[
        int, typer.Option(help="Encoder tokens that FLOPs count.", min=1)
    ] = INPUTS_LENGTH,
    targets_length: Annotated[
        int, typer.Option(help="Decoder tokens that FLOPs count.", min=1)
    ] = TARGETS_LENGTH,
) -> None:
    """List the named models with what they cost; nothing is allocated.

    Costs at the default lengths come with the package; at others they are counted, half a second a model.
    """
    known = known_costs()
    names = fnmatch.filter(known, pattern)
    if not names:
        raise ValueError(f"no model is called {pattern!r}; 'synthesizer-jax models' lists all")
    rows = {name: known[name] for name in names}
    if (inputs_length, targets_length) != (INPUTS_LENGTH, TARGETS_LENGTH):
        rows = counted(names, inputs_length, targets_length)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(rows, inputs_length, targets_length)


def known_costs() -> dict[str, dict[str, Any]]:
    """The costs of all named models at the default lengths, without importing any of them."""
    file = importlib.resources.files("synthesizer_jax") / "models" / "costs.json"
    return json.loads(file.read_text(encoding="utf-8"))


def counted(names: list[str], inputs_length: int, targets_length: int) -> dict[str, dict[str, Any]]:
    """The costs at other lengths."""
    from rich.console import Console
    from rich.progress import track

    from synthesizer_jax.models.costs import costs

    lengths = {"inputs_length": inputs_length, "targets_length": targets_length}
    bar = track(names, "counting", console=Console(stderr=True), transient=True)
    return {name: costs(name, **lengths) for name in bar}


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
