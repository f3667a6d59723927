"""Saving, restoring and verification of a run's checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, TypeVar

import jax
import orbax.checkpoint as ocp

from synthesizer_jax.checkpoints import checksums
from synthesizer_jax.checkpoints.contents import (
    CONTENTS,
    Contents,
    DataPosition,
    FilesArgs,
    FilesHandler,
    position_files,
    read_contents,
)
from synthesizer_jax.checkpoints.placement import (
    AVERAGE,
    OtherModelError,
    check_same_model,
    read_optimizer_state,
    read_variables,
)
from synthesizer_jax.checkpoints.retention import Retention
from synthesizer_jax.files import absolute, in_bucket, is_storage_error
from synthesizer_jax.messages import one_line_error
from synthesizer_jax.parameters import Variables
from synthesizer_jax.registry import fields_of
from synthesizer_jax.runtime import processes
from synthesizer_jax.typing import PyTree


class State(Protocol):
    """A dataclass of pytrees of arrays."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]

    @property
    def step(self) -> PyTree:
        """The number of finished steps, a scalar integer array."""


S = TypeVar("S", bound=State)

COMMITTED = "commit_success.txt"
"""Orbax's file that marks a finished checkpoint in a bucket."""

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a directory, numbered by step, written asynchronously and committed atomically.

    Every checkpoint contains checksums, which are verified when it is read.

    Args:
      directory: the parent directory of the checkpoints.
      keep_latest: number of newest checkpoints to keep.
      keep_best: number of checkpoints with the best scores to keep in addition.
      scores: scores of the steps that were already evaluated; `record_score` adds to them.
      asynchronous: False finishes writing before `save` returns.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        keep_latest: int = 2,
        keep_best: int = 1,
        scores: Mapping[int, float] = {},
        asynchronous: bool = True,
    ):
        self._retention = Retention(keep_latest, keep_best, dict(scores))
        self._directory = absolute(directory)
        self._asynchronous = asynchronous
        self._begun: list[int] = []
        # With named processes Orbax synchronizes through the coordination service. Otherwise it uses
        # collectives, which would interleave with those of steps while it writes asynchronously.
        self._processes = ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count()))
        )
        self._states = ocp.StandardCheckpointHandler(multiprocessing_options=self._processes)

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager; creates the directory."""
        if processes.is_process_zero():
            self._directory.mkdir(parents=True, exist_ok=True)
        processes.barrier("checkpoints")
        return ocp.CheckpointManager(
            self._directory,
            item_names=("state", "data", CONTENTS),
            item_handlers={
                "state": self._states,
                "data": FilesHandler(),
                CONTENTS: FilesHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._retention,
                enable_async_checkpointing=self._asynchronous,
                create=False,
                cleanup_tmp_directories=True,
                multiprocessing_options=self._processes,
            ),
        )

    @property
    def _has_manager(self) -> bool:
        return "_manager" in vars(self)

    @property
    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first."""
        return finished_steps(self._directory)

    @property
    def latest(self) -> int | None:
        """Step of the newest finished checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def record_score(self, step: int, score: float) -> None:
        """Records the score of a step; the next save or `prune` takes it into account."""
        self._retention.scores[step] = score

    def prune(self) -> None:
        """Deletes the finished checkpoints that need not be kept."""
        steps = processes.all_gather("prune", self.steps)[0]
        for step in sorted(set(steps) - self._retention.steps_to_keep(steps)):
            self._manager.delete(step)

    def save(self, state: State, stream: DataPosition | None) -> None:
        """Starts to write a checkpoint unless the step has one; the state may be donated afterwards.

        Args:
          state: the state to save.
          stream: the data stream, whose position is saved; None saves no position.
        """
        step, tree = int(state.step), _state_dict(state)
        if step in self._begun or step in self._manager.all_steps():
            return
        position = {} if stream is None else position_files(stream)
        files = {name: checksums.file_checksum(data) for name, data in position.items()}
        contents = Contents(step, checksums.checksums(tree), files)
        items: dict[str, ocp.args.CheckpointArgs] = {
            "state": ocp.args.StandardSave(tree),
            CONTENTS: FilesArgs(contents.to_files(jax.process_index())),
        }
        if stream is not None:
            items["data"] = FilesArgs(position)
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

    def restore_newest(self, abstract: S, stream: DataPosition | None) -> S | None:
        """Restores the newest checkpoint that can be read; returns None if there are no checkpoints.

        Newer checkpoints, which at least one process found damaged, are set aside as ``STEP.unreadable``
        with a warning. None is renamed unless an older one was restored.

        Args:
          abstract: a state of `jax.ShapeDtypeStruct` with shardings.
          stream: the data stream to move to the saved position; None ignores the position.

        Raises:
          ValueError: no checkpoint can be read, or they belong to another model or other data.
          OSError: the storage failed; the checkpoints are unchanged.
        """
        damaged: dict[int, str] = {}
        while (step := _newest(self._directory, None, damaged)) is not None:
            directory = self._directory / str(step)
            read = functools.partial(self._read, directory, abstract, stream is not None)
            tree, problem = _read_verified(directory, read)
            if problem is None:
                if stream is not None:
                    stream.restore(directory / "data")
                self._set_aside(damaged)
                return dataclasses.replace(abstract, **tree)
            damaged[step] = problem
        if damaged:
            newest = max(damaged)
            raise ValueError(
                f"no checkpoint in {self._directory} can be read (tried "
                f"{', '.join(map(str, damaged))}; {newest}: {damaged[newest]}); put a good copy in "
                "its place, or start in a new --workdir"
            )
        return None

    def _read(
        self, directory: pathlib.Path, abstract: State, positioned: bool
    ) -> dict[str, PyTree]:
        """Reads the arrays of a checkpoint, and checks the files of its data position if there are any."""
        contents = read_contents(directory)
        if positioned and contents is not None:
            contents.check_files(directory / "data")
        wanted = _state_dict(abstract)
        check_same_model(directory, wanted)
        tree: dict[str, PyTree] = self._states.restore(
            directory / "state", args=ocp.args.StandardRestore(wanted)
        )
        if int(tree["step"]) != int(directory.name):
            raise ValueError(f"{directory} holds step {int(tree['step'])}")
        return tree

    def _set_aside(self, damaged: dict[int, str]) -> None:
        """Renames damaged checkpoints."""
        if not damaged:
            return
        with processes.process_zero_first("set aside"):
            if processes.is_process_zero():
                for step, problem in damaged.items():
                    aside = _free_name(self._directory / f"{step}.unreadable")
                    found = "checkpoint %d cannot be read and is set aside as %s (%s)"
                    _log.warning(found, step, aside, problem)
                    (self._directory / str(step)).rename(aside)
        if self._has_manager:
            self._manager.reload()

    def wait(self) -> None:
        """Waits until all checkpoints are written."""
        if self._has_manager:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until all checkpoints are written and stops the manager's threads."""
        if self._has_manager:
            self._manager.close()


