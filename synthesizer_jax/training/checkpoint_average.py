"""The mean of a run's newest checkpoints, as a run of its own."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from synthesizer_jax.base.files import new_directory
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed
from synthesizer_jax.runs import code
from synthesizer_jax.training.initial_parameters import restore_run
from synthesizer_jax.training.run_directory import load_experiment, save_run, with_vocabulary_path


def average_checkpoints(
    source: pathlib.Path, directory: pathlib.Path, *, last: int | None = None
) -> list[int]:
    """Writes a run's directory with the mean of the parameters of a run's newest checkpoints.

    Those that `Training.keep_best` kept count like those of `Training.keep_latest`.

    The mean is float32, and that of what `restore_run` returns: of a run with exponential moving
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
      OSError: the disk is full.
      ValueError: the run has fewer checkpoints, or one cannot be read.
    """
    experiment = with_vocabulary_path(load_experiment(source), source)
    saved, needed = finished_steps(source / "checkpoints"), last or 2
    if len(saved) < needed:
        raise ValueError(
            f"{source} holds {len(saved)} of the {needed} checkpoints that a mean needs "
            f"({str(saved)[1:-1]}); give a smaller --last, or train with training.keep_latest={needed}"
        )
    steps = saved if last is None else saved[-last:]
    with new_directory(directory) as staging:
        mean: PyTree = None
        for count, step in enumerate(steps, 1):
            variables = jax.device_get(restore_run(source, step=step)[1])
            params = jax.tree.map(np.float32, variables["params"])
            # A running mean: equal checkpoints have a mean equal to them.
            update = lambda m, p, n=count: m + (p - m) / n
            mean = params if mean is None else jax.tree.map(update, mean, params)
        save_run(experiment.starting_from(None), staging)
        code.record_code(staging, code.recorded_code(source))
        state = {
            "step": np.int32(steps[-1]),
            "params": mean,
            "constants": variables.get("constants", {}),
            "opt_state": {},
        }
        # No thread still writes when an error has removed the directory.
        save_streamed(staging / "checkpoints", steps[-1], jax.tree.map(Unread.of, state))
    return steps
