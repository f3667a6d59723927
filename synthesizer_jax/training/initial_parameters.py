"""Starts a new run from the parameters of another run's checkpoint."""

from __future__ import annotations

import collections
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.placement import layout_over, with_shardings
from synthesizer_jax.models import stack_layers, stacks_of, unroll_variables
from synthesizer_jax.models.token_model import TokenModel, looped_paths
from synthesizer_jax.models.trainable import Trainable
from synthesizer_jax.primitives.parameters import (
    Variables,
    abstract_variables,
    check_patterns_decide,
)
from synthesizer_jax.runs.saved import find_checkpoint, has_adapters
from synthesizer_jax.sharding import shardings
from synthesizer_jax.training.experiment import Experiment, InitRule, find_rule
from synthesizer_jax.training.random_init import init_arrays
from synthesizer_jax.training.run_directory import find_base, load_experiment

Shapes = Mapping[str, tuple[int, ...]]

RESTORED, RESIZED, INITIALIZED = "restored", "resized", "initialized"


class Origin(NamedTuple):
    """Where the initial value of a parameter comes from.

    Attributes:
      status: ``restored``, ``resized`` or ``initialized``.
      source: the path of the array in the checkpoint. It is empty if a rule draws new values.
      rule: the rule that applies to the parameter.
      problem: why the checkpoint's array cannot be used, as the end of a sentence that begins with
        the path of the parameter. It is `None` if the array fits, or if a rule asks for new values.
    """

    status: str
    source: str
    rule: InitRule
    problem: str | None = None

    @property
    def has_new_values(self) -> bool:
        """Whether at least some of the values are drawn at random."""
        return self.status == INITIALIZED or (self.status == RESIZED and self.rule.draws)


def check_init_from(experiment: Experiment) -> None:
    """Raises a `ValueError` if an experiment has settings for `init_from`, but no `init_from`."""
    if experiment.init_from is None and experiment != experiment.starting_from(None):
        raise ValueError(
            "init_rules, init_optimizer and training.adapters need a checkpoint from which the run "
            "starts, but init_from is not set. Set it, or remove these settings."
        )


def read_base(
    experiment: Experiment, mesh: Mesh | None, *, report: Callable[[str], object] = lambda _: None
) -> Variables:
    """Returns the variables of the base that an experiment's adapters modify.

    The result has all variables of the model as they are at the start of the run. It includes the
    initial values of the parameters that the run trains whole. It is empty if the experiment has no
    adapters.

    Args:
      experiment: the experiment.
      mesh: the mesh over which the variables are sharded. None places them on one device.
      report: called with a table of what was restored, resized, initialized, and not used.

    Raises:
      ValueError: the base does not exist, or is not the one with which the adapters were trained.
    """
    if experiment.training.adapters is None:
        return {}
    check_init_from(experiment)
    _, base = read_initial_variables(find_base(experiment), mesh, report=report)
    return base


def restore_run(
    directory: pathlib.Path, *, step: int | None = None, layout: Variables | None = None
) -> tuple[int, Variables]:
    """Returns the step and variables of a run's checkpoint, with adapters merged into their base.

    It calls `restore_variables`. If the run has adapters, it also reads their base and merges them.
    No random values are drawn: parameters that the run initialized are read from its own
    checkpoint.

    Args:
      directory: the directory of the run.
      step: the step to restore. None means the newest.
      layout: shapes and shardings of the model's variables. None places them on one device.

    Returns:
      The step, and ``{"params": ..., "constants": ...}``.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: the checkpoint or the base cannot be read; see `read_base` and `restore_trained`.
    """
    if not has_adapters(directory):
        return restore_variables(directory / "checkpoints", step=step, layout=layout)
    experiment, mesh = load_experiment(directory), None
    if layout is not None:
        mesh = jax.tree.leaves(layout)[0].sharding.mesh
    trainable = experiment.trainable
    step, trained = restore_trained(directory, trainable, step=step, mesh=mesh)
    _, base = read_initial_variables(find_base(experiment), mesh, report=lambda _: None, draw=False)
    return step, trainable.merge_arrays(trained, base)