def _free_name(path: pathlib.Path) -> pathlib.Path:
    """Returns the path, or the first of ``path-2``, ``path-3``, … that does not exist."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


def _state_dict(state: State) -> dict[str, PyTree]:
    """Returns the fields of a state; an average that it does not have is left out, as it always was."""
    fields = fields_of(state)
    return {name: tree for name, tree in fields.items() if name != AVERAGE or tree}


def restore_variables(
    directory: pathlib.Path,
    *,
    step: int | None = None,
    layout: Variables | None = None,
    averaged: bool = True,
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
      averaged: False restores the parameters that are trained even if there are averages.

    Returns:
      The step, and ``{"params": ..., "constants": ...}``.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: the checkpoint cannot be read, or belongs to another model than the layout.
    """
    tried: dict[int, str] = {}
    while (number := _newest(directory, step, tried)) is not None:
        read = functools.partial(read_variables, directory / str(number), layout, averaged=averaged)
        variables, problem = _read_verified(
            directory / str(number), read, divided=layout is not None
        )
        if problem is None:
            if AVERAGE in variables:
                variables["params"] = variables.pop(AVERAGE)
            for damaged in sorted(set(tried) & set(finished_steps(directory))):
                found = "%s cannot be read (%s); step %d is used"
                _log.warning(found, directory / str(damaged), tried[damaged], number)
            return number, variables
        tried[number] = problem
    there = finished_steps(directory)
    others = ", ".join(str(s) for s in there if s not in tried)
    if not any(s in there for s in tried):  # or all were deleted in the meantime
        if step is None or not there:
            raise FileNotFoundError(f"{directory} has no checkpoint yet; train first")
        raise FileNotFoundError(
            f"{directory} has no checkpoint {step}; give --step with one of {others}"
        )
    worst = max(tried)
    raise ValueError(
        f"the checkpoint {directory / str(worst)} cannot be read ({tried[worst]}); "
        + (f"choose another with --step, of {others}" if others else "put a good copy in its place")
    )


