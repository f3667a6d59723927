"""`synthesizer-jax recipes`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.cli.recipes import (
    Outline,
    check_name,
    complete_recipe,
    load_with_code,
    outlines,
    packaged,
    source_of,
)
from synthesizer_jax.cli.train import Imports, Overrides

if TYPE_CHECKING:
    from synthesizer_jax.training.settings import Setting

NOT_ANNOTATED = "?"
"""What a function returns that does not say it."""


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A packaged recipe or FILE.py, with :function; all are listed if left out.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: Overrides = None,
    imports: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the recipes that come with the package, or show what one is made of.

    Every line of a shown recipe is a field: its path and value as --set path=value takes them, its type,
    and its default.

    Example: synthesizer-jax recipes quickstart --set model=t5_1_1_tiny
    """
    if name is None:
        if overrides or imports:
            raise ValueError("--set and --import belong to one recipe; name it")
        show_names({place: outlines(source_of(place)) for place in packaged()}, as_json)
        return
    check_name(name)
    from synthesizer_jax.training.distillation import Distillation
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.training.settings import settings

    kinds = (Experiment, Distillation)
    found, _ = load_with_code(name, overrides or (), kind=kinds, imports=imports or ())
    rows = sorted(settings(found), key=lambda row: row.path.startswith("model"))
    show_settings(name, found, rows, as_json)


def show_names(found: dict[str, list[Outline]], as_json: bool) -> None:
    """Prints the packaged recipes."""
    rows = [
        {"recipe": f"{place}:{o.name}", "returns": o.returns or NOT_ANNOTATED, "summary": o.summary}
        for place, entries in found.items()
        for o in entries
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "returns", "what it is", box=None)
    for row in rows:
        table.add_row(*row.values())
    Console(width=140).print(table)
    typer.echo("\n'synthesizer-jax recipes NAME' shows the fields of one")


def show_settings(name: str, found: Any, rows: list[Setting], as_json: bool) -> None:
    """Prints every field of a recipe."""
    if as_json:
        whole = {"recipe": name, "returns": type(found).__name__}
        typer.echo(json.dumps({**whole, "settings": list(map(dataclasses.asdict, rows))}, indent=1))
        return
    typer.echo(f"{name} returns this {type(found).__name__}; change it by --set path=value")
    widths = [
        max(len(text) for text in column)
        for column in zip(*((f"{row.path}={row.value}", row.type) for row in rows), strict=True)
    ]
    for row in rows:
        default = "" if row.default is None else f"default {row.default}"
        cells = (f"{row.path}={row.value}".ljust(widths[0]), row.type.ljust(widths[1]), default)
        typer.echo("  ".join(cells).rstrip())
