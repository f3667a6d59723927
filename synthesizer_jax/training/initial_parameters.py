"""The parameters of another run's checkpoint, from which a fresh run starts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.checkpoints.manager import read_newest, restore_variables
from synthesizer_jax.checkpoints.placement import layout_over, read_arrays
from synthesizer_jax.models import stack_layers, stacks_of, unroll_variables
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.runs.saved import find_checkpoint
from synthesizer_jax.training.experiment import Experiment, InitRule
from synthesizer_jax.training.run_directory import load_experiment
from synthesizer_jax.training.step import TrainState

Shapes = Mapping[str, tuple[int, ...]]

RESTORED, RESIZED, INITIALIZED = "restored", "resized", "initialized"


class Origin(NamedTuple):
    """Where a parameter of a fresh run comes from.

    Attributes:
      status: ``restored``, ``resized`` or ``initialized``.
      source: its path in the checkpoint, unless it is initialized.
      rule: the rule that decided it.
      problem: why it does not fit; None: it does, or a rule initializes it.
    """

    status: str
    source: str
    rule: InitRule
    problem: str | None = None


def initializer_of(
    experiment: Experiment, *, report: Callable[[str], object]
) -> Callable[[TrainState], TrainState] | None:
    """Returns `initialize_from_checkpoint` of an experiment; None: it does not start from a checkpoint.

    Raises:
      ValueError: there is no such run, or the experiment says how to start but not from what.
    """
    if experiment.init_from is None:
        if experiment != experiment.starting_from(None):
            raise ValueError(
                "init_rules and init_optimizer say how a run starts from a checkpoint; set init_from, or "
                "leave them out"
            )
        return None
    find_checkpoint(storage_path(experiment.init_from))  # fails before the data is read
    return functools.partial(initialize_from_checkpoint, experiment=experiment, report=report)


def initialize_from_checkpoint(
    state: TrainState, *, experiment: Experiment, report: Callable[[str], object] = print
) -> TrainState:
    """Returns a fresh state with the parameters of the checkpoint `Experiment.init_from`.

    The optimizer starts anew unless the experiment has `init_optimizer`.

    Args:
      state: the fresh state, over a mesh.
      experiment: the run that starts, with its `init_rules`.
      report: is called with a table of what was restored, resized, initialized, and not used.

    Raises:
      ValueError: there is no such run, an array does not fit, or it has another optimizer.
    """
    assert experiment.init_from is not None
    source, fresh = storage_path(experiment.init_from), state.variables
    directory, step = find_checkpoint(source)
    saved = load_experiment(directory)
    shardings = jax.tree.map(lambda x: x.sharding, fresh)
    layout = layout_over(saved.model, saved.example, jax.tree.leaves(shardings)[0].mesh)
    step, variables = restore_variables(directory / "checkpoints", step=step, layout=layout)

    def flat(model: TokenModel, variables: Variables) -> dict[str, jax.Array]:
        """Arrays by ``COLLECTION/PATH``, with looped layers."""
        return traverse_util.flatten_dict(unroll_variables(model, variables), sep="/")

    old, new = (
        {name: x.shape for name, x in jax.eval_shape(lambda t, m=m: flat(m, t), tree).items()}
        for m, tree in ((saved.model, variables), (experiment.model, fresh))
    )
    origins = find_origins(old, new, experiment.init_rules)
    report(f"init_from {source}\n{_format_table(origins, old, new)}")
    problems = [f"{k.split('/', 1)[1]}: {o.problem}" for k, o in origins.items() if o.problem]
    if problems:
        raise ValueError(
            f"{source} is a checkpoint of another model: {len(problems)} arrays do not fit "
            f"({'; '.join(problems[:3])}{'; …' if len(problems) > 3 else ''}); give init_rules for them, "
            "such as InitRule('.*/table', 'resize', fill='distance') for other lengths, or "
            "InitRule('PATH', 'fresh')"
        )

    def initialize(theirs: Variables, ours: Variables) -> Variables:
        theirs, ours = flat(saved.model, theirs), flat(experiment.model, ours)
        for name, origin in origins.items():
            if origin.status != INITIALIZED:
                ours[name] = resize(theirs[origin.source], ours[name], origin.rule.fill)
        initialized: Variables = traverse_util.unflatten_dict(ours, sep="/")
        for name, stack in stacks_of(experiment.model).items():
            for collection in initialized.values():
                if stack.scan and name in collection:
                    collection[name] = stack_layers(stack, collection[name])
        return initialized

    # The fresh arrays become the result, so that there is no third copy of the parameters.
    arrays = jax.jit(initialize, out_shardings=shardings, donate_argnums=1)(variables, fresh)
    opt_state = state.opt_state
    if experiment.init_optimizer:
        read = functools.partial(read_arrays, entries={"opt_state": opt_state}, names=("opt_state",))
        _, entries, _ = read_newest(directory / "checkpoints", read, step=step)
        opt_state = entries["opt_state"]
    return dataclasses.replace(
        state,
        params=arrays["params"],
        constants=arrays.get("constants", state.constants),
        opt_state=opt_state,
    )


def find_origins(old: Shapes, new: Shapes, rules: Sequence[InitRule] = ()) -> dict[str, Origin]:
    """Returns the origin of every parameter of a fresh run.

    Args:
      old: the shapes of the checkpoint's arrays, ``COLLECTION/PATH``, with looped layers.
      new: the same of the fresh run.
      rules: the first whose pattern matches the path decides; without one the array of the same path
        and shape is restored.
    """
    return {name: _origin(name, shape, old, rules) for name, shape in new.items()}


def _origin(name: str, shape: tuple[int, ...], old: Shapes, rules: Sequence[InitRule]) -> Origin:
    collection, path = name.split("/", 1)
    matches = ((rule, re.fullmatch(rule.pattern, path)) for rule in (*rules, InitRule(".*")))
    rule, match = next((rule, match) for rule, match in matches if match is not None)
    if rule.action == "fresh":
        return Origin(INITIALIZED, "", rule)
    try:
        source = f"{collection}/{path if rule.source is None else match.expand(rule.source)}"
    except (re.error, IndexError) as error:
        raise ValueError(
            f"init_rules: source {rule.source!r} does not fit pattern {rule.pattern!r}: {error}"
        ) from None
    if source not in old:
        where = "" if source == name else f"{source.split('/', 1)[1]} is "
        return Origin(INITIALIZED, source, rule, f"{where}absent there")
    if old[source] == shape:
        return Origin(RESTORED, source, rule)
    lowest_rank = 2 if rule.fill == "distance" else 1
    if rule.action == "resize" and len(old[source]) == len(shape) >= lowest_rank:
        return Origin(RESIZED, source, rule)
    return Origin(INITIALIZED, source, rule, f"{old[source]} there and {shape} here")


def resize(old: jax.Array, fresh: jax.Array, fill: str) -> jax.Array:
    """Crops or extends an array to the shape of another.

    Args:
      old: the array.
      fresh: an array of the new shape.
      fill: what fills new entries: ``edge``, the last entry along the axis; ``distance``, in a table whose
        last two axes are queries and keys, the nearest entry of the same distance; ``fresh``, the entry
        of the other array.
    """
    if old.shape == fresh.shape:
        return old.astype(fresh.dtype)
    kept = tuple(slice(min(n, m)) for n, m in zip(old.shape, fresh.shape, strict=True))
    if fill == "fresh":
        return fresh.at[kept].set(old[kept].astype(fresh.dtype))
    indices = [jnp.clip(jnp.arange(m), 0, n - 1) for n, m in zip(old.shape, fresh.shape, strict=True)]
    grid = list(jnp.meshgrid(*indices, indexing="ij"))
    if fill == "distance":
        q, k = (jnp.arange(m) for m in fresh.shape[-2:])
        last_q, last_k = old.shape[-2] - 1, old.shape[-1] - 1
        shift = jnp.maximum(jnp.maximum(q[:, None] - last_q, k[None, :] - last_k), 0)
        grid[-2] = jnp.broadcast_to(jnp.clip(q[:, None] - shift, 0, last_q), fresh.shape)
        grid[-1] = jnp.broadcast_to(jnp.clip(k[None, :] - shift, 0, last_k), fresh.shape)
    return old[tuple(grid)].astype(fresh.dtype)


def _format_table(origins: Mapping[str, Origin], old: Shapes, new: Shapes) -> str:
    """Returns lines that say what becomes of the arrays; layers of a stack are one line."""
    used = {origin.source for origin in origins.values() if origin.status != INITIALIZED}
    groups = {
        status: {name: new[name] for name, o in origins.items() if o.status == status}
        for status in (RESTORED, RESIZED, INITIALIZED)
    }
    groups["unused"] = {name: shape for name, shape in old.items() if name not in used}
    lines = []
    for status, shapes in groups.items():
        count = sum(map(math.prod, shapes.values()))
        lines.append(f"  {status:<11} {count:>14,} parameters in {len(shapes)} arrays")
        if status != RESTORED:
            rows = collections.Counter(
                (re.sub(r"layers_\d+", "layers_*", name.split("/", 1)[1]), shape)
                for name, shape in shapes.items()
            )
            lines += [
                f"{'':16}{name} {shape}" + (f", {layers} layers" if layers > 1 else "")
                for (name, shape), layers in rows.items()
            ]
    return "\n".join(lines)
