"""The mean of a run's newest checkpoints, as a run of its own."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from synthesizer_jax.base.files import new_directory
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.manager import finished_steps, restore_variables
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed
from synthesizer_jax.runs import code
from synthesizer_jax.training.run_directory import load_experiment, save_run, with_vocabulary_path


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
    there = finished_steps(source / "checkpoints")
    wanted = 2 if last is None else last
    if len(there) < wanted:
        raise ValueError(
            f"{source} holds {len(there)} of the {wanted} checkpoints that a mean needs "
            f"({str(there)[1:-1]}); give a smaller --last, or train with training.keep_latest={wanted}"
        )
    steps = there if last is None else there[-last:]
    with new_directory(directory) as staging:
        step, *others = steps
        variables = _read(source, step)
        mean = jax.tree.map(np.float32, variables["params"])
        for count, other in enumerate(others, 2):
            # A running mean: equal checkpoints have a mean equal to them.
            variables = _read(source, other)
            mean = jax.tree.map(
                lambda m, p, n=count: m + (np.float32(p) - m) / n, mean, variables["params"]
            )
        save_run(experiment.starting_from(None), staging)
        code.record_code(staging, code.recorded_code(source))
        state = {
            "step": np.asarray(steps[-1], np.int32),
            "params": mean,
            "constants": variables.get("constants", {}),
            "opt_state": {},
        }
        save_streamed(staging / "checkpoints", steps[-1], jax.tree.map(Unread.of, state))
    return steps


def _read(run: pathlib.Path, step: int) -> PyTree:
    """Returns the variables of a checkpoint as NumPy arrays."""
    return jax.device_get(restore_variables(run / "checkpoints", step=step)[1])
