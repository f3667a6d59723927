"""The only room that writes state to storage."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from synthesizer_jax.files import absolute
from synthesizer_jax.sharding import hosts
from synthesizer_jax.training import checksums
from synthesizer_jax.training.contents import (
    CONTENTS,
    Contents,
    DamagedError,
    DataPosition,
    FilesArgs,
    FilesHandler,
    position_files,
    read_contents,
)
from synthesizer_jax.training.placement import OtherModelError, read_variables
from synthesizer_jax.training.retention import Retention
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.storage import (
    as_storage_error,
    is_committed,
    is_damage,
    reads_ended,
    remove_unfinished,
    renames_atomically,
    set_aside,
    short,
)

_log = logging.getLogger(__name__)


class Checkpoints:
    """Numbered checkpoints under ``directory``, written in the background, committed whole.

    Every checkpoint holds checksums of its contents, and is checked when it is read.

    Args:
      directory: where the step directories lie.
      keep_latest: how many of the newest to keep.
      keep_best: how many of the best by `scores` to keep besides.
      scores: of the steps that were evaluated before; `measured` adds to them.
      asynchronous: False writes before `save` returns.
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
        # Named processes meet at the coordination service. Without names Orbax lets devices meet, amid
        # the collectives of an evaluation when a save comes from the thread of `StopSignal`.
        self._processes = ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count()))
        )
        self._states = ocp.StandardCheckpointHandler(multiprocessing_options=self._processes)

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Writes and deletes; makes the directory."""
        if hosts.first():
            self._directory.mkdir(parents=True, exist_ok=True)
        hosts.barrier("checkpoints")
        atomicity = ocp.path.atomicity
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
                multiprocessing_options=self._processes,
                temporary_path_class=(
                    atomicity.AtomicRenameTemporaryPath
                    if renames_atomically(self._directory)
                    else atomicity.CommitFileTemporaryPath
                ),
            ),
        )

    @property
    def _has_manager(self) -> bool:
        return "_manager" in vars(self)

    @property
    def steps(self) -> list[int]:
        """Finished checkpoints, oldest first."""
        return finished_steps(self._directory)

    @property
    def latest(self) -> int | None:
        """The newest finished checkpoint."""
        return max(self.steps, default=None)

    def measured(self, step: int, score: float) -> None:
        """Tells the score of a step, which `keep_best` goes by from the next save or `prune` on."""
        self._retention.scores[step] = score

    def prune(self) -> None:
        """Deletes finished checkpoints that are not to be kept."""
        steps = hosts.Occasion("prune").everyone(self.steps)[0]
        for step in sorted(set(steps) - self._retention.kept(steps)):
            self._manager.delete(step)

    def save(self, state: TrainState, stream: DataPosition | None) -> None:
        """Begins to write a checkpoint; the state may be donated as soon as this returns.

        Args:
          state: written under its step, if there is no checkpoint of it yet.
          stream: its position is that of the last consumed batch.
        """
        step, tree = int(state.step), as_tree(state)
        if step in self._begun or step in self._manager.all_steps():
            return
        if hosts.first():
            remove_unfinished(self._directory / str(step))
        position = {} if stream is None else position_files(stream)
        files = {name: checksums.of_bytes(data) for name, data in position.items()}
        contents = Contents(step, checksums.checksums(tree), files)
        items: dict[str, Any] = {
            "state": ocp.args.StandardSave(tree),
            CONTENTS: FilesArgs(contents.to_files(jax.process_index())),
        }
        if stream is not None:
            items["data"] = FilesArgs(position)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._begun.append(step)

    def newly_saved(self) -> list[int]:
        """The steps whose checkpoints were finished since the last call."""
        if self._begun and self._manager.is_saving_in_progress():
            done, self._begun = self._begun[:-1], self._begun[-1:]
            return done
        self.wait()  # raises what went wrong
        done, self._begun = self._begun, []
        return done

    def restore_newest(
        self, abstract: TrainState, stream: DataPosition | None
    ) -> TrainState | None:
        """Reads the newest checkpoint that can be read; None where there is none at all.

        Those after it, which some process found damaged, are set aside as ``STEP.unreadable`` with a
        warning. Nothing is renamed unless an older one was read.

        Args:
          abstract: shapes, dtypes and shardings.
          stream: moved to the saved position; None leaves the position alone.

        Raises:
          ValueError: none of them can be read, or they hold the state of another model or the position
            of other data.
          OSError: the storage did not answer; the checkpoints are untouched.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            state, problem = self._read(step, abstract, stream)
            if problem is None:
                self._set_aside(damaged)
                return state
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
        self, step: int, abstract: TrainState, stream: DataPosition | None
    ) -> tuple[TrainState | None, str | None]:
        """A checkpoint, and what some process found wrong with it.

        Processes do not wait for one another while they read, so that one which cannot tells the others.
        """
        directory = self._directory / str(step)
        state: TrainState | None = None
        contents: Contents | None = None
        problem, parts = None, {}
        try:
            contents = read_contents(directory)
            state = self._restore(directory, abstract, stream, contents)
            parts = checksums.checksums(as_tree(state))
        except Exception as error:  # whatever readers make of damaged files
            if not is_damage(error) or not self._same_arrays(step, abstract):
                raise as_storage_error(error, directory) from error
            problem = short(error)
        problem = agreed_problem(problem, parts, contents)
        return (state, None) if problem is None else (None, problem)

    def _restore(
        self,
        directory: pathlib.Path,
        abstract: TrainState,
        stream: DataPosition | None,
        contents: Contents | None,
    ) -> TrainState:
        if stream is not None:
            if contents is not None:
                contents.check_files(directory / "data")
            stream.restore(directory / "data")
        arrays = ocp.args.StandardRestore(as_tree(abstract))
        with reads_ended():
            tree = self._states.restore(directory / "state", args=arrays)
        if int(tree["step"]) != int(directory.name):
            raise DamagedError(f"{directory} holds step {int(tree['step'])}")
        return TrainState(**tree)

    def _set_aside(self, damaged: dict[int, str]) -> None:
        """Renames checkpoints, given with what is wrong with them."""
        if not damaged:
            return
        with hosts.one_after_the_first("set aside"):
            if hosts.first():
                for step, problem in damaged.items():
                    aside = free_name(self._directory / f"{step}.unreadable")
                    found = "checkpoint %d cannot be read and is set aside as %s (%s)"
                    _log.warning(found, step, aside, problem)
                    set_aside(self._directory / str(step), aside)
        if self._has_manager:
            self._manager.reload()

    def _same_arrays(self, step: int, abstract: TrainState) -> bool:
        """Whether a checkpoint lists the arrays of a state, or its list is damaged too."""
        try:
            with reads_ended():
                directory = self._directory / str(step) / "state"
                listed = ocp.PyTreeCheckpointHandler().metadata(directory)
            shapes = [m.shape for m in jax.tree.leaves(listed.tree)]
        except Exception:  # as above
            return True
        wanted = [x.shape for x in jax.tree.leaves(as_tree(abstract))]
        return sorted(map(tuple, shapes)) == sorted(map(tuple, wanted))

    def wait(self) -> None:
        """Returns when everything begun is written."""
        if self._has_manager:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then frees the manager's threads."""
        if self._has_manager:
            self._manager.close()


