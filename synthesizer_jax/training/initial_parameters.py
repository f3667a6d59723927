"""Reads the initial parameters of new runs, and the trained parameters of existing runs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.manager import Convert, convert_variables, restore_variables
from synthesizer_jax.checkpoints.placement import layout_over, with_shardings
from synthesizer_jax.models import stack_layers, stacks_of, unroll_variables
from synthesizer_jax.models.token_model import TokenModel, looped_paths
from synthesizer_jax.models.trainable import Trainable
from synthesizer_jax.primitives.computed import Int8Array, quantize
from synthesizer_jax.primitives.parameters import Variables, abstract_variables
from synthesizer_jax.runs.saved import find_checkpoint, has_adapters
from synthesizer_jax.sharding import shardings
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.origins import (
    INITIALIZED,
    RESTORED,
    Origin,
    Shapes,
    check_problems,
    find_origins,
    format_table,
    resize,
)
from synthesizer_jax.training.random_init import init_arrays
from synthesizer_jax.training.run_directory import find_base, load_experiment


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

    The result has all variables of the model as they are at the start of the run. The initial
    values of the parameters that the run trains whole are included. If the experiment has no
    adapters, the result is empty.

    Args:
      experiment: the experiment.
      mesh: the mesh over which the variables are sharded. If `mesh` is None, one device holds all
        variables.
      report: a function that is called with a table of restored, resized, initialized and unused
        arrays.

    Raises:
      ValueError: the base does not exist, or the adapters were trained with another base.
    """
    if experiment.training.adapters is None:
        return {}
    check_init_from(experiment)
    experiment = find_base(experiment)
    convert = _conversion_of_base(experiment.trainable, mesh)
    _, base = read_initial_variables(experiment, mesh, report=report, convert=convert)
    return base


def _conversion_of_base(trainable: Trainable[Any], mesh: Mesh | None) -> Convert | None:
    """Returns a function that rounds arrays of the base to 8 bits, or None for a float32 base.

    Args:
      trainable: the part of the model that the run trains.
      mesh: the mesh over which the variables are sharded, or None.
    """
    shapes, axes = map(traverse_util.flatten_dict, trainable.abstract_base())
    rounded = {keys: x for keys, x in shapes.items() if isinstance(x, Int8Array)}
    if not rounded:
        return None

    def convert(keys: tuple[str, ...], array: jax.Array) -> PyTree:
        """Returns the array in the form in which the base holds it."""
        if keys not in rounded:
            return array
        sharding = None
        if mesh is not None:
            sharding = shardings(axes[keys], rounded[keys], mesh)
        # The axes of the values are the axes of the array.
        return jax.jit(quantize, static_argnums=1, out_shardings=sharding)(array, axes[keys].values)

    return convert


def restore_run(
    directory: pathlib.Path,
    *,
    step: int | None = None,
    layout: Variables | None = None,
    convert: Convert | None = None,
) -> tuple[int, Variables]:
    """Returns the step and variables of a run's checkpoint, with adapters merged into their base.

    If the run has no adapters, this function only calls `restore_variables`. If the run has
    adapters, the function also reads the base of the adapters and merges both. No random values are
    drawn, because parameters that the run initialized are read from the run's own checkpoint.

    Args:
      directory: the directory of the run.
      step: the step to restore. None means the newest step.
      layout: shapes and shardings of the model's variables. If `layout` is None, one device holds
        all variables.
      convert: a function that converts the variables; see `restore_variables`.

    Returns:
      The step, and ``{"params": ..., "constants": ...}``.

    Raises:
      FileNotFoundError: the run has no checkpoint of this step.
      ValueError: the checkpoint or the base cannot be read; see `read_base` and `restore_trained`.
    """
    if not has_adapters(directory):
        return restore_variables(
            directory / "checkpoints", step=step, layout=layout, convert=convert
        )
    experiment, mesh = load_experiment(directory), None
    if layout is not None:
        mesh = jax.tree.leaves(layout)[0].sharding.mesh
    trainable = experiment.trainable
    step, trained = restore_trained(directory, trainable, step=step, mesh=mesh)
    _, base = read_initial_variables(
        find_base(experiment),
        mesh,
        report=lambda _: None,
        draw=False,
        convert=_conversion_of_base(trainable, mesh),
    )
    return step, convert_variables(trainable.merge_arrays(trained, base), convert)


