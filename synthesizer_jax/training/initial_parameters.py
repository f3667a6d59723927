"""The parameters of another run's checkpoint, from which a fresh run starts."""

from __future__ import annotations

import dataclasses
import pathlib

import jax

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.models import stack_layers, stacks_of, unroll_variables
from synthesizer_jax.sharding import replicate_to_devices
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.run_directory import EXPERIMENT_FILE, load_experiment
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.typing import PyTree


def initialize_from_checkpoint(
    state: TrainState, *, experiment: Experiment, source: pathlib.Path
) -> TrainState:
    """Returns a fresh state with the parameters of a checkpoint; the optimizer starts anew.

    Args:
      state: the fresh state.
      experiment: the run that starts. Its model is the checkpoint's, with scanned or looped layers.
      source: ``RUN`` or ``RUN/checkpoints/STEP``.

    Raises:
      ValueError: there is no such run, or its model is another.
    """
    directory, step = find_checkpoint(source)
    saved = load_experiment(directory)
    _, variables = restore_variables(directory / "checkpoints", step=step)
    variables = unroll_variables(saved.model, variables)
    for name, stack in stacks_of(experiment.model).items():
        if stack.scan:
            for collection in variables.values():
                if name in collection:
                    collection[name] = stack_layers(stack, collection[name])
    _check_same_shapes(variables["params"], state.params, source)
    params = jax.tree.map(
        lambda new, old: replicate_to_devices(new, old.sharding), variables["params"], state.params
    )
    constants = variables.get("constants", state.constants)
    return dataclasses.replace(state, params=params, constants=constants)


def find_checkpoint(source: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Returns the run's directory and the step (None: the newest) of ``RUN`` or ``RUN/checkpoints/STEP``.

    Raises:
      ValueError: there is no run of this package.
    """
    of_step = source.parent.name == "checkpoints" and source.name.isdecimal()
    directory = source.parent.parent if of_step else source
    if not (directory / EXPERIMENT_FILE).is_file():
        raise ValueError(
            f"init_from is {str(source)!r}, but {directory} holds no {EXPERIMENT_FILE}; give the directory "
            "of a training run of this package, or RUN/checkpoints/STEP"
        )
    return directory, int(source.name) if of_step else None


def _check_same_shapes(saved: PyTree, expected: PyTree, source: pathlib.Path) -> None:
    """Raises a `ValueError` that names the first parameter that is missing or has another shape."""
    saved_shapes, expected_shapes = _shapes_by_name(saved), _shapes_by_name(expected)
    for name in sorted(saved_shapes.keys() | expected_shapes.keys()):
        if saved_shapes.get(name) != expected_shapes.get(name):
            raise ValueError(
                f"{source} is a checkpoint of another model: {name} is {saved_shapes.get(name, 'absent')} "
                f"there and {expected_shapes.get(name, 'absent')} here; start from the same model"
            )


def _shapes_by_name(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
        for path, x in jax.tree.leaves_with_path(tree)
    }