def free_name(path: pathlib.Path) -> pathlib.Path:
    """The path, or the first of ``path-2``, ``path-3``, … that does not exist."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


def as_tree(state: TrainState) -> dict[str, Any]:
    """A state as a dictionary, whose names are those of the files."""
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}


def restore_variables(
    directory: pathlib.Path, *, step: int | None = None, layout: Any = None
) -> tuple[int, Any]:
    """Reads parameters and constants alone, as `eval` and `generate` need them.

    A checkpoint that cannot be read is passed over for the next older one, with a warning; one that a
    running training deletes meanwhile, for a newer one where there is one.

    Args:
      directory: a run's ``checkpoints`` directory.
      step: None is the newest that can be read.
      layout: ``{"params": ..., "constants": ...}`` of `jax.ShapeDtypeStruct` with shardings, of any
        processes' devices; None: as saved, on one device of this machine.

    Returns:
      The step, and ``{"params": ..., "constants": ...}``.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: it cannot be read, or is of another model than the layout.
    """
    tried: dict[int, str] = {}
    while (number := _newest(directory, step, tried)) is not None:
        variables, problem = _read_variables(directory / str(number), layout)
        if problem is None:
            for damaged in sorted(set(tried) & set(finished_steps(directory))):
                found = "%s cannot be read (%s); step %d is used"
                _log.warning(found, directory / str(damaged), tried[damaged], number)
            return number, variables
        tried[number] = problem
    there = finished_steps(directory)
    others = ", ".join(str(s) for s in there if s not in tried)
    if not any(s in there for s in tried):  # nor has anything vanished while it was read
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


def _newest(directory: pathlib.Path, step: int | None, tried: dict[int, str]) -> int | None:
    """The newest finished checkpoint that was not tried, or the given one; all processes agree on it."""
    steps = [s for s in finished_steps(directory) if s not in tried and step in (None, s)]
    newest: int | None = hosts.Occasion("newest").everyone(max(steps, default=None))[0]
    return newest


def _read_variables(checkpoint: pathlib.Path, layout: Any) -> tuple[Any, str | None]:
    """A checkpoint's variables, and what some process found wrong with them: all checks stand here."""
    variables: Any = None
    contents: Contents | None = None
    problem, parts = None, {}
    try:
        contents = read_contents(checkpoint)
        variables = read_variables(checkpoint, layout)
        parts = checksums.checksums(variables)
    except Exception as error:  # whatever readers make of damaged files
        if isinstance(error, OtherModelError) or not is_damage(error):
            raise as_storage_error(error, checkpoint) from error
        problem = short(error)
    problem = agreed_problem(problem, parts, contents, divided=layout is not None)
    return (variables, None) if problem is None else (None, problem)


def agreed_problem(
    problem: str | None, parts: dict[str, int], contents: Contents | None, *, divided: bool = True
) -> str | None:
    """What some process has found wrong with a checkpoint, or all together with its arrays.

    Args:
      problem: what this process has found.
      parts: this process' part of the checksums of the arrays that were read.
      contents: what the checkpoint says; None: nothing.
      divided: False where every process has read all of it.
    """
    found = hosts.Occasion("read").everyone((problem, parts))
    problems = [p for p, _ in found if p is not None]
    if problems or contents is None:
        return problems[0] if problems else None
    try:
        contents.check_arrays(checksums.add([p for _, p in found] if divided else [parts]))
    except DamagedError as error:
        return short(error)
    return None


def finished_steps(directory: pathlib.Path) -> list[int]:
    """Numbers of the committed checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    numbered = [p for p in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", p.name)]
    return sorted(int(p.name) for p in numbered if p.is_dir() and is_committed(p))