def restore_optimizer_state(checkpoint: pathlib.Path, opt_state: PyTree) -> PyTree:
    """Restores the state of a checkpoint's optimizer.

    Args:
      checkpoint: ``RUN/checkpoints/STEP``.
      opt_state: a state of the same optimizer, for shapes and shardings.

    Raises:
      ValueError: the checkpoint was saved with another optimizer or model, or cannot be read.
    """
    found, problem = _read_verified(
        checkpoint, lambda: {"opt_state": read_optimizer_state(checkpoint, opt_state)}
    )
    if problem is not None:
        raise ValueError(
            f"the optimizer's state of {checkpoint} cannot be read ({problem}); give another step, or "
            "leave init_optimizer out"
        )
    return found["opt_state"]


def _newest(directory: pathlib.Path, step: int | None, tried: dict[int, str]) -> int | None:
    """Returns the newest untried checkpoint, or `step`, as process zero sees it; None if there is none."""
    steps = [s for s in finished_steps(directory) if s not in tried and step in (None, s)]
    newest: int | None = processes.all_gather("newest", max(steps, default=None))[0]
    return newest


def _read_verified(
    checkpoint: pathlib.Path, read: Callable[[], dict[str, PyTree]], *, divided: bool = True
) -> tuple[dict[str, PyTree], str | None]:
    """Reads a part of a checkpoint and verifies it.

    Returns:
      The entries, and the problem that some process found; None: there is none.
    """
    found: dict[str, PyTree] = {}
    contents: Contents | None = None
    problem, parts = None, {}
    try:
        contents = read_contents(checkpoint)
        found = read()
        parts = checksums.checksums(found)
    except Exception as error:  # damaged files raise errors of any type
        if not _is_damage(error):
            raise
        problem = one_line_error(error)
    return found, _agreed_problem(problem, parts, contents, divided=divided)


def _agreed_problem(
    problem: str | None, parts: dict[str, int], contents: Contents | None, *, divided: bool = True
) -> str | None:
    """Returns the first problem of any process, or a mismatch of the checksums; None if there is none.

    All processes call this function and get the same result.
    """
    found = processes.all_gather("read", (problem, parts))
    problems = [p for p, _ in found if p is not None]
    if problems or contents is None:
        return problems[0] if problems else None
    try:
        contents.check_arrays(
            checksums.combine_checksums([p for _, p in found] if divided else [parts])
        )
    except ValueError as error:
        return one_line_error(error)
    return None


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
    return sorted(int(p.name) for p in numbered if _is_committed(p))


def _is_committed(checkpoint: pathlib.Path) -> bool:
    """Whether Orbax has finished a checkpoint: in a bucket, which has no renaming, by a file in it."""
    return (checkpoint / COMMITTED).exists() if in_bucket(checkpoint) else checkpoint.is_dir()
