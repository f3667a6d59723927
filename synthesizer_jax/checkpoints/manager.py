"""Saves, restores and verifies the checkpoints of a run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

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
from synthesizer_jax.checkpoints.placement import (
    AVERAGE,
    OtherModelError,
    read_arrays,
    read_variables,
)
from synthesizer_jax.hosts import processes
from synthesizer_jax.primitives.parameters import Variables, merge_entries

Convert: TypeAlias = Callable[[tuple[str, ...], jax.Array], PyTree]
"""Maps the keys and the array of a variable to a value; see `restore_variables`."""

COMMITTED = "commit_success.txt"
"""The file with which Orbax marks a finished checkpoint in a bucket."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Retention:
    """Orbax's policy that keeps the newest checkpoints and the checkpoints with the best scores.

    Attributes:
      latest: number of newest checkpoints to keep.
      best: number of checkpoints with the best scores to keep.
      scores: a dictionary from evaluated steps to scores. Higher scores are better. Scores are
        added during training.
    """

    latest: int
    best: int
    scores: dict[int, float]

    def steps_to_keep(self, steps: Iterable[int]) -> set[int]:
        """Returns the steps to keep. If two steps have equal scores, the newer step is better."""
        rising = sorted(steps)
        measured = [s for s in rising if math.isfinite(self.scores.get(s, math.nan))]
        # The pairs are sorted in descending order, so that of two steps with equal scores the newer
        # one comes first.
        best = sorted(measured, key=lambda step: (self.scores[step], step), reverse=True)
        return {*rising[max(len(rising) - self.latest, 0) :], *best[: self.best]}

    def should_preserve(self, checkpoints: Sequence[PyTree], *, context: object) -> list[bool]:
        """Returns for each checkpoint whether to keep the checkpoint. Orbax calls this method."""
        kept = self.steps_to_keep(checkpoint.step for checkpoint in checkpoints)
        return [checkpoint.step in kept for checkpoint in checkpoints]


