"""`synthesizer-jax models`."""

from __future__ import annotations

import fnmatch
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, TypedDict, cast

import typer

INPUTS_LENGTH, TARGETS_LENGTH = 512, 114
"""The lengths of the costs in ``zoo.json``."""


class Costs(TypedDict):
    """The costs of a model; see `costs.zoo.costs`."""

    d_model: int
    layers: list[int]
    flops_lengths: list[int]
    parameters: int
    positions: int
    tables_per_layer: int
    constants: int
    flops_per_token: int
    cache_bytes_per_token: int


def _complete_model(incomplete: str) -> list[str]:
    """Returns the names of models that begin with a string."""
    return [name for name in _known_costs() if name.startswith(incomplete)]


def models(
    pattern: Annotated[
        str,
        typer.Argument(
            help="A pattern of names, such as 'mesh_*'.", autocompletion=_complete_model
        ),
    ] = "*",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    inputs_length: Annotated[
        int, typer.Option(help="Number of encoder tokens for the FLOPs.", min=1)
    ] = INPUTS_LENGTH,
    targets_length: Annotated[
        int, typer.Option(help="Number of decoder tokens for the FLOPs.", min=1)
    ] = TARGETS_LENGTH,
) -> None:
    """List the named models and their costs; no model is allocated.

    The costs at the default lengths are stored; counting those at other lengths takes half a second per
    model.
    """
    known = _known_costs()
    names = fnmatch.filter(known, pattern)
    if not names:
        raise ValueError(f"no model is called {pattern!r}; 'synthesizer-jax models' lists all")
    rows = {name: known[name] for name in names}
    if (inputs_length, targets_length) != (INPUTS_LENGTH, TARGETS_LENGTH):
        rows = _count_costs(names, inputs_length=inputs_length, targets_length=targets_length)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    _print_costs(rows, inputs_length=inputs_length, targets_length=targets_length)


def _known_costs() -> dict[str, Costs]:
    """Reads the costs of all named models at the default lengths; does not import JAX."""
    file = importlib.resources.files("synthesizer_jax") / "costs" / "zoo.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _count_costs(
    names: Iterable[str], *, inputs_length: int, targets_length: int
) -> dict[str, Costs]:
    from rich.console import Console
    from rich.progress import track

    from synthesizer_jax.costs.zoo import costs

    counted = {}
    for name in track(names, "counting", console=Console(stderr=True), transient=True):
        model_costs = costs(name, inputs_length=inputs_length, targets_length=targets_length)
        counted[name] = cast(Costs, model_costs)
    return counted


def _print_costs(rows: Mapping[str, Costs], *, inputs_length: int, targets_length: int) -> None:
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
