"""Saving, restoring and verification of a run's checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import orbax.checkpoint as ocp

from synthesizer_jax.base.files import absolute, in_bucket, is_storage_error
from synthesizer_jax.base.messages import one_line_error
from synthesizer_jax.base.registry import fields_of
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints import checksums
from synthesizer_jax.checkpoints.contents import (
    CONTENTS,
    CONTENTS_FILE,
    BatchStream,
    Contents,
    position_files,
    read_contents,
)
from synthesizer_jax.checkpoints.placement import AVERAGE, OtherModelError, read_arrays, read_variables
from synthesizer_jax.hosts import processes
from synthesizer_jax.primitives.parameters import Variables

COMMITTED = "commit_success.txt"
"""Orbax's file that marks a finished checkpoint in a bucket."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Retention:
    """A policy of Orbax that keeps the `latest` and the `best` checkpoints, by scores of evaluated steps.

    Higher scores are better; the run adds to them.
    """

    latest: int
    best: int
    scores: dict[int, float]

    def steps_to_keep(self, steps: Iterable[int]) -> set[int]:
        """Returns the steps to keep; of equal scores the newer step is better."""
        rising = sorted(steps)
        measured = [s for s in rising if math.isfinite(self.scores.get(s, math.nan))]
        best = sorted(measured, key=lambda step: (self.scores[step], step), reverse=True)
        return {*rising[max(len(rising) - self.latest, 0) :], *best[: self.best]}

    def should_preserve(self, checkpoints: Sequence[PyTree], *, context: object) -> list[bool]:
        """Returns whether to keep each checkpoint; called by Orbax."""
        kept = self.steps_to_keep(checkpoint.step for checkpoint in checkpoints)
        return [checkpoint.step in kept for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints in a directory, numbered by step, written asynchronously and committed atomically.

    The newest are kept, and in addition those with the best of the scores, to which `record_score` adds.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        keep_latest: int = 2,
        keep_best: int = 1,
        scores: Mapping[int, float] = {},
    ):
        self._retention = Retention(keep_latest, keep_best, dict(scores))
        self._directory = absolute(directory)
        self._begun: list[int] = []

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager; creates the directory."""
        if processes.is_process_zero():
            self._directory.mkdir(parents=True, exist_ok=True)
        processes.barrier("checkpoints")
        # With named processes Orbax synchronizes through the coordination service. Otherwise it uses
        # collectives, which would interleave with those of steps while it writes asynchronously.
        group = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())))
        return ocp.CheckpointManager(
            self._directory,
            item_names=("state", CONTENTS),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(multiprocessing_options=group),
                CONTENTS: ocp.JsonCheckpointHandler(CONTENTS_FILE, multiprocessing_options=group),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._retention,
                create=False,
                cleanup_tmp_directories=True,
                multiprocessing_options=group,
            ),
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first."""
        return finished_steps(self._directory)

    def record_score(self, step: int, score: float) -> None:
        """Records the score of a step; the next save or `prune` takes it into account."""
        self._retention.scores[step] = score

    def prune(self) -> None:
        """Deletes the finished checkpoints that need not be kept."""
        steps = processes.all_gather("prune", self.steps)[0]
        for step in sorted(set(steps) - self._retention.steps_to_keep(steps)):
            self._manager.delete(step)

    def save(self, state: PyTree, stream: BatchStream | None) -> None:
        """Starts to write a checkpoint unless the step has one; the state may be donated afterwards.

        The state is a dataclass of pytrees of arrays, with its ``step``. None: no position is saved.
        """
        step, tree = int(state.step), _state_dict(state)
        if step in self._begun or step in self._manager.all_steps():
            return
        local = checksums.checksums(tree), {} if stream is None else position_files(stream)
        arrays, positions = zip(*processes.all_gather("contents", local), strict=True)
        position = dict(file for files in positions for file in files.items())
        contents = Contents(step, checksums.combine_checksums(arrays), position)
        items = {"state": ocp.args.StandardSave(tree), CONTENTS: ocp.args.JsonSave(contents.to_json())}
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._begun.append(step)

    def take_newly_saved(self) -> list[int]:
        """Returns the steps whose checkpoints were finished since the last call."""
        if self._begun and self._manager.is_saving_in_progress():
            done, self._begun = self._begun[:-1], self._begun[-1:]
            return done
        self.wait()  # raises errors of the background thread
        done, self._begun = self._begun, []
        return done

    def restore_newest(self, abstract: PyTree, stream: BatchStream | None) -> PyTree:
        """Restores the newest checkpoint that can be read; returns None if there are no checkpoints.

        Newer checkpoints, which at least one process found damaged, are set aside as ``STEP.unreadable``
        with a warning. None is renamed unless an older one was restored.

        The abstract state has `jax.ShapeDtypeStruct` with shardings. The stream is moved to the saved
        position; None ignores it.

        Raises:
          ValueError: no checkpoint can be read, or they belong to another model or other data.
          OSError: the storage failed; the checkpoints are unchanged.
        """
        entries = _state_dict(abstract)
        names = tuple(field.name for field in dataclasses.fields(abstract))

        def read(checkpoint: pathlib.Path) -> dict[str, PyTree]:
            if stream is not None and read_contents(checkpoint) is None:
                raise ValueError(f"{checkpoint} holds no position in the data")
            tree: dict[str, PyTree] = read_arrays(checkpoint, entries, names)
            if int(tree["step"]) != int(checkpoint.name):
                raise ValueError(f"{checkpoint} holds step {int(tree['step'])}")
            return tree

        step, tree, damaged = read_newest(self._directory, read)
        if step is None:
            return None
        if stream is not None and (contents := read_contents(self._directory / str(step))):
            contents.restore_position(stream)
        if damaged:
            with processes.process_zero_first("set aside"):
                if processes.is_process_zero():
                    self._set_aside(damaged)
            if "_manager" in vars(self):
                self._manager.reload()
        return dataclasses.replace(abstract, **tree)

    def _set_aside(self, damaged: dict[int, str]) -> None:
        """Renames damaged checkpoints."""
        for step, problem in damaged.items():
            names = (f"{step}.unreadable{f'-{n}' * (n > 1)}" for n in itertools.count(1))
            aside = next(p for p in map(self._directory.joinpath, names) if not p.exists())
            message = "checkpoint %d cannot be read and is set aside as %s (%s)"
            _log.warning(message, step, aside, problem)
            (self._directory / str(step)).rename(aside)

    def wait(self) -> None:
        """Waits until all checkpoints are written."""
        if "_manager" in vars(self):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until all checkpoints are written and stops the manager's threads."""
        if "_manager" in vars(self):
            self._manager.close()