def restore_trained(
    directory: pathlib.Path,
    trainable: Trainable[Any],
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[int, Variables]:
    """Returns the step and variables of a run's checkpoint as they are saved.

    These are the variables that the run has trained. Adapters are not merged into their base.

    Args:
      directory: the directory of the run.
      trainable: what the run trains; see `Experiment.trainable`.
      step: the step to restore. None means the newest.
      mesh: the mesh over which the variables are sharded. None places them on one device.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: the checkpoint cannot be read, or an earlier version trained the adapters and did
        not save the parameters that it initialized.
    """
    shapes, axes = trainable.abstract()
    layout = None
    if mesh is not None:
        layout = with_shardings(shapes, axes, mesh)
    step, variables = restore_variables(directory / "checkpoints", step=step, layout=layout)

    saved = traverse_util.flatten_dict(variables)
    missing = sorted(traverse_util.flatten_dict(shapes).keys() - saved.keys())
    if missing:
        raise ValueError(
            f"The checkpoint in {directory} does not contain {'/'.join(missing[0][1:])}, for which "
            "the run's init_rules drew new values. The adapters were trained by an earlier "
            "version, which did not save these values. Train the adapters again."
        )
    return step, variables


def read_initial_variables(
    experiment: Experiment, mesh: Mesh | None, *, report: Callable[[str], object], draw: bool = True
) -> tuple[int, Variables]:
    """Returns the step of the checkpoint in `init_from`, and an experiment's initial variables.

    Values that are not restored are drawn with the experiment's seed.

    Args:
      experiment: the experiment of the new run.
      mesh: the mesh over which the variables are sharded. None places them on one device.
      report: called with a table of what was restored, resized, initialized, and not used.
      draw: whether to draw values at random. If it is false, the result does not contain the
        variables for which `Experiment.draws` is true.

    Raises:
      ValueError: `init_from` is not a run, or an array does not fit.
    """
    source = storage_path(str(experiment.init_from))
    directory, step = find_checkpoint(source)
    saved = load_experiment(directory)
    layout = None
    if mesh is not None:
        layout = layout_over(saved.model, saved.example, mesh)
    step, variables = restore_run(directory, step=step, layout=layout)

    # Shapes are compared layer by layer, so the two models may differ in whether layers are
    # scanned.
    old = _looped_shapes(saved.model, variables)
    shapes, _ = abstract_variables(experiment.model, *experiment.example)
    new = _looped_shapes(experiment.model, shapes)
    origins = find_origins(old, new, experiment.init_rules)
    report(f"init_from {source}\n{_format_table(origins, old, new)}")
    _check_problems(source, origins)
    if saved.model == experiment.model and all(o.status == RESTORED for o in origins.values()):
        return step, variables
    return step, _assemble(experiment, saved.model, variables, origins, mesh=mesh, draw=draw)


def _check_problems(source: pathlib.Path, origins: Mapping[str, Origin]) -> None:
    """Raises a `ValueError` if arrays of a checkpoint do not fit the model of the new run."""
    problems = [
        f"{name.split('/', 1)[1]} {origin.problem}"
        for name, origin in origins.items()
        if origin.problem is not None
    ]
    if problems:
        first = "; ".join(problems[:3])
        more = "; …" if len(problems) > 3 else "."
        raise ValueError(
            f"{source} is a checkpoint of another model. Arrays that do not fit: {len(problems)}. "
            f"They are: {first}{more} Add init_rules for them, such as InitRule('.*/table', "
            "'resize', fill='distance') for other lengths, or InitRule('PATH', 'fresh')."
        )


def _looped_arrays(model: TokenModel, variables: Variables) -> dict[str, jax.Array]:
    """Returns the arrays of a model by ``COLLECTION/PATH``, in the form of looped layers."""
    return traverse_util.flatten_dict(unroll_variables(model, variables), sep="/")


def _looped_shapes(model: TokenModel, variables: Variables) -> Shapes:
    """Returns the shapes of a model's arrays by ``COLLECTION/PATH``, like `_looped_arrays`."""
    arrays = jax.eval_shape(lambda tree: _looped_arrays(model, tree), variables)
    return {name: x.shape for name, x in arrays.items()}


def _assemble(
    experiment: Experiment,
    old_model: TokenModel,
    variables: Variables,
    origins: Mapping[str, Origin],
    *,
    mesh: Mesh | None,
    draw: bool,
) -> Variables:
    """Returns an experiment's initial variables, made from those of a checkpoint.

    Args:
      experiment: the experiment of the new run.
      old_model: the model of the checkpoint.
      variables: the variables of the checkpoint.
      origins: where each parameter comes from; see `find_origins`.
      mesh: see `read_initial_variables`.
      draw: see `read_initial_variables`.
    """
    model = experiment.model
    shapes, axes = abstract_variables(model, *experiment.example)
    drawn = {name for name, origin in origins.items() if origin.has_new_values}
    if not draw:
        drawn = set()
        origins = {
            name: origin
            for name, origin in origins.items()
            if not experiment.draws(name.split("/", 1)[1])
        }
    abstract = jax.eval_shape(lambda tree: _looped_arrays(model, tree), shapes)

    def initialize(of_checkpoint: Variables, random: Variables) -> Variables:
        """Returns the new variables. `random` has the arrays with random values."""
        old = _looped_arrays(old_model, of_checkpoint)
        fresh = _looped_arrays(model, random)
        new = {}
        for name, origin in origins.items():
            if origin.status == INITIALIZED:
                new[name] = fresh[name]
            else:
                like = fresh.get(name, abstract[name])
                new[name] = resize(old[origin.source], like, origin.rule.fill)

        initialized: Variables = traverse_util.unflatten_dict(new, sep="/")
        # Scanned stacks hold the arrays of all layers in one array [layers, ...].
        for name, stack in stacks_of(model).items():
            for collection in initialized.values():
                if stack.scan and name in collection:
                    collection[name] = stack_layers(stack, collection[name])
        return initialized

    sharding = None if mesh is None else shardings(axes, shapes, mesh)
    fresh = fresh_variables(experiment, sharding, only=lambda path: path in drawn)
    result = jax.eval_shape(initialize, variables, fresh)
    place = None if sharding is None else _entries_of(sharding, result)
    # `fresh` is donated, so its buffers can be reused for the result instead of a third copy.
    assembled: Variables = jax.jit(initialize, out_shardings=place, donate_argnums=1)(
        variables, fresh
    )
    return assembled


def fresh_variables(
    experiment: Experiment, sharding: PyTree, *, only: Callable[[str], bool] = lambda _: True
) -> Variables:
    """Returns random initial variables, drawn with the experiment's seed.

    Args:
      experiment: has the model and the seed.
      sharding: the shardings of the model's variables. None places them on one device.
      only: a function that takes ``COLLECTION/PATH``, in the form of looped layers, and returns
        whether to draw the variable. A variable that is stacked over scanned layers is drawn if
        `only` is true for any of its layers.
    """
    example = [jnp.zeros(t.shape, t.dtype) for t in experiment.example]
    shapes, _ = abstract_variables(experiment.model, *experiment.example)
    wanted = traverse_util.unflatten_dict(
        {
            (collection, *keys): True
            for collection, *keys in traverse_util.flatten_dict(shapes)
            if any(
                only(f"{collection}/{path}") for path in looped_paths(experiment.model, tuple(keys))
            )
        }
    )

    def make(key: jax.Array) -> Any:
        """Returns the wanted variables of a newly initialized model."""
        variables: Any = experiment.model.init(key, *example)
        return _entries_of(variables, wanted)

    if not wanted:
        return {}
    place = None if sharding is None else _entries_of(sharding, wanted)
    return init_arrays(make, jax.random.key(experiment.training.seed), shardings=place)


def _entries_of(tree: PyTree, like: PyTree) -> PyTree:
    """Returns the entries of the nested dictionary `tree` that `like` also has."""
    flat = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict(
        {keys: flat[keys] for keys in traverse_util.flatten_dict(like)}
    )


def find_origins(old: Shapes, new: Shapes, rules: Sequence[InitRule] = ()) -> dict[str, Origin]:
    """Returns where each parameter of a new run comes from.

    The first rule whose pattern matches a path applies. If no pattern matches, the array with the
    same path and shape is restored. A parameter for which this is impossible has an
    `Origin.problem`.

    Args:
      old: shapes of the checkpoint's arrays by ``COLLECTION/PATH``, in the form of looped layers.
      new: shapes of the new run's arrays by ``COLLECTION/PATH``, in the form of looped layers.
      rules: the rules, in order of precedence.

    Raises:
      ValueError: a rule applies to no parameter, or its `source` refers to a group that its pattern
        does not have.
    """
    paths = {name.split("/", 1)[1] for name in new}
    check_patterns_decide("init_rules", [rule.pattern for rule in rules], paths)
    return {name: _origin(name, shape, old, rules) for name, shape in new.items()}


def _origin(name: str, shape: tuple[int, ...], old: Shapes, rules: Sequence[InitRule]) -> Origin:
    """Returns the origin of one parameter; see `find_origins`."""
    collection, path = name.split("/", 1)
    rule, match = find_rule(rules, path)
    if rule.action == "fresh":
        return Origin(INITIALIZED, "", rule)
    try:
        source = f"{collection}/{path if rule.source is None else match.expand(rule.source)}"
    except (re.error, IndexError) as error:
        raise ValueError(
            f"init_rules: The source {rule.source!r} does not fit the pattern {rule.pattern!r}: "
            f"{error}. Refer only to groups that the pattern has."
        ) from None
    if source not in old:
        problem = "is not in the checkpoint"
        if source != name:
            problem = f"needs {source.split('/', 1)[1]}, which {problem}"
        return Origin(INITIALIZED, source, rule, problem)
    if old[source] == shape:
        return Origin(RESTORED, source, rule)
    # `distance` needs an axis of queries and an axis of keys.
    lowest_rank = 2 if rule.fill == "distance" else 1
    if rule.action == "resize" and len(old[source]) == len(shape) >= lowest_rank:
        return Origin(RESIZED, source, rule)
    problem = f"has the shape {old[source]} in the checkpoint and {shape} in the new model"
    return Origin(INITIALIZED, source, rule, problem)


def resize(old: jax.Array, fresh: jax.Array | jax.ShapeDtypeStruct, fill: str) -> jax.Array:
    """Returns an array cropped or extended to the shape of another.

    Args:
      old: the array.
      fresh: an array of the new shape. Its shape and dtype suffice unless `fill` is ``fresh``.
      fill: how new entries are filled. ``edge`` repeats the last entry along the axis. ``distance``
        is for tables whose last two axes are queries and keys: it takes the nearest entry with the
        same distance between query and key. ``fresh`` takes the entries of `fresh`.
    """
    if old.shape == fresh.shape:
        return old.astype(fresh.dtype)
    kept = tuple(slice(min(n, m)) for n, m in zip(old.shape, fresh.shape, strict=True))
    if fill == "fresh":
        assert isinstance(fresh, jax.Array)
        return fresh.at[kept].set(old[kept].astype(fresh.dtype))
    # Index arrays of the new shape. Clipping the indices repeats the last entry of every axis.
    indices = [
        jnp.clip(jnp.arange(m), 0, n - 1) for n, m in zip(old.shape, fresh.shape, strict=True)
    ]
    grid = list(jnp.meshgrid(*indices, indexing="ij"))
    if fill == "distance":
        q, k = (jnp.arange(m) for m in fresh.shape[-2:])
        last_q, last_k = old.shape[-2] - 1, old.shape[-1] - 1
        # Queries and keys are moved back by the same number, which keeps their distance.
        shift = jnp.maximum(jnp.maximum(q[:, None] - last_q, k[None, :] - last_k), 0)
        grid[-2] = jnp.broadcast_to(jnp.clip(q[:, None] - shift, 0, last_q), fresh.shape)
        grid[-1] = jnp.broadcast_to(jnp.clip(k[None, :] - shift, 0, last_k), fresh.shape)
    return old[tuple(grid)].astype(fresh.dtype)


def _format_table(origins: Mapping[str, Origin], old: Shapes, new: Shapes) -> str:
    """Returns a table of the origins of all arrays. Equal layers of a stack share a line."""
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
