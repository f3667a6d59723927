"""`synthesizer-jax recipes`."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import Imports, Overrides
from synthesizer_jax.cli.recipes import (
    check_name,
    complete_recipe,
    load_recipe,
    packaged_recipes,
    recipe_outlines,
    recipe_source,
)

if TYPE_CHECKING:
    from synthesizer_jax.cli.settings import Setting

NOT_ANNOTATED = "?"
"""Shown as the result of functions without a return annotation."""


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A packaged recipe or FILE.py, with :function; by default all are listed.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    *,
    overrides: Overrides = None,
    imports: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the recipes in this package, or show all fields of one recipe.

    Each field of a recipe is a line: its path and value as --set path=value takes them, its type, and its
    default.

    Example: synthesizer-jax recipes quickstart --set model=t5_1_1_tiny
    """
    if name is None:
        if overrides or imports:
            raise ValueError("--set and --import need a recipe: give its name")
        _print_recipes(as_json=as_json)
        return
    check_name(name)
    from synthesizer_jax.cli.settings import settings
    from synthesizer_jax.distillation.distill import Distillation
    from synthesizer_jax.training.experiment import Experiment

    kinds = (Experiment, Distillation)
    recipe = load_recipe(name, overrides or (), kind=kinds, imports=imports or ())
    rows = sorted(settings(recipe), key=lambda row: row.path.startswith("model"))
    class_name = type(recipe).__name__
    if as_json:
        fields = [dataclasses.asdict(row) for row in rows]
        description = {"recipe": name, "returns": class_name, "settings": fields}
        typer.echo(json.dumps(description, indent=1))
        return
    typer.echo(f"{name} returns this {class_name}; change it by --set path=value")
    _print_settings(rows)


def _print_recipes(*, as_json: bool) -> None:
    """Prints the packaged recipes."""
    rows = [
        {
            "recipe": f"{module}:{outline.name}",
            "returns": outline.returns or NOT_ANNOTATED,
            "summary": outline.summary,
        }
        for module in packaged_recipes()
        for outline in recipe_outlines(recipe_source(module))
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "returns", "summary", box=None)
    for row in rows:
        table.add_row(*row.values())
    Console(width=140).print(table)
    typer.echo("\n'synthesizer-jax recipes NAME' shows the fields of a recipe")


def _print_settings(rows: list[Setting]) -> None:
    """Prints one line per field, in aligned columns."""
    assignments = [f"{row.path}={row.value}" for row in rows]
    widths = max(map(len, assignments)), max(len(row.type) for row in rows)
    for assignment, row in zip(assignments, rows, strict=True):
        default = "" if row.default is None else f"default {row.default}"
        cells = (assignment.ljust(widths[0]), row.type.ljust(widths[1]), default)
        typer.echo("  ".join(cells).rstrip())
