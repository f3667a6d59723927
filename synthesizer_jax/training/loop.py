"""The training loop: save, evaluate, fetch, step, log the step before.

Only this loop holds a changing state.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np

from synthesizer_jax.checkpoints.contents import DataPosition
from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.runs.events import read_events
from synthesizer_jax.runs.metrics import METRICS_FILE, read_scores
from synthesizer_jax.runs.progress import format_duration
from synthesizer_jax.runtime import processes
from synthesizer_jax.runtime.preemption import Preempted, StopSignal, close_within
from synthesizer_jax.training.early_stopping import has_stopped
from synthesizer_jax.training.run_log import STOP, RunLog
from synthesizer_jax.training.state import TrainState, restart_ema
from synthesizer_jax.training.trainer import Trainer

Evaluate = Callable[[TrainState], dict[str, float]]
"""Measures a state; the entry ``score`` (higher is better) chooses the best checkpoint."""

CLOSE_SECONDS = 900.0
"""More than Orbax gives a save that storage does not take."""


class Stream(DataPosition, Protocol):
    """An endless stream of host batches with a position that can be saved."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch."""
        ...


def train(
    trainer: Trainer,
    stream: Stream,
    directory: pathlib.Path,
    *,
    stop: StopSignal,
    evaluate: Evaluate | None = None,
    initial: Callable[[TrainState], TrainState] | None = None,
    ready: Callable[[], None] = lambda: None,
    visible: bool = True,
) -> TrainState:
    """Trains to `training.steps`, from the directory's newest checkpoint if there is one.

    It ends earlier when `evaluation.patience` is used up; then it does nothing more when it is continued,
    unless the patience is larger.

    ``events.jsonl`` tells when what happened, and the log's ``goodput`` which share of the time since
    the run's first start its steps needed. The log also has the model FLOP/s utilization ``mfu``, where
    the published peak of the devices is known, and ``product_utilization``, against a matrix product
    measured at the start.

    Args:
      trainer: makes the steps of an experiment.
      stream: its batches.
      directory: where checkpoints and logs lie.
      stop: listens for signals.
      evaluate: measures a state every `evaluation.every` steps and at the end, after it was saved.
      initial: changes a fresh state, such as to put a checkpoint's parameters into it; a resumed
        run does not need it.
      ready: called when the state exists and the step is compiled. Nothing was written before.
      visible: whether to show progress.

    Returns:
      The final state.

    Raises:
      Preempted: after SIGTERM or SIGINT, with everything saved.
      NonFiniteLossError: the run diverged; the last good checkpoint is untouched.
      FileNotFoundError: the run's checkpoints are gone.
    """
    training, evaluation = trainer.experiment.training, trainer.experiment.evaluation
    scores = read_scores(directory / METRICS_FILE)
    checkpoints = _open_checkpoints(trainer, directory, scores)
    with contextlib.ExitStack() as stack:
        stack.callback(close_within, CLOSE_SECONDS, "the checkpoints", checkpoints.close)
        log = RunLog(trainer, directory, checkpoints, visible=visible)
        stack.callback(log.close)

        # Continue where the run was saved, or start. While work that may take minutes is inside of
        # `stop.region()`, a signal ends the process at once: everything is saved, or there is nothing.
        with stop.region():
            state = checkpoints.restore_newest(trainer.layout.abstract, stream)
            if state is None:
                state = trainer.init() if initial is None else restart_ema(initial(trainer.init()))
            start = int(state.step)
            scores = {step: score for step, score in scores.items() if step <= start}
            if start < training.steps and not has_stopped(evaluation, scores, start):
                _compile(trainer, log, step=start)
        ready()
        log.begin(state)

        for step in range(start, training.steps + 1):  # `state` has done `step` steps
            # Save. A step that is evaluated is saved before, so an evaluation that fails loses nothing.
            last = step == training.steps
            due = last or bool(evaluation.every and step and step % evaluation.every == 0)
            evaluated = evaluate is not None and due and step not in scores
            if step > start and (last or evaluated or step % training.save_every == 0):
                _save(state, stream, checkpoints, log, stop, wait=last or evaluated)

            # Evaluate. The first round makes up for an evaluation that a signal has cut off.
            if evaluate is not None and evaluated:
                began = time.perf_counter()
                with stop.region():
                    values = evaluate(state)
                scores[step] = values.get("score", math.nan)
                checkpoints.record_score(step, scores[step])
                log.add_evaluation(step, values, time.perf_counter() - began)

            # Stop at the end, when the score no longer improves, or on a signal that all processes know of.
            if last:
                break
            if evaluation.patience is not None and step in scores:
                own = has_stopped(evaluation, scores, step)
                if processes.all_gather("stopped", own)[0]:
                    text = f"stopped: no better score in {evaluation.patience} evaluations"
                    log.say(step, text, event="stopped")
                    break
            if signal := log.agreed_signal if jax.process_count() > 1 else stop.received:
                _save(state, stream, checkpoints, log, stop, wait=True)
                raise Preempted(signal)

            # Fetch. Batches of another shape than those before need a program of their own.
            batch = trainer.shard_batch(next(stream))
            if step == start:
                trainer.check_memory()  # again: reading data has taken some
            if not trainer.is_compiled(batch):
                log.flush()  # the last step has ended when the clock stops
                with log.throughput.pause():
                    trainer.compile(batch)
                log.say(step, f"compiled for {trainer.num_compiled} shapes")

            # Step. This only dispatches it; while the devices compute, the step before is logged.
            state, metrics = trainer.step(state, batch)
            if jax.process_count() > 1:
                metrics[STOP] = trainer.max_over_processes(stop.received, after=metrics["loss"])
            log.add_step(step + 1, batch, metrics)

        checkpoints.prune()
        log.end(int(state.step))
    return state


def _save(
    state: TrainState,
    stream: Stream,
    checkpoints: Checkpoints,
    log: RunLog,
    stop: StopSignal,
    *,
    wait: bool,
) -> None:
    """Saves a state and the position of its data, after everything was logged."""
    log.flush_files()
    checkpoints.save(state, stream)
    stop.trained = True
    if wait:
        checkpoints.wait()
    log.report_saved()


def _compile(trainer: Trainer, log: RunLog, *, step: int) -> None:
    """Compiles the step, and measures what one step a second would make of the devices."""
    size = sum(x.size for x in jax.tree.leaves(trainer.layout.abstract.params))
    log.say(step, f"compiling: {size:,} parameters on {trainer.described_devices}")
    start = time.perf_counter()
    trainer.compile()
    trainer.check_memory()
    log.throughput.utilizations = trainer.measure_utilization()
    log.say(step, f"compiled in {format_duration(time.perf_counter() - start)}")


def _open_checkpoints(
    trainer: Trainer, directory: pathlib.Path, scores: Mapping[int, float]
) -> Checkpoints:
    """Opens the checkpoints of a run.

    Raises:
      FileNotFoundError: the run has saved checkpoints, and none is there.
    """
    training = trainer.experiment.training
    checkpoints = Checkpoints(
        directory / "checkpoints",
        keep_latest=training.keep_latest,
        keep_best=training.keep_best,
        scores=scores,
    )
    saved = [event["step"] for event in read_events(directory) if event["event"] == "saved"]
    if saved and not checkpoints.steps:
        raise FileNotFoundError(
            f"{directory / 'checkpoints'} holds no checkpoint, but the run has saved step {max(saved)}; "
            "mount or restore that directory, or start in a new --workdir"
        )
    return checkpoints
