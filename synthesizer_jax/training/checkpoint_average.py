"""The mean of a run's newest checkpoints, as a run of its own."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from synthesizer_jax.checkpoints.manager import finished_steps, restore_variables
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed
from synthesizer_jax.files import new_directory
from synthesizer_jax.runs import code
from synthesizer_jax.training.run_directory import load_experiment, save_run, with_vocabulary_path
from synthesizer_jax.typing import PyTree


def average_checkpoints(
    source: pathlib.Path, directory: pathlib.Path, *, last: int | None = None
) -> list[int]:
    """Writes a run's directory with the mean of the parameters of a run's newest checkpoints.

    Those that `Training.keep_best` kept count like those of `Training.keep_latest`.

    The mean is float32, and that of what `restore_variables` returns: of a run with exponential moving
    averages it is the mean of these. Checkpoints are read one at a time and verified; the mean and one of
    them are in memory. The new run has the number of the newest step and no state of the optimizer. The
    directory appears when it is complete.

    Args:
      source: the run's directory.
      directory: the new directory.
      last: number of checkpoints, at least 2; None: all.

    Returns:
      The steps of the checkpoints.

    Raises:
      FileExistsError: the directory exists and is not empty.
      FileNotFoundError: there is no run in the source.
      ValueError: the run has fewer checkpoints, or one cannot be read.
    """
    experiment = with_vocabulary_path(load_experiment(source), source)
    steps = _steps_to_average(source, last)
    with new_directory(directory) as staging:
        variables = _mean_variables(source / "checkpoints", steps)
        save_run(experiment.starting_from(None), staging)
        code.record_code(staging, code.recorded_code(source))
        state = {
            "step": np.asarray(steps[-1], np.int32),
            "params": variables["params"],
            "constants": variables.get("constants", {}),
            "opt_state": {},
        }
        save_streamed(staging / "checkpoints", steps[-1], jax.tree.map(Unread.of, state))
    return steps


def _steps_to_average(source: pathlib.Path, last: int | None) -> list[int]:
    """Returns the last steps that a run has kept; raises a `ValueError` if these are too few."""
    there = finished_steps(source / "checkpoints")
    held = (
        f"{len(there)} checkpoint{'s' * (len(there) != 1)} ({', '.join(map(str, there)) or 'none'})"
    )
    if last is None and len(there) < 2:
        raise ValueError(
            f"{source} holds {held}, and a mean needs two; train with training.keep_latest=2 or more"
        )
    if last is not None and len(there) < last:
        raise ValueError(
            f"{source} holds {held}, and --last is {last}; give a smaller number, or train with "
            f"training.keep_latest={last}"
        )
    return there if last is None else there[-last:]


def _mean_variables(checkpoints: pathlib.Path, steps: list[int]) -> PyTree:
    """Returns the variables of the last step with the mean of the parameters of all, as NumPy arrays."""
    step, *others = steps
    _, variables = restore_variables(checkpoints, step=step)
    mean = jax.tree.map(np.float32, jax.device_get(variables["params"]))
    for count, step in enumerate(others, 2):
        _, variables = restore_variables(checkpoints, step=step)
        # A running mean: equal checkpoints have a mean equal to them.
        mean = jax.tree.map(
            lambda m, p, count=count: m + (np.float32(p) - m) / count,
            mean,
            jax.device_get(variables["params"]),
        )
    return {**jax.device_get(variables), "params": mean}