class Checkpoints:
    """Saves, restores and deletes the checkpoints in a directory, which are numbered by step.

    Checkpoints are written asynchronously and committed atomically. The newest checkpoints and the
    checkpoints with the best scores are kept.

    Args:
      directory: the directory of the checkpoints.
      keep_latest: number of newest checkpoints to keep.
      keep_best: number of checkpoints with the best scores to keep.
      scores: the scores so far, by step. `record_score` adds more scores.
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
        """Orbax's checkpoint manager. The first access also creates the directory."""
        if processes.is_process_zero():
            self._directory.mkdir(parents=True, exist_ok=True)
        processes.barrier("checkpoints")
        # If the active processes are listed, Orbax synchronizes them through JAX's coordination
        # service. Without the list, Orbax would use collectives. Because checkpoints are written in
        # the background, these collectives could interleave with the collectives of training steps.
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
        """The steps of the finished checkpoints, oldest first."""
        return finished_steps(self._directory)

    def record_score(self, step: int, score: float) -> None:
        """Records the score of a step.

        The next `save` or `prune` chooses checkpoints by the scores.
        """
        self._retention.scores[step] = score

    def prune(self) -> None:
        """Deletes all finished checkpoints that the policy does not keep."""
        # All processes must delete the same steps, so they use the list of process 0.
        steps = processes.all_gather("prune", self.steps)[0]
        for step in sorted(set(steps) - self._retention.steps_to_keep(steps)):
            self._manager.delete(step)

    def save(self, state: PyTree, stream: BatchStream | None) -> None:
        """Starts to write a checkpoint, unless a checkpoint of the state's step already exists.

        The buffers of the state may be donated as soon as this method returns.

        Args:
          state: a dataclass with a field ``step``. All fields are pytrees of arrays.
          stream: the data stream whose position is saved, or None to save no position.
        """
        step = int(state.step)
        if step in self._begun or step in self._manager.all_steps():
            return
        tree = _state_dict(state)

        # Each process contributes the checksums of its shards and the position of its part of the
        # data.
        files = {} if stream is None else position_files(stream)
        gathered = processes.all_gather("contents", (checksums.checksums(tree), files))
        arrays = checksums.combine_checksums([part for part, _ in gathered])
        position: dict[str, str] = {}
        for _, local_files in gathered:
            position.update(local_files)
        contents = Contents(step, arrays, position)

        items = {
            "state": ocp.args.StandardSave(tree),
            CONTENTS: ocp.args.JsonSave(contents.to_json()),
        }
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._begun.append(step)

    def take_newly_saved(self) -> list[int]:
        """Returns the steps whose checkpoints were finished since the last call of this method."""
        unfinished = []
        if self._begun and self._manager.is_saving_in_progress():
            # Orbax writes one checkpoint at a time, so only the last checkpoint can be unfinished.
            unfinished = self._begun[-1:]
        else:
            self.wait()  # raises errors from the background thread
        finished = self._begun[: len(self._begun) - len(unfinished)]
        self._begun = unfinished
        return finished

    def restore_newest(self, abstract: PyTree, stream: BatchStream | None) -> PyTree:
        """Restores the newest readable checkpoint, or returns None if there are no checkpoints.

        If at least one process finds that a checkpoint is damaged, the next older checkpoint is
        tried. If an older checkpoint can be restored, the damaged checkpoints are renamed to
        ``STEP.unreadable``, with a warning. If no checkpoint can be restored, no checkpoint is
        renamed.

        Args:
          abstract: the abstract state, whose leaves are `jax.ShapeDtypeStruct` with shardings.
          stream: the data stream to move to the saved position. None means that the position is
            ignored.

        Raises:
          ValueError: no checkpoint can be read, or the checkpoints belong to a different model or
            to different data.
          OSError: the storage failed. The checkpoints are unchanged.
        """
        entries = _state_dict(abstract)
        names = tuple(field.name for field in dataclasses.fields(abstract))

        def read(checkpoint: pathlib.Path) -> list[dict[str, PyTree]]:
            """Reads and checks the state of one checkpoint."""
            if stream is not None and read_contents(checkpoint) is None:
                raise ValueError(f"{checkpoint} contains no position in the data.")
            tree: dict[str, PyTree] = read_arrays(checkpoint, entries, names)
            if int(tree["step"]) != int(checkpoint.name):
                raise ValueError(
                    f"{checkpoint} contains the state of another step, {int(tree['step'])}."
                )
            return [tree]

        step, tree, damaged = read_newest(self._directory, read)
        if step is None:
            return None

        if stream is not None:
            contents = read_contents(self._directory / str(step))
            if contents is not None:
                contents.restore_position(stream)

        if damaged:
            with processes.process_zero_first("set aside"):
                if processes.is_process_zero():
                    self._set_aside(damaged)
            if "_manager" in vars(self):
                self._manager.reload()

        return dataclasses.replace(abstract, **tree)

    def _set_aside(self, damaged: dict[int, str]) -> None:
        """Renames damaged checkpoints to ``STEP.unreadable``, with a warning."""
        for step, problem in damaged.items():
            aside = self._directory / f"{step}.unreadable"
            for number in itertools.count(2):
                if not aside.exists():
                    break
                aside = self._directory / f"{step}.unreadable-{number}"
            message = "Checkpoint %d cannot be read (%s). It is renamed to %s."
            _log.warning(message, step, problem, aside)
            (self._directory / str(step)).rename(aside)

    def wait(self) -> None:
        """Waits until all checkpoints are written.

        If writing failed in the background thread, this method raises the error.
        """
        if "_manager" in vars(self):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until all checkpoints are written and stops the manager's threads."""
        if "_manager" in vars(self):
            self._manager.close()


def _state_dict(state: PyTree) -> dict[str, PyTree]:
    """Returns the fields of a state by name.

    The field of moving averages is left out if it is empty, because checkpoints of earlier versions
    do not have this field.
    """
    fields = fields_of(state)
    return {name: tree for name, tree in fields.items() if name != AVERAGE or tree}


