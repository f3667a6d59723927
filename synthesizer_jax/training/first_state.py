"""Makes the first state of a new run, from another run's checkpoint or from random parameters."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.manager import read_newest
from synthesizer_jax.checkpoints.placement import read_arrays
from synthesizer_jax.runs.saved import find_checkpoint
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import check_init_from, read_initial_variables
from synthesizer_jax.training.step import TrainState
from synthesizer_jax.training.trainer import Trainer


def initializer_of(
    experiment: Experiment, *, report: Callable[[str], object]
) -> Callable[[Trainer], TrainState]:
    """Returns the function that makes a trainer's first state in a new run.

    The function is `initialize_from_checkpoint` if the run starts from a checkpoint. Otherwise, the
    function is `Trainer.init`. A run with adapters also uses `Trainer.init`, because the trainer
    itself reads the base of the adapters.

    Args:
      experiment: the experiment of the new run.
      report: a function that is called with a table of restored, resized, initialized and unused
        arrays.

    Raises:
      ValueError: `init_from` is not a run, or the experiment has settings for starting from a
        checkpoint but no `init_from`.
    """
    check_init_from(experiment)
    if experiment.init_from is None:
        return Trainer.init
    # A missing checkpoint is reported here, before the data is read.
    find_checkpoint(storage_path(experiment.init_from))
    if experiment.training.adapters is None:
        return functools.partial(initialize_from_checkpoint, experiment=experiment, report=report)
    if experiment.init_optimizer:
        raise ValueError(
            "init_optimizer continues with the optimizer of all parameters, but training.adapters "
            "trains other parameters. Remove one of these settings."
        )
    return Trainer.init


def initialize_from_checkpoint(
    trainer: Trainer, *, experiment: Experiment, report: Callable[[str], object] = print
) -> TrainState:
    """Returns a trainer's first state, with parameters from the checkpoint in `init_from`.

    The optimizer starts with a new state unless the experiment has `init_optimizer`.

    Args:
      trainer: the trainer, which makes the rest of the state and draws the parameters that are not
        restored.
      experiment: the experiment of the new run, with its `init_rules`.
      report: a function that is called with a table of restored, resized, initialized and unused
        arrays.

    Raises:
      ValueError: `init_from` is not a run, an array does not fit, or `init_optimizer` is set and
        the checkpoint has the state of another optimizer.
    """
    step, variables = read_initial_variables(experiment, trainer.mesh, report=report)
    state = trainer.init(variables)
    if not experiment.init_optimizer:
        return state
    directory, _ = find_checkpoint(storage_path(str(experiment.init_from)))

    def read(checkpoint: pathlib.Path) -> list[PyTree]:
        """Reads the state of the optimizer."""
        return [read_arrays(checkpoint, {"opt_state": state.opt_state}, ("opt_state",))]

    _, entries, _ = read_newest(directory / "checkpoints", read, step=step)
    return dataclasses.replace(state, opt_state=entries["opt_state"])
