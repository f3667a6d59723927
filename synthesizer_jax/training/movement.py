"""How far a run has moved its parameters from where it started."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pathlib

import jax
import jax.numpy as jnp
from flax import traverse_util

from synthesizer_jax.files import describing, write_atomic
from synthesizer_jax.optimizers.rules import collapse_layers, looped_paths
from synthesizer_jax.parameters import Variables
from synthesizer_jax.runtime import processes
from synthesizer_jax.training.initial_parameters import open_initial_parameters
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.trainer import Trainer
from synthesizer_jax.typing import PyTree

MOVEMENT_FILE = "movement.json"
INITIALIZATION = "initialization"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Group:
    """The parameters of one path in all layers.

    Attributes:
      path: the path, with ``layers_*`` for all layers.
      parameters: number of parameters.
      frozen: number of these that rules freeze.
      distance: Euclidean distance from the initial parameters.
      initial_norm: Euclidean norm of the initial parameters.
    """

    path: str
    parameters: int
    frozen: int
    distance: float
    initial_norm: float

    @property
    def change(self) -> float:
        """The distance relative to the initial norm; infinite if that is 0 and the parameters moved."""
        if self.initial_norm == 0:
            return math.inf if self.distance else 0.0
        return self.distance / self.initial_norm


@dataclasses.dataclass(frozen=True)
class Movement:
    """How far the parameters of a run have moved.

    Attributes:
      step: number of finished steps.
      since: ``initialization``, or the checkpoint from which the run started.
      groups: the parameters.
    """

    step: int
    since: str
    groups: tuple[Group, ...]


def measure_movement(trainer: Trainer, state: TrainState) -> Movement:
    """Computes the initial parameters again, and their distances from those of a state.

    The initial parameters are not kept during a run: they follow from the seed, or from the checkpoint that
    they came from. One program makes and compares them; besides the checkpoint, XLA needs memory for few
    arrays at a time, which the gradients of a step needed before.

    Args:
      trainer: made the steps.
      state: the final state; its parameters themselves, not their averages, are compared.

    Raises:
      FileNotFoundError: the checkpoint is gone.
      ValueError: the checkpoint cannot be read, or does not fit.
    """
    experiment, since = trainer.experiment, INITIALIZATION
    saved: Variables = {}
    initialize = None
    if experiment.init_from is not None:
        since, saved, initialize = open_initial_parameters(
            experiment, state.variables, report=lambda _: None
        )

    def squares(key: jax.Array, saved: Variables, params: PyTree) -> PyTree:
        fresh: PyTree = trainer.model.init(
            key, *(jnp.zeros(t.shape, t.dtype) for t in trainer.tokens)
        )
        start = (fresh if initialize is None else initialize(saved, fresh))["params"]
        start = jax.lax.with_sharding_constraint(start, trainer.layout.shardings.params)
        return jax.tree.map(
            lambda p, p0: (jnp.sum(jnp.square(p - p0)), jnp.sum(jnp.square(p0))), params, start
        )

    key = jax.random.key(experiment.training.seed)
    found = traverse_util.flatten_dict(jax.device_get(jax.jit(squares)(key, saved, state.params)))
    return Movement(int(state.step), since, _groups(trainer, found))


def _groups(
    trainer: Trainer, squares: dict[tuple[str, ...], tuple[float, float]]
) -> tuple[Group, ...]:
    """Adds up the arrays of all layers."""
    settings = traverse_util.flatten_dict(trainer.optimizer.settings)
    shapes = traverse_util.flatten_dict(trainer.layout.abstract.params)
    sums: dict[str, list[float]] = {}
    for keys, (distance, norm) in squares.items():
        path = collapse_layers(looped_paths(trainer.model, keys)[0])
        size, frozen = shapes[keys].size, float(settings[keys].frozen.mean())
        values = (size, round(frozen * size), float(distance), float(norm))
        sums[path] = [a + b for a, b in zip(sums.get(path, [0] * 4), values, strict=True)]
    return tuple(
        Group(path, int(size), int(frozen), math.sqrt(distance), math.sqrt(norm))
        for path, (size, frozen, distance, norm) in sorted(sums.items())
    )


def record_movement(trainer: Trainer, state: TrainState, directory: pathlib.Path) -> None:
    """Writes the movement of a finished run to ``movement.json``; all processes call this.

    A run that is saved does not fail because what it started from is gone: a warning says so.

    Args:
      trainer: made the steps.
      state: the final state.
      directory: the run's.
    """
    try:
        movement = measure_movement(trainer, state)
    except (ValueError, OSError) as error:
        _log.warning("%s is not written: %s", MOVEMENT_FILE, error)
        return
    if processes.is_process_zero():
        text = json.dumps(dataclasses.asdict(movement), indent=1)
        write_atomic(directory / MOVEMENT_FILE, text + "\n")


def read_movement(directory: pathlib.Path) -> Movement | None:
    """Reads the movement of a run; None: it is not there, as the run has not finished.

    Raises:
      ValueError: the file is damaged.
    """
    path = directory / MOVEMENT_FILE
    if not path.is_file():
        return None
    with describing(path, "start the run again to write it anew"):
        data = json.loads(path.read_bytes())
        return Movement(**{**data, "groups": tuple(Group(**group) for group in data["groups"])})