def restore_variables(
    directory: pathlib.Path,
    *,
    step: int | None = None,
    layout: Variables | None = None,
    convert: Convert | None = None,
) -> tuple[int, Variables]:
    """Restores only the parameters and constants of a checkpoint.

    If the run has an exponential moving average of its parameters, the averages are restored
    instead of the parameters. If the newest checkpoint cannot be read, the next older checkpoint is
    used, with a warning. If a training run deletes a checkpoint while the checkpoint is read, a
    different checkpoint is used.

    Args:
      directory: the ``checkpoints`` directory of a run.
      step: the step to restore. None means the newest step that can be read.
      layout: a dictionary ``{"params": ..., "constants": ...}`` of `jax.ShapeDtypeStruct` with
        shardings. The shardings may cover the devices of several processes. If `layout` is None,
        the saved arrays are restored on one device of this process.
      convert: a function that maps the keys ``(collection, *path)`` and the array of a variable to
        the value that replaces the array. Each array is converted before the next array is read.

    Returns:
      The step, and ``{"params": ..., "constants": ...}``.

    Raises:
      FileNotFoundError: the directory has no checkpoint of this step.
      ValueError: the checkpoint cannot be read, or does not belong to the model that `layout`
        describes.
    """

    def read(checkpoint: pathlib.Path) -> Iterator[dict[str, PyTree]]:
        """Yields all variables at once, or one at a time if each of them is converted."""
        return read_variables(checkpoint, layout, singly=convert is not None)

    number, variables, damaged = read_newest(
        directory, read, step=step, divided=layout is not None, convert=convert
    )

    saved = finished_steps(directory)
    if number is None:
        if step is None or not saved:
            raise FileNotFoundError(
                f"{directory} contains no checkpoint yet. Train the model first."
            )
        raise FileNotFoundError(
            f"{directory} contains no checkpoint of step {step}. {_choose_step(saved)}"
        )

    for newer in sorted(set(damaged) & set(saved)):
        message = "The checkpoint %s cannot be read (%s). Step %d is used instead."
        _log.warning(message, directory / str(newer), damaged[newer], number)
    if AVERAGE in variables:
        variables["params"] = variables.pop(AVERAGE)
    return number, variables


def read_newest(
    directory: pathlib.Path,
    read: Callable[[pathlib.Path], Iterable[dict[str, PyTree]]],
    *,
    step: int | None = None,
    divided: bool = True,
    convert: Convert | None = None,
) -> tuple[int | None, dict[str, PyTree], dict[int, str]]:
    """Reads and verifies entries of the newest checkpoint that all processes can read.

    Args:
      directory: the directory of the checkpoints.
      read: a function that reads the entries of a checkpoint in one or several parts, given the
        directory of its step. Each part is verified and converted before the next part is read.
      step: the only step to read. None means the newest step.
      divided: whether each process reads only its own shards, so that the checksums of all
        processes must be added. If `divided` is false, each process reads whole arrays.
      convert: see `restore_variables`.

    Returns:
      The step, the entries of its checkpoint, and a dictionary from the steps of newer checkpoints
      to their problems. If there is no checkpoint, the step is None and the entries are empty.

    Raises:
      ValueError: no checkpoint can be read.
    """
    problems: dict[int, str] = {}
    while True:
        saved = finished_steps(directory)
        steps = [s for s in saved if s not in problems and step in (None, s)]
        # All processes must try the same step, so they use the step of process 0.
        newest: int | None = processes.all_gather("newest", max(steps, default=None))[0]

        if newest is None:
            # Either there were no checkpoints, or all damaged checkpoints were deleted in the
            # meantime.
            if not any(s in saved for s in problems):
                return None, {}, problems
            worst = max(problems)
            others = [s for s in saved if s not in problems]
            remedy = _choose_step(others) if others else "Put a good copy in its place."
            raise ValueError(
                f"The checkpoint {directory / str(worst)} cannot be read ({problems[worst]}). "
                f"{remedy}"
            )

        entries, problem = _read_and_verify(directory / str(newest), read, divided, convert)
        if problem is None:
            return newest, entries, problems
        problems[newest] = problem


