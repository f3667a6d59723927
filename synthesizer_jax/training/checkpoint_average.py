"""Averages the newest checkpoints of a run into a run directory of their own."""

from __future__ import annotations

import functools
import pathlib

import jax
import numpy as np

from synthesizer_jax.base.files import new_directory
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import replace
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed
from synthesizer_jax.runs import code
from synthesizer_jax.training.initial_parameters import restore_run
from synthesizer_jax.training.run_directory import load_experiment, save_run, with_vocabulary_path
from synthesizer_jax.training.source import read_source, write_source


def average_checkpoints(
    source: pathlib.Path,
    directory: pathlib.Path,
    *,
    last: int | None = None,
    phase: Phase = silent_phase,
) -> list[int]:
    """Writes a new run directory with the mean of the parameters of a run's newest checkpoints.

    All saved checkpoints are candidates, no matter whether `Training.keep_latest` or
    `Training.keep_best` kept them.

    The mean is computed in float32 from the variables that `restore_run` returns. If the run has an
    exponential moving average of the parameters, the result is the mean of the moving averages.

    Checkpoints are read and verified one at a time, so memory holds only the mean and one
    checkpoint. The new run has the step number of the newest checkpoint and no optimizer state. The
    new directory appears only when it is complete.

    Args:
      source: the directory of the run.
      directory: the new directory.
      last: number of checkpoints to average, at least 2. None means all checkpoints.
      phase: a function that reports progress.

    Returns:
      The steps of the averaged checkpoints.

    Raises:
      FileExistsError: the new directory exists and is not empty.
      FileNotFoundError: `source` does not contain a run.
      OSError: the disk is full.
      ValueError: the run has too few checkpoints, or a checkpoint cannot be read.
    """
    experiment = with_vocabulary_path(load_experiment(source), source)
    saved = finished_steps(source / "checkpoints")
    needed = last or 2
    if len(saved) < needed:
        found = f"only the steps {str(saved)[1:-1]}" if saved else "none"
        raise ValueError(
            f"The mean needs {needed} checkpoints, but {source} contains {found}. Use a smaller "
            f"--last, or train with training.keep_latest={needed}."
        )
    steps = saved if last is None else saved[-last:]

    with new_directory(directory) as staging:
        advance = phase(f"averaging {len(steps):,} checkpoints", len(steps))
        mean: PyTree = None
        for count, step in enumerate(steps, 1):
            _, restored = restore_run(source, step=step)
            variables = jax.device_get(restored)
            params = jax.tree.map(np.float32, variables["params"])
            if mean is None:
                mean = params
            else:
                mean = jax.tree.map(functools.partial(_update_mean, count=count), mean, params)
            advance(1)

        save_run(experiment.starting_from(None), staging)
        code.record_code(staging, code.recorded_code(source))
        write_source(replace(read_source(source), unchanged=False), staging)
        state = {
            "step": np.int32(steps[-1]),
            "params": mean,
            "constants": variables.get("constants", {}),
            "opt_state": {},
        }
        # `save_streamed` returns only when everything is written. If an error removes the staging
        # directory, no background thread is still writing into it.
        unread = jax.tree.map(Unread.of, state)
        save_streamed(staging / "checkpoints", steps[-1], unread, phase=phase)
    return steps


def _update_mean(mean: np.ndarray, x: np.ndarray, *, count: int) -> np.ndarray:
    """Returns the mean of `count` arrays, given the mean of all arrays except the last.

    With this formula, the mean of equal arrays is exactly equal to the arrays. Dividing a sum would
    cause rounding errors.
    """
    return mean + (x - mean) / count
