"""`synthesizer-jax plan`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import Imports, Overrides, Recipe
from synthesizer_jax.cli.recipes import check_name, load_recipe

if TYPE_CHECKING:
    from synthesizer_jax.costs.chips import Topology
    from synthesizer_jax.training.aot import Compiled
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.training.plan import MemoryPlan

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
        from synthesizer_jax.training.aot import TooLargeError, compiled_plan

        try:
            _print_compiled(compiled_plan(experiment, parsed_topology), memory_plan)
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

    from synthesizer_jax.training.plan import unsplit_sizes

    topology, needs = plan.topology, plan.needs
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    slices = f"{topology.slices} × " if topology.slices > 1 else ""
    typer.echo(
        f"{slices}{topology.name}: {topology.chips} chips, mesh {mesh}; {plan.rows} rows per device"
    )
    if not plan.whole_axes:
        pairs = ", ".join(f"{fsdp} × {tensor}" for fsdp, tensor in unsplit_sizes(topology))
        typer.echo(
            "this mesh splits dimensions of the slice, so collectives use only some of the links; "
            f"fsdp × tensor of {pairs} would not split them"
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


def _print_compiled(compiled: Compiled, plan: MemoryPlan) -> None:
    """Prints the memory and the costs of the compiled step."""
    costs = compiled.costs
    typer.echo(
        f"\ncompiled in {compiled.seconds:.0f} s; one device needs {compiled.peak / GIB:.2f} of its "
        f"{plan.capacity / GIB:.0f} GiB, {compiled.arguments / GIB:.2f} of them for state and batch\n"
        f"per step and device: {costs.flops / 1e12:.2f} TFLOP, {costs.bytes / 1e9:.1f} GB, "
        f"{1e3 * compiled.roofline:.1f} ms by the roofline model"
    )
    for kind, size in costs.collectives.items():
        typer.echo(f"  {kind:<20} {size / 1e6:12,.1f} MB")


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
