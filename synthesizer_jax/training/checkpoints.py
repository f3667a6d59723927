"""The only room that writes state to storage."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import pathlib
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    BestN,
    LatestN,
)

from synthesizer_jax.data.pipeline import OtherStreamError
from synthesizer_jax.sharding import hosts
from synthesizer_jax.training.state import TrainState

_log = logging.getLogger(__name__)

SCORE = "score"
"""Name of the metric that `keep_best` goes by; higher is better."""


class DataPosition(Protocol):
    """What a checkpoint needs of a data stream: its position as files in a directory."""

    def save(self, directory: pathlib.Path) -> None:
        """Writes the position after the last consumed batch."""
        ...

    def restore(self, directory: pathlib.Path) -> None:
        """Continues with the batch after the saved position."""
        ...


@dataclasses.dataclass
class _PositionArgs(ocp.args.CheckpointArgs):
    stream: DataPosition


class DataPositionHandler(ocp.CheckpointHandler):
    """Writes a stream's position into the checkpoint's own directory, committed with it."""

    def save(self, directory: Any, args: _PositionArgs) -> None:
        """Writes at once: the stream moves on while arrays are still being written."""
        args.stream.save(pathlib.Path(directory))

    def restore(self, directory: Any, args: _PositionArgs) -> None:
        """Moves the stream to the saved position."""
        args.stream.restore(pathlib.Path(directory))


ocp.args.register_with_handler(DataPositionHandler, for_save=True, for_restore=True)(_PositionArgs)


class Checkpoints:
    """Numbered checkpoints under ``directory``, written in the background, committed whole.

    Args:
      directory: where the step directories lie.
      keep_latest: how many of the newest to keep.
      keep_best: how many of the best by ``score`` to keep besides.
      asynchronous: False writes before `save` returns.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        keep_latest: int = 2,
        keep_best: int = 1,
        asynchronous: bool = True,
    ):
        # Orbax's best_fn alone would delete the newest checkpoint when the score falls.
        policy = AnyPreservationPolicy(
            [
                LatestN(keep_latest),
                BestN(
                    get_metric_fn=lambda metrics: metrics[SCORE],
                    n=keep_best,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self._directory = directory.absolute()
        if hosts.first():
            self._directory.mkdir(parents=True, exist_ok=True)
        hosts.barrier("checkpoints")
        # Named processes meet at the coordination service. Without names Orbax lets devices meet, amid
        # the collectives of an evaluation when a save comes from the thread of `StopSignal`.
        processes = ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count()))
        )
        self._states = ocp.StandardCheckpointHandler(multiprocessing_options=processes)
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_names=("state", "data"),
            item_handlers={"state": self._states, "data": DataPositionHandler()},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                enable_async_checkpointing=asynchronous,
                create=False,
                multiprocessing_options=processes,
            ),
        )

    @property
    def steps(self) -> list[int]:
        """Finished checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        """The newest finished checkpoint."""
        return self._manager.latest_step()

    def save(
        self, state: TrainState, stream: DataPosition | None, *, score: float | None = None
    ) -> None:
        """Begins to write a checkpoint; the state may be donated as soon as this returns.

        Args:
          state: written under its step.
          stream: its position is that of the last consumed batch.
          score: what `keep_best` compares; None where nothing was evaluated.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        items: dict[str, Any] = {"state": ocp.args.StandardSave(as_tree(state))}
        if stream is not None:
            items["data"] = _PositionArgs(stream)
        metrics = None if score is None else {SCORE: float(score)}
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def restore(
        self, abstract: TrainState, stream: DataPosition | None, *, step: int | None = None
    ) -> TrainState:
        """Reads a checkpoint (None: the newest) into the given shapes and shardings.

        Processes do not wait for one another here, so that one which cannot read says so to the others.
        """
        step = self.latest if step is None else step
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._directory}")
        directory = self._directory / str(step)
        if stream is not None:
            stream.restore(directory / "data")
        tree = self._states.restore(
            directory / "state", args=ocp.args.StandardRestore(as_tree(abstract))
        )
        return TrainState(**tree)

    def restore_newest(
        self, abstract: TrainState, stream: DataPosition | None
    ) -> TrainState | None:
        """Reads the newest checkpoint that can be read; None where there is none at all.

        Those after it, which some process found damaged, are set aside as ``STEP.unreadable`` with a
        warning. Nothing is renamed unless an older one was read.

        Raises:
          ValueError: none of them can be read, or they hold the state of another model or the position
            of other data.
          OSError: the storage did not answer; the checkpoints are untouched.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            problem: str | None = None
            try:
                state = self.restore(abstract, stream, step=step)
            except Exception as error:  # whatever readers make of damaged files
                if not is_damage(error) or not self._same_arrays(step, abstract):
                    raise
                problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            problems = [p for p in hosts.Occasion("restore").everyone(problem) if p is not None]
            if not problems:
                self._set_aside(damaged)
                return state
            damaged[step] = problems[0]
        if damaged:
            newest = max(damaged)
            raise ValueError(
                f"no checkpoint in {self._directory} can be read (tried "
                f"{', '.join(map(str, damaged))}; {newest}: {damaged[newest]}); put a good copy in "
                "its place, or start in a new --workdir"
            )
        return None

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
                    (self._directory / str(step)).rename(aside)
        self._manager.reload()

    def _same_arrays(self, step: int, abstract: TrainState) -> bool:
        """Whether a checkpoint lists the arrays of a state, or its list is damaged too."""
        try:
            listed = ocp.PyTreeCheckpointHandler().metadata(self._directory / str(step) / "state")
            shapes = [m.shape for m in jax.tree.leaves(listed.tree)]
        except Exception:  # as above
            return True
        wanted = [x.shape for x in jax.tree.leaves(as_tree(abstract))]
        return sorted(map(tuple, shapes)) == sorted(map(tuple, wanted))

    def wait(self) -> None:
        """Returns when everything begun is written."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then frees the manager's threads."""
        self._manager.close()


