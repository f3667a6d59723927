"""`synthesizer-jax plan`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.cli.recipes import check_name, load_recipe
from synthesizer_jax.cli.train import Imports, Overrides, Recipe

if TYPE_CHECKING:
    from synthesizer_jax.training.ahead import Compiled
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.training.plan import Plan

GIB = 2**30


def plan(
    recipe: Recipe,
    topology: Annotated[str, typer.Option(help="A slice, such as v5p:4x4x8 or v6e-16.")],
    slices: Annotated[int, typer.Option(help="How many such slices.")] = 1,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the step with libtpu; minutes, no TPU.")
    ] = False,
    overrides: Overrides = None,
    imports: Imports = None,
) -> None:
    """Say what a recipe needs of every TPU chip and what would fit; needs no TPU, allocates nothing.

    Example: synthesizer-jax plan cotrain_glue_super_glue:rv_base --topology v5e:4x4
    """
    check_name(recipe)
    import jax

    from synthesizer_jax.sharding import chips
    from synthesizer_jax.training.plan import advise, make_plan

    place = chips.topology(topology, slices)
    jax.config.update("jax_platforms", "cpu")  # an installed libtpu would look for a TPU
    # What is compiled for a TPU cannot be read back without one.
    jax.config.update("jax_enable_compilation_cache", False)
    experiment = load_recipe(recipe, overrides or (), imports=imports or ())
    found = make_plan(experiment, place)
    show(found)
    if compiled:
        from synthesizer_jax.training.ahead import TooLargeError, compiled_plan

        try:
            show_compiled(compiled_plan(experiment, place), found)
        except TooLargeError as error:
            typer.echo(f"\n{error}")
    ways = advise(experiment, place)
    if not ways:
        typer.echo("\nnothing fits: use more chips, a smaller batch or training.micro_batches")
        return
    typer.echo("\nwhat fits, the least costly first:")
    for changed, way in ways:
        typer.echo(f"  {way.needs.total / GIB:7.2f} GiB a device: {as_typed(experiment, changed)}")


def show(plan: Plan) -> None:
    """Prints a plan."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.training.plan import whole_sizes

    place, needs = plan.topology, plan.needs
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    slices = f"{place.slices} × " if place.slices > 1 else ""
    typer.echo(f"{slices}{place.name}: {place.chips} chips, mesh {mesh}; {plan.rows} rows a device")
    if not plan.whole_axes:
        pairs = ", ".join(f"{fsdp} × {tensor}" for fsdp, tensor in whole_sizes(place))
        typer.echo(
            "this mesh splits dimensions of the slice, so collectives along them have a part of the "
            f"links; none are split by fsdp × tensor of {pairs}"
        )
    table = Table("on one device", box=None)
    table.add_column("GiB", justify="right")
    for name, size in (*dataclasses.asdict(needs).items(), ("total", needs.total)):
        table.add_row(name, f"{size / GIB:.2f}")
    table.add_row("memory", f"{plan.capacity / GIB:.0f}")
    Console().print(table)
    verdict = "fits" if plan.fits else "does not fit"
    typer.echo(
        f"{verdict}; {plan.flops / 1e12:,.1f} TFLOP a step: {1e3 * plan.seconds:,.1f} ms at "
        f"{place.chip.name}'s peak ({place.chip.source})"
    )


def show_compiled(compiled: Compiled, plan: Plan) -> None:
    """Prints what the compiler says."""
    costs = compiled.costs
    typer.echo(
        f"\ncompiled in {compiled.seconds:.0f} s; one device needs {compiled.peak / GIB:.2f} of its "
        f"{plan.capacity / GIB:.0f} GiB, {compiled.arguments / GIB:.2f} of them for state and batch\n"
        f"a step: {costs.flops / 1e12:.2f} TFLOP and {costs.bytes / 1e9:.1f} GB a device, "
        f"{1e3 * compiled.roofline:.1f} ms if the busier of the two never waited"
    )
    for kind, size in costs.collectives.items():
        typer.echo(f"  {kind:<20} {size / 1e6:12,.1f} MB")


def as_typed(experiment: Experiment, changed: Experiment) -> str:
    """The options that change a recipe, or that none are needed."""
    return " ".join(f"--set {x}" for x in settings(experiment, changed)) or "the recipe as it is"


def settings(experiment: Experiment, changed: Experiment) -> list[str]:
    """What ``--set`` is to be given for the mesh and the remats that a recipe does not have."""
    from synthesizer_jax.models import stacks
    from synthesizer_jax.registry import fields_of

    parts: list[tuple[str, Any, Any]] = [("mesh", experiment.mesh, changed.mesh)]
    new = stacks(changed.model)
    parts += [
        (f"model.{name}", stack, new[name]) for name, stack in stacks(experiment.model).items()
    ]
    return [
        f"{path}.{field}={str(value).lower()}"
        for path, before, after in parts
        for field, value in fields_of(after).items()
        if value != fields_of(before)[field]
    ]
