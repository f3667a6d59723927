"""Restores the checkpoint that a distillation learns from.

A resumed distillation must learn from the checkpoint with which it began. The student's run
therefore records the teacher's checkpoint.
"""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

from synthesizer_jax.base.files import absolute, describing, write_atomic
from synthesizer_jax.checkpoints.contents import checksum_of
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.runs.saved import find_checkpoint
from synthesizer_jax.training.initial_parameters import restore_run

TEACHER_FILE = "teacher.json"
"""The file in the student's run that records the teacher."""


class Teacher(NamedTuple):
    """A checkpoint of the teacher's run.

    Attributes:
      run: the directory of the run.
      step: the step of the checkpoint.
      checksum: the checksum of the checkpoint's arrays; see `checksum_of`.
    """

    run: str
    step: int
    checksum: int

    def save(self, directory: pathlib.Path) -> None:
        """Writes ``teacher.json`` into the directory of the student's run."""
        write_atomic(directory / TEACHER_FILE, json.dumps(self._asdict(), indent=1) + "\n")


def read_teacher(
    source: pathlib.Path, directory: pathlib.Path, *, finished: bool
) -> tuple[Teacher, Variables | None]:
    """Restores the teacher of a new or resumed distillation.

    Args:
      source: the teacher, ``RUN`` or ``RUN/checkpoints/STEP``.
      directory: the student's run. If the student has a checkpoint, the distillation continues with
        the recorded step of the teacher. Earlier versions of this package recorded no step. A
        distillation of such a version continues with the teacher's newest step.
      finished: whether the student has finished its last training step. A finished student does not
        need the teacher.

    Returns:
      The teacher and its variables. The variables are `None` if the distillation is finished and
      the teacher's checkpoint is gone.

    Raises:
      ValueError: if the checkpoint with which the distillation began is gone, or if `source` names
        a different checkpoint.
    """
    run, step = find_checkpoint(source)
    recorded = None
    if finished_steps(directory / "checkpoints"):
        recorded = _recorded(directory)

    if recorded is not None:
        began = f"The distillation in {directory} began with step {recorded.step} of its teacher"
        if step not in (None, recorded.step):
            raise ValueError(
                f"{began}, but --teacher names step {step}. Use --teacher {run} to continue, or "
                "use a new --workdir."
            )
        checkpoint = run / "checkpoints" / str(recorded.step)
        is_there = recorded.step in finished_steps(run / "checkpoints")
        if not is_there or checksum_of(checkpoint) != recorded.checksum:
            if finished:
                return recorded, None
            problem = "contains other parameters now" if is_there else "no longer exists"
            raise ValueError(
                f"{began}, but {checkpoint} {problem}. Put the old checkpoint there, or start "
                "again in another --workdir."
            )
        step = recorded.step

    step, variables = restore_run(run, step=step)
    checksum = checksum_of(run / "checkpoints" / str(step))
    return Teacher(str(absolute(run)), step, checksum), variables


def _recorded(directory: pathlib.Path) -> Teacher | None:
    """Returns the teacher that a run directory records, or `None` if no teacher is recorded."""
    path = directory / TEACHER_FILE
    if not path.is_file():
        return None
    with describing(path):
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Teacher(str(fields["run"]), int(fields["step"]), int(fields["checksum"]))