def is_damage(error: Exception) -> bool:
    """Whether an error may come from damaged files; not from storage, memory or a user's mistake."""
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return not isinstance(error, MemoryError | jax.errors.JaxRuntimeError | OtherStreamError)


def free_name(path: pathlib.Path) -> pathlib.Path:
    """The path, or the first of ``path-2``, ``path-3``, … that does not exist."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


def as_tree(state: TrainState) -> dict[str, Any]:
    """A state as a dictionary, whose names are those of the files."""
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}


def restore_variables(directory: pathlib.Path, *, step: int | None = None) -> tuple[int, Any]:
    """Reads parameters and constants alone, on this machine's devices, as `eval` needs them.

    Args:
      directory: a run's ``checkpoints`` directory.
      step: None is the newest.

    Returns:
      The step, and ``{"params": ..., "constants": ...}`` of host arrays.

    Raises:
      FileNotFoundError: there is no such checkpoint.
    """
    steps = finished_steps(directory)
    if not steps or (step is not None and step not in steps):
        wanted = "a checkpoint" if step is None else f"checkpoint {step}"
        found = ", ".join(map(str, steps)) or "none"
        raise FileNotFoundError(f"{directory} has no {wanted} (found: {found})")
    step = steps[-1] if step is None else step
    path = (directory / str(step) / "state").absolute()
    reader = ocp.PyTreeCheckpointHandler()  # a checkpointer would wait for all processes
    tree: Any = reader.metadata(path).tree
    parts = {k: tree[k] for k in ("params", "constants") if k in tree}
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device), parts
    )
    restored = reader.restore(
        path,
        args=ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        ),
    )
    return step, {k: v for k, v in restored.items() if v}


def finished_steps(directory: pathlib.Path) -> list[int]:
    """Numbers of the committed checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and p.is_dir())
