"""Defines the commands `recipes`, `models` and `plan`, which list recipes and estimate costs."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.resources
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.base.typing import Count
from synthesizer_jax.cli.options import Imports, Overrides, Recipe, print_table
from synthesizer_jax.cli.recipes import (
    complete_recipe,
    list_recipes,
    load_recipe,
    load_with_code,
    override,
    settings,
)

if TYPE_CHECKING:
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.training.plan import MemoryPlan


def recipes(
    name: Annotated[str | None, typer.Argument(autocompletion=complete_recipe)] = None,
    *,
    overrides: Overrides = None,
    imports: Imports = None,
) -> None:
    """List the recipes of this package, or show all fields of one recipe.

    Each line shows one field of the recipe: its path and value in the form
    path=value that --set expects, its type, and its default.

    Example: synthesizer-jax recipes quickstart --set model=t5_1_1_tiny

    Args:
      name: the recipe to show, NAME[:function] or FILE.py[:function]. By default, all recipes are
        listed.
    """
    if name is None:
        if overrides or imports:
            raise ValueError("--set and --import need a recipe. Give its name.")
        rows = [[row["recipe"], row["returns"], row["summary"]] for row in list_recipes()]
        print_table(("recipe", "returns", "summary"), rows, left=3)
        typer.echo("\n'synthesizer-jax recipes NAME' shows the fields of a recipe.")
        return
    from synthesizer_jax.distillation.distill import Distillation
    from synthesizer_jax.training.experiment import Experiment

    kinds = (Experiment, Distillation)
    recipe, _ = load_with_code(name, overrides or (), kinds=kinds, imports=imports or ())
    # Show the fields of the model last, because a model has many fields.
    fields = sorted(settings(recipe), key=lambda field: field.path.startswith("model"))
    typer.echo(f"{name} returns this {type(recipe).__name__}. Change it with --set path=value.")
    assignments = [f"{field.path}={field.value}" for field in fields]
    assignment_width = max(map(len, assignments))
    type_width = max(len(field.type) for field in fields)
    for assignment, field in zip(assignments, fields, strict=True):
        default = "" if field.default is None else f"default {field.default}"
        cells = (assignment.ljust(assignment_width), field.type.ljust(type_width), default)
        typer.echo("  ".join(cells).rstrip())


def known_costs() -> dict[str, dict[str, Any]]:
    """Returns the costs of all named models, which are read from a file to avoid importing JAX.

    Returns:
      A dictionary from the name of a model to its costs. The costs are a dictionary from the name
      of a column to the cost.
    """
    file = importlib.resources.files("synthesizer_jax") / "costs" / "zoo.json"
    return json.loads(file.read_text(encoding="utf-8"))


def complete_model(incomplete: str) -> list[str]:
    """Returns the names of models that begin with a string, for completion in a shell."""
    return [name for name in known_costs() if name.startswith(incomplete)]


def models(
    pattern: Annotated[str, typer.Argument(autocompletion=complete_model)] = "*",
    *,
    as_json: Annotated[bool, "--json"] = False,
) -> None:
    """List the named models and their costs.

    FLOPs are the floating-point operations of a forward pass, divided by the
    number of tokens. The column flops_lengths shows the number of tokens in
    inputs and in targets for which FLOPs are computed. Most models have 512
    input tokens and 114 target tokens.

    Args:
      pattern: list only names that match this pattern, such as 'mesh_*'.
      as_json: print JSON instead of a table.
    """
    rows = {name: row for name, row in known_costs().items() if fnmatch.fnmatch(name, pattern)}
    if not rows:
        raise ValueError(
            f"There is no model {pattern!r}. 'synthesizer-jax models' lists all models."
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    columns = list(next(iter(rows.values())))
    formatted = [
        [name, *(_format_cost(row[column]) for column in columns)] for name, row in rows.items()
    ]
    print_table(("name", *columns), formatted)


def _format_cost(cost: int | list[int]) -> str:
    """Returns a cost as text. The numbers of a list are separated by a plus sign."""
    return "+".join(map(str, cost)) if isinstance(cost, list) else f"{cost:,}"


GIB = 2**30


def plan(
    recipe: Recipe,
    *,
    topology: str,
    slices: Count = 1,
    compiled: Annotated[bool, "--compile"] = False,
    overrides: Overrides = None,
    imports: Imports = None,
) -> None:
    """Estimate the memory and chip-hours of a recipe on given chips, and list settings that fit.

    No TPU or GPU is needed, and no array is allocated. Instead of a recipe, you
    can give the directory of a run, or a folder of transformers. Only the file
    config.json of such a folder is read.

    Example: synthesizer-jax plan papers.cotraining:glue_super_glue:rv --topology v5e:4x4

    Args:
      topology: the topology of a TPU slice, such as v5p:4x4x8 or v6e-16, or the kind and number of
        GPUs, such as h100:8.
      slices: the number of slices.
      compiled: also compile the training step for these chips, which takes minutes.
    """
    import jax

    from synthesizer_jax.costs import chips
    from synthesizer_jax.runs.progress import show_phases
    from synthesizer_jax.training.plan import UTILIZATION, advise, make_plan

    chosen = chips.parse_topology(topology, slices)
    jax.config.update("jax_platforms", "cpu")  # a plugin would look for chips
    # Disable the cache, because a program for chips that this machine lacks cannot be read from the
    # cache.
    jax.config.update("jax_enable_compilation_cache", False)
    if (pathlib.Path(recipe) / "config.json").is_file():
        from synthesizer_jax.pretrained.convert import experiment_of

        experiment = override(experiment_of(pathlib.Path(recipe)), *(overrides or ()))
    else:
        experiment = load_recipe(recipe, overrides or (), imports=imports or ())
    with show_phases() as phase:
        advance = phase("tracing a training step", 1)
        memory_plan = make_plan(experiment, chosen)
        advance(1)
    _print_plan(memory_plan)
    steps = experiment.training.steps
    typer.echo(
        f"{steps:,} steps take {memory_plan.chip_hours(steps):,.1f} chip-hours at "
        f"{UTILIZATION:.0%} of this peak, which is an assumption and more than small models reach. "
        "Compilation and evaluations are not included."
    )
    if compiled:
        _print_compiled(experiment, memory_plan)
    with show_phases() as phase:
        options = advise(experiment, chosen, phase=phase)
    if not options:
        typer.echo("\nNothing fits. Use more chips, a smaller batch or training.micro_batches.")
        return
    typer.echo("\nSettings that fit, the cheapest first:")
    for changed, option in options:
        assignments = " ".join(f"--set {x}" for x in changed_settings(experiment, changed))
        typer.echo(
            f"  {option.needs.total / GIB:7.2f} GiB per device: "
            f"{assignments or 'the recipe as it is'}"
        )


def _print_plan(plan: MemoryPlan) -> None:
    """Prints the mesh, the memory in GiB that each device needs, and the FLOPs of a step."""
    topology, needs = plan.topology, plan.needs
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    slices = f"{topology.slices} × " if topology.slices > 1 else ""
    typer.echo(
        f"{slices}{topology.name}: {topology.chips} chips, mesh {mesh}; {plan.rows} rows per device"
    )
    sizes = {**dataclasses.asdict(needs), "total": needs.total, "memory": plan.capacity}
    rows = [(name, f"{size / GIB:.2f}") for name, size in sizes.items()]
    print_table(("on one device", "GiB"), rows)
    typer.echo("This fits." if plan.fits else "This does not fit.")
    typer.echo(
        f"A step needs {plan.flops / 1e12:,.1f} TFLOP, which take {1e3 * plan.seconds:,.1f} ms at "
        f"the peak of {topology.chip.name} ({topology.chip.source})."
    )


def _print_compiled(experiment: Experiment, plan: MemoryPlan) -> None:
    """Compiles the training step, and prints the memory that the compiler reports in GiB."""
    from synthesizer_jax.runs.progress import show_phases
    from synthesizer_jax.training.plan import TooLargeError, compile_step

    try:
        with show_phases() as phase:
            advance = phase(f"compiling a training step for {plan.topology.name}", 1)
            memory = compile_step(experiment, plan.topology).memory_analysis()
            advance(1)
    except TooLargeError as error:
        typer.echo(f"\n{error}")
        return
    assert memory is not None
    typer.echo(
        f"\nCompiled, one device needs {memory.peak_memory_in_bytes / GIB:.2f} of its "
        f"{plan.capacity / GIB:.0f} GiB. State and batch take "
        f"{memory.argument_size_in_bytes / GIB:.2f} GiB of this."
    )


def changed_settings(experiment: Experiment, changed: Experiment) -> list[str]:
    """Returns the assignments for ``--set`` that turn one experiment into a different experiment.

    The function compares only fields with plain values, which are values without fields of their
    own.

    Args:
      experiment: the experiment to change.
      changed: the experiment with the new values. Both experiments must have the same fields.
    """
    before = {row.path: row.value for row in settings(experiment)}
    return [
        f"{row.path}={row.value}"
        for row in settings(changed)
        if row.leaf and row.value != before[row.path]
    ]
