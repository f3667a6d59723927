"""The parameters of another run's checkpoint, from which a fresh run starts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.manager import read_newest, restore_variables
from synthesizer_jax.checkpoints.placement import layout_over, read_arrays, with_shardings
from synthesizer_jax.models import stack_layers, stacks_of, unroll_variables
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.optimizers.rules import looped_paths
from synthesizer_jax.primitives.parameters import Variables, abstract_variables, check_patterns_decide
from synthesizer_jax.runs.saved import find_checkpoint, has_adapters
from synthesizer_jax.sharding import shardings
from synthesizer_jax.training.adapters import adapted_variables, trained_variables
from synthesizer_jax.training.experiment import Experiment, InitRule, find_rule
from synthesizer_jax.training.random_init import init_arrays
from synthesizer_jax.training.run_directory import find_base, load_experiment
from synthesizer_jax.training.step import TrainState

if TYPE_CHECKING:
    from synthesizer_jax.training.trainer import Trainer

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

    @property
    def has_new_values(self) -> bool:
        """Whether some of its values are drawn."""
        return self.status == INITIALIZED or (self.status == RESIZED and self.rule.draws)


def initializer_of(
    experiment: Experiment, *, report: Callable[[str], object]
) -> Callable[[Trainer], TrainState] | None:
    """Returns `initialize_from_checkpoint` of an experiment; None: it does not start from a checkpoint.

    Raises:
      ValueError: there is no such run, or the experiment says how to start but not from what.
    """
    _check_init_from(experiment)
    if experiment.init_from is None:
        return None
    find_checkpoint(storage_path(experiment.init_from))  # fails before the data is read
    if experiment.training.adapters is not None:
        if experiment.init_optimizer:
            raise ValueError(
                "init_optimizer goes on with an optimizer of all parameters, and training.adapters trains "
                "others; leave one of them out"
            )
        return None  # the trainer reads it
    return functools.partial(initialize_from_checkpoint, experiment=experiment, report=report)


def _check_init_from(experiment: Experiment) -> None:
    """Raises a `ValueError` if an experiment says how to start from a checkpoint, but names none."""
    if experiment.init_from is None and experiment != experiment.starting_from(None):
        raise ValueError(
            "init_rules, init_optimizer and training.adapters say what a run makes of a checkpoint; "
            "set init_from, or leave them out"
        )


def initialize_from_checkpoint(
    trainer: Trainer, *, experiment: Experiment, report: Callable[[str], object] = print
) -> TrainState:
    """Returns a trainer's first state, with the parameters of the checkpoint `Experiment.init_from`.

    The optimizer starts anew unless the experiment has `init_optimizer`.

    Args:
      trainer: makes everything else of the state, and parameters that are not restored.
      experiment: the run that starts, with its `init_rules`.
      report: is called with a table of what was restored, resized, initialized, and not used.

    Raises:
      ValueError: there is no such run, an array does not fit, or it has another optimizer.
    """
    step, variables = _initial_variables(experiment, trainer.mesh, report=report)
    state = trainer.init(variables)
    if not experiment.init_optimizer:
        return state
    directory, _ = find_checkpoint(storage_path(str(experiment.init_from)))
    read = functools.partial(read_arrays, entries={"opt_state": state.opt_state}, names=("opt_state",))
    _, entries, _ = read_newest(directory / "checkpoints", read, step=step)
    return dataclasses.replace(state, opt_state=entries["opt_state"])


def read_base(
    experiment: Experiment, mesh: Mesh | None, *, report: Callable[[str], object] = lambda _: None
) -> Variables:
    """Returns the variables to which an experiment's adapters belong, over a mesh or on one device.

    They are those of the whole model at the start of the run, with the parameters that it trains whole.

    Args:
      experiment: the run with adapters.
      mesh: the mesh; None: one device.
      report: is called with a table of what was restored, resized, initialized, and not used.

    Raises:
      ValueError: they are not there, or are others than those with which the adapters were trained.
    """
    _check_init_from(experiment)
    return _initial_variables(find_base(experiment), mesh, report=report)[1]


def restore_run(
    directory: pathlib.Path, *, step: int | None = None, layout: Variables | None = None
) -> tuple[int, Variables]:
    """Returns `restore_variables` of a run, whose adapters, if it has any, are added to their base.

    Nothing is drawn: parameters that the run made afresh are those that it has saved.

    Args:
      directory: the run's.
      step: the step to restore; None: the newest.
      layout: that of the model's variables; None: they are on one device.

    Raises:
      ValueError: see `read_base`; or the run, of an earlier version, did not save all of them.
    """
    restore = functools.partial(restore_variables, directory / "checkpoints", step=step)
    if not has_adapters(directory):
        return restore(layout=layout)
    experiment, mesh = load_experiment(directory), None
    lora = experiment.training.adapters
    assert lora is not None
    shapes, axes = trained_variables(experiment)
    if layout is not None:
        mesh = jax.tree.leaves(layout)[0].sharding.mesh
    step, adapters = restore(layout=None if mesh is None else with_shardings(shapes, axes, mesh))
    saved = traverse_util.flatten_dict(adapters)
    if missing := sorted(traverse_util.flatten_dict(shapes).keys() - saved.keys()):
        raise ValueError(
            f"{directory} does not hold {'/'.join(missing[0][1:])}, which its init_rules make afresh; its "
            "adapters were trained by an earlier version, which did not save it, so train them again"
        )
    base = _initial_variables(find_base(experiment), mesh, report=lambda _: None, draw=False)[1]
    return step, jax.jit(adapted_variables, static_argnums=2)(adapters, base, lora)


def _initial_variables(
    experiment: Experiment, mesh: Mesh | None, *, report: Callable[[str], object], draw: bool = True
) -> tuple[int, Variables]:
    """Returns the step of the checkpoint `Experiment.init_from`, and an experiment's variables from it.

    Values that the rules do not take from there are made by the experiment's seed. If they are not to be
    drawn, variables that have such values are left out (`Experiment.draws`).
    """
    source = storage_path(str(experiment.init_from))
    directory, step = find_checkpoint(source)
    saved = load_experiment(directory)
    layout = None if mesh is None else layout_over(saved.model, saved.example, mesh)
    step, variables = restore_run(directory, step=step, layout=layout)
    shapes, axes = abstract_variables(experiment.model, *experiment.example)

    def flat(model: TokenModel, variables: Variables) -> dict[str, jax.Array]:
        """Arrays by ``COLLECTION/PATH``, with looped layers."""
        return traverse_util.flatten_dict(unroll_variables(model, variables), sep="/")

    old, new = (
        {name: x.shape for name, x in jax.eval_shape(lambda t, m=m: flat(m, t), tree).items()}
        for m, tree in ((saved.model, variables), (experiment.model, shapes))
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

    if saved.model == experiment.model and all(o.status == RESTORED for o in origins.values()):
        return step, variables
    drawn = {name for name, origin in origins.items() if origin.has_new_values}
    if not draw:
        drawn = set()
        origins = {name: o for name, o in origins.items() if not experiment.draws(name.split("/", 1)[1])}
    abstract = jax.eval_shape(lambda tree: flat(experiment.model, tree), shapes)

    def initialize(theirs: Variables, fresh: Variables) -> Variables:
        """Returns the variables; `fresh` has those that are to be drawn."""
        arrays, new = flat(saved.model, theirs), flat(experiment.model, fresh)
        ours = {
            name: new[name]
            if origin.status == INITIALIZED
            else resize(arrays[origin.source], new.get(name, abstract[name]), origin.rule.fill)
            for name, origin in origins.items()
        }
        initialized: Variables = traverse_util.unflatten_dict(ours, sep="/")
        for name, stack in stacks_of(experiment.model).items():
            for collection in initialized.values():
                if stack.scan and name in collection:
                    collection[name] = stack_layers(stack, collection[name])
        return initialized

    sharding = None if mesh is None else shardings(axes, shapes, mesh)
    fresh = fresh_variables(experiment, sharding, only=lambda path: path in drawn)
    result = jax.eval_shape(initialize, variables, fresh)
    place = None if sharding is None else _entries_of(sharding, result)
    # The fresh arrays become part of the result, so that there is no third copy of them.
    return step, jax.jit(initialize, out_shardings=place, donate_argnums=1)(variables, fresh)


def fresh_variables(
    experiment: Experiment, sharding: PyTree, *, only: Callable[[str], bool] = lambda _: True
) -> Variables:
    """Returns the variables that an experiment's seed makes.

    Args:
      experiment: the model, and the seed.
      sharding: the shardings of the model's variables; None: one device.
      only: tells from ``COLLECTION/PATH``, with looped layers, whether to make a variable. One that is
        stacked in a scanned stack is made if any of its layers is to be made.
    """
    example = [jnp.zeros(t.shape, t.dtype) for t in experiment.example]
    shapes, _ = abstract_variables(experiment.model, *experiment.example)
    wanted = traverse_util.unflatten_dict(
        {
            (collection, *keys): True
            for collection, *keys in traverse_util.flatten_dict(shapes)
            if any(only(f"{collection}/{path}") for path in looped_paths(experiment.model, tuple(keys)))
        }
    )

    def make(key: jax.Array) -> Any:
        variables: Any = experiment.model.init(key, *example)
        return _entries_of(variables, wanted)

    if not wanted:
        return {}
    place = None if sharding is None else _entries_of(sharding, wanted)
    return init_arrays(make, jax.random.key(experiment.training.seed), place)


def _entries_of(tree: PyTree, like: PyTree) -> PyTree:
    """Returns the entries of nested dictionaries that others have too."""
    flat = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict({keys: flat[keys] for keys in traverse_util.flatten_dict(like)})


def find_origins(old: Shapes, new: Shapes, rules: Sequence[InitRule] = ()) -> dict[str, Origin]:
    """Returns the origin of every parameter of a fresh run.

    Args:
      old: the shapes of the checkpoint's arrays, ``COLLECTION/PATH``, with looped layers.
      new: the same of the fresh run.
      rules: the first whose pattern matches the path decides; without one the array of the same path
        and shape is restored.

    Raises:
      ValueError: a rule decides nothing, or its `source` does not fit its pattern.
    """
    paths = {name.split("/", 1)[1] for name in new}
    check_patterns_decide("init_rules", [rule.pattern for rule in rules], paths)
    return {name: _origin(name, shape, old, rules) for name, shape in new.items()}


def _origin(name: str, shape: tuple[int, ...], old: Shapes, rules: Sequence[InitRule]) -> Origin:
    collection, path = name.split("/", 1)
    rule, match = find_rule(rules, path)
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


def resize(old: jax.Array, fresh: jax.Array | jax.ShapeDtypeStruct, fill: str) -> jax.Array:
    """Crops or extends an array to the shape of another.

    Args:
      old: the array.
      fresh: an array of the new shape; if the fill is not ``fresh``, its shape and dtype are enough.
      fill: what fills new entries: ``edge``, the last entry along the axis; ``distance``, in a table whose
        last two axes are queries and keys, the nearest entry of the same distance; ``fresh``, the entry
        of the other array.
    """
    if old.shape == fresh.shape:
        return old.astype(fresh.dtype)
    kept = tuple(slice(min(n, m)) for n, m in zip(old.shape, fresh.shape, strict=True))
    if fill == "fresh":
        assert isinstance(fresh, jax.Array)
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