def _read_and_verify(
    checkpoint: pathlib.Path,
    read: Callable[[pathlib.Path], Iterable[dict[str, PyTree]]],
    divided: bool,
    convert: Convert | None,
) -> tuple[dict[str, PyTree], str | None]:
    """Reads entries of a checkpoint, and compares their checksums with the recorded checksums.

    Args:
      checkpoint: the directory of a step.
      read: see `read_newest`.
      divided: see `read_newest`.
      convert: see `restore_variables`.

    Returns:
      The entries, and a description of the checkpoint's problem. The description is None if all
      processes can read the checkpoint.
    """
    contents: Contents | None = None
    entries: dict[str, PyTree] = {}
    combined: dict[str, int] = {}
    parts: Iterator[dict[str, PyTree]] | None = None
    problem: str | None = None
    while problem is None:
        part: dict[str, PyTree] | None = None
        sums: dict[str, int] = {}
        try:
            if parts is None:
                contents = read_contents(checkpoint)
                parts = iter(read(checkpoint))
            part = next(parts, None)
            sums = checksums.checksums(part)
        except Exception as error:  # damaged files raise errors of any type
            if not _is_damage(error):
                raise
            problem = one_line_error(error).removesuffix(".")

        # If at least one process found a problem, all processes treat the checkpoint as damaged.
        # They must know this before they convert the part, because they convert it together.
        gathered = processes.all_gather("read", (problem, sums))
        problem = next((problem for problem, _ in gathered if problem is not None), None)
        if problem is None:
            if part is None:
                break
            sums_to_add = [s for _, s in gathered] if divided else [sums]
            combined |= checksums.combine_checksums(sums_to_add)
            converted = convert_variables(part, convert)
            # A single part is kept unchanged, because merging removes empty dictionaries, such as
            # the state of an optimizer without arrays.
            entries = merge_entries(converted, entries) if entries else converted

    if problem is None and contents is not None:
        problem = contents.difference(combined)
    return entries, problem


def convert_variables(variables: Variables, convert: Convert | None) -> Variables:
    """Converts all arrays; see `restore_variables`.

    If `convert` is None, the variables are returned unchanged.
    """
    if convert is None:
        return variables
    converted = {
        # Moving averages of the parameters have the keys of the parameters.
        keys: convert(("params", *keys[1:]) if keys[0] == AVERAGE else keys, array)
        for keys, array in traverse_util.flatten_dict(variables).items()
    }
    # An array that was read is freed when all computations that need it are finished.
    result: Variables = traverse_util.unflatten_dict(jax.block_until_ready(converted))
    return result


def _is_damage(error: Exception) -> bool:
    """Returns whether an error may have been caused by damaged files.

    Failures of the storage, a lack of memory and a wrong configuration are not damage.
    """
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    if isinstance(error, OtherModelError | MemoryError | jax.errors.JaxRuntimeError):
        return False
    return not is_storage_error(error)


def finished_steps(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the committed checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    numbered = [path for path in directory.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name)]
    return sorted(int(path.name) for path in numbered if _is_committed(path))


def _choose_step(steps: list[int]) -> str:
    """Returns a sentence that tells the user which steps they can choose, at least one."""
    *others, last = steps
    if not others:
        return f"Choose step {last}."
    return f"Choose one of the steps {', '.join(map(str, others))} and {last}."


def _is_committed(checkpoint: pathlib.Path) -> bool:
    """Returns whether Orbax has finished the checkpoint in a directory whose name is a step.

    On a disk, Orbax commits a checkpoint by renaming its directory. Directories in a bucket cannot
    be renamed, so Orbax instead writes a file that marks the checkpoint as finished.
    """
    if in_bucket(checkpoint):
        return (checkpoint / COMMITTED).exists()
    return checkpoint.is_dir()