def restore_trained(
    directory: pathlib.Path,
    trainable: Trainable[Any],
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[int, Variables]:
    """Returns the step and variables of a run's checkpoint as they are saved.

    The result has only the variables that the run trains and saves. Adapters are not merged into
    their base.

    Args:
      directory: the directory of the run.
      trainable: the part of the model that the run trains; see `Experiment.trainable`.
      step: the step to restore. None means the newest step.
      mesh: the mesh over which the variables are sharded. If `mesh` is None, one device holds all
        variables.

    Raises:
      FileNotFoundError: the run has no checkpoint of this step.
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
    experiment: Experiment,
    mesh: Mesh | None,
    *,
    report: Callable[[str], object],
    draw: bool = True,
    convert: Convert | None = None,
) -> tuple[int, Variables]:
    """Returns the step of the checkpoint in `init_from`, and an experiment's initial variables.

    Variables that are not restored are drawn at random with the experiment's seed.

    Args:
      experiment: the experiment of the new run.
      mesh: the mesh over which the variables are sharded. If `mesh` is None, one device holds all
        variables.
      report: a function that is called with a table of restored, resized, initialized and unused
        arrays.
      draw: whether to draw values at random. If `draw` is false, the result does not contain the
        variables for which `Experiment.draws` is true.
      convert: a function that converts the initial variables; see `restore_variables`. If the
        checkpoint contains all of them, each array is converted before the next array is read.

    Raises:
      ValueError: `init_from` is not a run, or an array does not fit.
    """
    source = storage_path(str(experiment.init_from))
    directory, step = find_checkpoint(source)
    saved = load_experiment(directory)
    layout = None
    if mesh is not None:
        layout = layout_over(saved.model, saved.example, mesh)
    # If the models are equal and there are no rules, all variables are restored unchanged.
    is_restored = saved.model == experiment.model and not experiment.init_rules
    step, variables = restore_run(
        directory, step=step, layout=layout, convert=convert if is_restored else None
    )

    # Shapes are compared layer by layer, so the two models may differ in whether layers are
    # scanned.
    old = _looped_shapes(saved.model, variables)
    shapes, _ = abstract_variables(experiment.model, *experiment.example)
    new = _looped_shapes(experiment.model, shapes)
    origins = find_origins(old, new, experiment.init_rules)
    report(f"init_from {source}\n{format_table(origins, old, new)}")
    check_problems(source, origins)
    if is_restored:
        return step, variables
    if saved.model != experiment.model or any(o.status != RESTORED for o in origins.values()):
        variables = _assemble(experiment, saved.model, variables, origins, mesh=mesh, draw=draw)
    return step, convert_variables(variables, convert)


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
    """Returns an experiment's initial variables, made from the variables of a checkpoint.

    Args:
      experiment: the experiment of the new run.
      old_model: the model of the checkpoint.
      variables: the variables of the checkpoint.
      origins: the origin of each parameter; see `find_origins`.
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
        """Returns the new variables. `random` has the arrays that are drawn at random."""
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

    model_shardings = None if mesh is None else shardings(axes, shapes, mesh)
    fresh = fresh_variables(experiment, model_shardings, only=lambda path: path in drawn)
    result_shardings = None
    if model_shardings is not None:
        # If `draw` is false, the result may lack some variables of the model.
        result = jax.eval_shape(initialize, variables, fresh)
        result_shardings = _entries_of(model_shardings, result)
    # `fresh` is donated, so XLA can reuse its buffers for the result and does not need a third
    # copy.
    assemble = jax.jit(initialize, out_shardings=result_shardings, donate_argnums=1)
    assembled: Variables = assemble(variables, fresh)
    return assembled


def fresh_variables(
    experiment: Experiment,
    model_shardings: PyTree,
    *,
    only: Callable[[str], bool] = lambda _: True,
) -> Variables:
    """Returns random initial variables, drawn with the experiment's seed.

    Args:
      experiment: the experiment, which has the model and the seed.
      model_shardings: the shardings of the model's variables. If `model_shardings` is None, one
        device holds all variables.
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
    wanted_shardings = None
    if model_shardings is not None:
        wanted_shardings = _entries_of(model_shardings, wanted)
    return init_arrays(make, jax.random.key(experiment.training.seed), shardings=wanted_shardings)


def _entries_of(tree: PyTree, like: PyTree) -> PyTree:
    """Returns the entries of the nested dictionary `tree` that `like` also has."""
    flat = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict(
        {keys: flat[keys] for keys in traverse_util.flatten_dict(like)}
    )
