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


def average_checkpoints(source: pathlib.Path, directory: pathlib.Path, *, last: int) -> list[int]:
    """Writes a run's directory with the mean of the parameters of a run's newest checkpoints.

    The mean is float32, and that of what `restore_variables` returns: of a run with exponential moving
    averages it is the mean of these. Checkpoints are read one at a time and verified; the mean and one of
    them are in memory. The new run has the number of the newest step and no state of the optimizer. The
    directory appears when it is complete.

    Args:
      source: the run's directory.
      directory: the new directory.
      last: number of checkpoints.

    Returns:
      The steps of the checkpoints.

    Raises:
      FileExistsError: the directory exists and is not empty.
      FileNotFoundError: there is no run in the source.
      ValueError: the run has fewer checkpoints, or one cannot be read.
    """
    experiment = with_vocabulary_path(load_experiment(source), source)
    there = finished_steps(source / "checkpoints")
    if len(there) < last:
        found = ", ".join(map(str, there)) or "none"
        raise ValueError(
            f"{source} holds {len(there)} checkpoints ({found}) and --last is {last}; give a smaller "
            f"number, or train with training.keep_latest={last}"
        )
    steps = there[-last:]
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