def _state_dict(state: PyTree) -> dict[str, PyTree]:
    """Returns the fields of a state; an average that it does not have is left out, as it always was."""
    fields = fields_of(state)
    return {name: tree for name, tree in fields.items() if name != AVERAGE or tree}


def restore_variables(
    directory: pathlib.Path, *, step: int | None = None, layout: Variables | None = None
) -> tuple[int, Variables]:
    """Restores only the parameters and constants of a checkpoint.

    If the run has an exponential moving average of its parameters, these are the averages.

    If the newest checkpoint cannot be read, the next older one is used, with a warning. If a running
    training deletes the checkpoint in the meantime, another one is used.

    Args:
      directory: the ``checkpoints`` directory of a run.
      step: the step to restore; None is the newest one that can be read.
      layout: ``{"params": ..., "constants": ...}`` of `jax.ShapeDtypeStruct` with shardings over the
        devices of any processes; None restores the saved arrays on one device of this process.

    Returns:
      The step, and ``{"params": ..., "constants": ...}``.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: the checkpoint cannot be read, or belongs to another model than the layout.
    """
    read = lambda checkpoint: read_variables(checkpoint, layout)
    number, variables, damaged = read_newest(directory, read, step=step, divided=layout is not None)
    saved = finished_steps(directory)
    if number is None:
        raise FileNotFoundError(
            f"{directory} has no checkpoint yet; train first"
            if step is None or not saved
            else f"{directory} has no checkpoint {step}; choose one of the steps {str(saved)[1:-1]}"
        )
    for newer in sorted(set(damaged) & set(saved)):
        message = "%s cannot be read (%s); step %d is used"
        _log.warning(message, directory / str(newer), damaged[newer], number)
    if AVERAGE in variables:
        variables["params"] = variables.pop(AVERAGE)
    return number, variables


def read_newest(
    directory: pathlib.Path,
    read: Callable[[pathlib.Path], dict[str, PyTree]],
    *,
    step: int | None = None,
    divided: bool = True,
) -> tuple[int | None, dict[str, PyTree], dict[int, str]]:
    """Reads and verifies entries of the newest checkpoint that all processes can read, or of one step.

    `divided` tells that every process reads its own shards, and not the whole.

    Returns:
      The step and its entries, None if there is none; and the problems of newer checkpoints.

    Raises:
      ValueError: none can be read.
    """
    problems: dict[int, str] = {}
    while True:
        saved = finished_steps(directory)
        steps = [s for s in saved if s not in problems and step in (None, s)]
        newest: int | None = processes.all_gather("newest", max(steps, default=None))[0]
        if newest is None:
            if not any(s in saved for s in problems):  # or all were deleted in the meantime
                return None, {}, problems
            worst = max(problems)
            others = ", ".join(str(s) for s in saved if s not in problems)
            remedy = f"choose one of the steps {others}" if others else "put a good copy in its place"
            raise ValueError(
                f"the checkpoint {directory / str(worst)} cannot be read ({problems[worst]}); {remedy}"
            )
        checkpoint, entries, parts = directory / str(newest), dict[str, PyTree](), dict[str, int]()
        contents: Contents | None = None
        problem = None
        try:
            contents = read_contents(checkpoint)
            entries = read(checkpoint)
            parts = checksums.checksums(entries)
        except Exception as error:  # damaged files raise errors of any type
            if not _is_damage(error):
                raise
            problem = one_line_error(error)
        gathered = processes.all_gather("read", (problem, parts))
        problem = next((problem for problem, _ in gathered if problem is not None), None)
        if problem is None and contents is not None:
            whole = checksums.combine_checksums([p for _, p in gathered] if divided else [parts])
            problem = contents.difference(whole)
        if problem is None:
            return newest, entries, problems
        problems[newest] = problem


def _is_damage(error: Exception) -> bool:
    """Whether an error may be due to damaged files, not to storage, memory or the configuration."""
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    others = (OtherModelError, MemoryError, jax.errors.JaxRuntimeError)
    return not (isinstance(error, others) or is_storage_error(error))


def finished_steps(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the committed checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    numbered = [p for p in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", p.name)]
    # In a bucket, which has no renaming, a finished one has a file that says so.
    is_committed = lambda p: (p / COMMITTED).exists() if in_bucket(p) else p.is_dir()
    return sorted(int(p.name) for p in numbered if is_committed(p))
