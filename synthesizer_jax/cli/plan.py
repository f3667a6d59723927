"""`synthesizer-jax recipes`, `models` and `plan`: what there is, and what it needs."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.resources
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.cli.options import Imports, Overrides, Recipe
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
    from synthesizer_jax.costs.chips import Topology
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.training.plan import MemoryPlan


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
    from rich.console import Console
    from rich.table import Table

    rows = [
        {
            "recipe": f"{module}:{outline.name}",
            "returns": outline.returns or "?",
            "summary": outline.summary,
        }
        for module in packaged_recipes()
        for outline in recipe_outlines(recipe_source(module))
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
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


INPUTS_LENGTH, TARGETS_LENGTH = 512, 114
"""The lengths of the costs in ``zoo.json``."""


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
        from synthesizer_jax.costs.zoo import costs

        lengths = {"inputs_length": inputs_length, "targets_length": targets_length}
        rows = {name: costs(name, **lengths) for name in names}
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    _print_costs(rows, inputs_length=inputs_length, targets_length=targets_length)


def _known_costs() -> dict[str, dict[str, Any]]:
    """Reads the costs of all named models at the default lengths; does not import JAX."""
    file = importlib.resources.files("synthesizer_jax") / "costs" / "zoo.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _print_costs(
    rows: Mapping[str, Mapping[str, Any]], *, inputs_length: int, targets_length: int
) -> None:
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


GIB = 2**30


def plan(
    recipe: Recipe,
    *,
    topology: Annotated[
        str, typer.Option(help="Topology of a slice, such as v5p:4x4x8 or v6e-16.")
    ],
    slices: Annotated[int, typer.Option(help="Number of slices.")] = 1,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also compile the step with libtpu; takes minutes.")
    ] = False,
    overrides: Overrides = None,
    imports: Imports = None,
) -> None:
    """Estimate the memory that a recipe needs on every TPU chip, and list the settings that fit.

    No TPU is needed, and no array is allocated. In the place of a recipe it takes the directory of a
    run, or a folder of transformers, of which it reads no tensors.

    Example: synthesizer-jax plan cotrain_glue_super_glue:rv_base --topology v5e:4x4
    """
    check_name(recipe)
    import jax

    from synthesizer_jax.costs import chips
    from synthesizer_jax.training.plan import make_plan

    parsed_topology = chips.parse_topology(topology, slices)
    jax.config.update("jax_platforms", "cpu")  # an installed libtpu would search for a TPU
    # Without a TPU, programs compiled for TPUs cannot be read from the cache.
    jax.config.update("jax_enable_compilation_cache", False)
    directory = pathlib.Path(recipe)
    if (directory / "config.json").is_file():
        experiment = _experiment_of(directory, overrides or ())
    else:
        experiment = load_recipe(recipe, overrides or (), imports=imports or ())
    memory_plan = make_plan(experiment, parsed_topology)
    _print_plan(memory_plan)
    if compiled:
        from synthesizer_jax.training.aot import TooLargeError, compile_step

        try:
            memory = compile_step(experiment, parsed_topology).memory_analysis()
            assert memory is not None
            typer.echo(
                f"\ncompiled: one device needs {memory.peak_memory_in_bytes / GIB:.2f} of its "
                f"{memory_plan.capacity / GIB:.0f} GiB, of which state and batch are "
                f"{memory.argument_size_in_bytes / GIB:.2f}"
            )
        except TooLargeError as error:
            typer.echo(f"\n{error}")
    _print_advice(experiment, parsed_topology)


def _experiment_of(directory: pathlib.Path, overrides: Sequence[str]) -> Experiment:
    """Returns the experiment that a folder of transformers would become, with some fields changed."""
    from synthesizer_jax.cli.settings import override
    from synthesizer_jax.pretrained.convert import experiment_of

    return override(experiment_of(directory), *overrides)


def _print_advice(experiment: Experiment, topology: Topology) -> None:
    """Prints the settings with which the step fits."""
    from synthesizer_jax.training.plan import advise

    options = advise(experiment, topology)
    if not options:
        typer.echo("\nnothing fits: use more chips, a smaller batch or training.micro_batches")
        return
    typer.echo("\nsettings that fit, the cheapest first:")
    for changed, memory_plan in options:
        typer.echo(
            f"  {memory_plan.needs.total / GIB:7.2f} GiB per device: "
            f"{_format_overrides(experiment, changed)}"
        )


def _print_plan(plan: MemoryPlan) -> None:
    """Prints the mesh, the memory that one device needs, and the FLOPs of a step."""
    from rich.console import Console
    from rich.table import Table

    topology, needs = plan.topology, plan.needs
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    slices = f"{topology.slices} × " if topology.slices > 1 else ""
    typer.echo(
        f"{slices}{topology.name}: {topology.chips} chips, mesh {mesh}; {plan.rows} rows per device"
    )
    table = Table("on one device", box=None)
    table.add_column("GiB", justify="right")
    for name, size in (*dataclasses.asdict(needs).items(), ("total", needs.total)):
        table.add_row(name, f"{size / GIB:.2f}")
    table.add_row("memory", f"{plan.capacity / GIB:.0f}")
    Console().print(table)
    verdict = "fits" if plan.fits else "does not fit"
    typer.echo(
        f"{verdict}; {plan.flops / 1e12:,.1f} TFLOP per step: {1e3 * plan.seconds:,.1f} ms at the peak "
        f"of {topology.chip.name} ({topology.chip.source})"
    )


def _format_overrides(experiment: Experiment, changed: Experiment) -> str:
    """Formats the options that change an experiment into another."""
    return (
        " ".join(f"--set {x}" for x in _changed_settings(experiment, changed))
        or "the recipe as it is"
    )


def _changed_settings(experiment: Experiment, changed: Experiment) -> list[str]:
    """Returns the assignments for ``--set`` that change the fields of the mesh and the stacks."""
    from synthesizer_jax.models import stacks_of
    from synthesizer_jax.registry import fields_of

    pairs: list[tuple[str, object, object]] = [("mesh", experiment.mesh, changed.mesh)]
    new_stacks = stacks_of(changed.model)
    pairs += [
        (f"model.{name}", stack, new_stacks[name])
        for name, stack in stacks_of(experiment.model).items()
    ]
    return [
        f"{path}.{field}={str(value).lower()}"
        for path, before, after in pairs
        for field, value in fields_of(after).items()
        if value != fields_of(before)[field]
    ]
