"""The training loop: evaluate, save, fetch, step, log the step before.

Only this loop holds a changing state.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from synthesizer_jax.sharding import hosts
from synthesizer_jax.training.checkpoints import Checkpoints, DataPosition
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.metrics import MetricsWriter, ProgressBar, Throughput
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.step import Metrics
from synthesizer_jax.training.survival import Preempted, StopSignal
from synthesizer_jax.training.trainer import Trainer
from synthesizer_jax.training.watch import Events, Watchdog, goodput

Evaluate = Callable[[TrainState], dict[str, float]]
"""Measures a state; the entry ``score`` (higher is better) chooses the best checkpoint."""


STOP = "stop"
"""Among a step's metrics in several processes: whether one of them wants to stop."""


class Stream(DataPosition, Protocol):
    """An endless stream of host batches with a position that can be saved."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch."""
        ...


class NonFiniteLossError(RuntimeError):
    """The loss or a gradient became infinite or not a number."""


def train(
    experiment: Experiment,
    stream: Stream,
    directory: pathlib.Path,
    *,
    stop: StopSignal,
    evaluate: Evaluate | None = None,
    initial: Callable[[TrainState], TrainState] | None = None,
    trainer: Trainer | None = None,
    devices: list[jax.Device] | None = None,
    visible: bool = True,
) -> TrainState:
    """Trains to `training.steps`, from the directory's newest checkpoint if there is one.

    Args:
      experiment: what to train.
      stream: its batches.
      directory: where checkpoints and logs lie.
      stop: listens for SIGTERM.
      evaluate: measures a state every `evaluation.every` steps and at the end.
      initial: changes a fresh state, such as to put a checkpoint's parameters into it; a resumed
        run does not need it.
      trainer: what makes the steps; None: one that trains the experiment's model on its targets.
      devices: None uses all devices.
      visible: show a progress bar.

    ``events.jsonl`` tells when what happened, and the log's ``goodput`` which share of the time since
    the run's first start its steps needed. The log's ``mfu`` is the model FLOP/s utilisation, against
    a matrix product measured at the start.

    Returns:
      The final state.

    Raises:
      Preempted: after a SIGTERM, with everything saved.
      NonFiniteLossError: the run diverged; the last good checkpoint is untouched.
    """
    training = experiment.training
    trainer = Trainer(experiment, devices) if trainer is None else trainer
    checkpoints = Checkpoints(
        directory / "checkpoints", keep_latest=training.keep_latest, keep_best=training.keep_best
    )
    events = Events(directory, writes=hosts.first())
    events.write("start", step=checkpoints.latest or 0)
    try:
        with stop.region():
            restored = checkpoints.restore_newest(trainer.layout.abstract, stream)
            if restored is not None:
                state = restored
            else:
                state = trainer.init() if initial is None else initial(trainer.init())
            utilisation = None
            if int(state.step) < training.steps:
                trainer.compile()
                utilisation = trainer.measure_utilisation()
            throughput = Throughput(utilisation)
        run = _Run(trainer, checkpoints, stream, directory, stop, evaluate, throughput, events)
        return run.to_the_end(state, visible=visible)
    finally:
        checkpoints.close()


class _Run:
    """The loop's moving parts."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        stream: Stream,
        directory: pathlib.Path,
        stop: StopSignal,
        evaluate: Evaluate | None,
        throughput: Throughput,
        events: Events,
    ):
        self.trainer, self.checkpoints, self.stream = trainer, checkpoints, stream
        self.directory, self.stop, self.evaluate = directory, stop, evaluate
        self.experiment = trainer.experiment
        self.score: float | None = None
        self.pending: tuple[int, Metrics] | None = None
        self.throughput = throughput
        self.events = events
        self.watchdog = Watchdog(self.experiment.training.watchdog_seconds)
        self.several, self.stop_agreed = jax.process_count() > 1, False

    def to_the_end(self, state: TrainState, *, visible: bool) -> TrainState:
        """Runs the remaining steps."""
        start, steps = int(state.step), self.experiment.training.steps
        first, title = hosts.first(), self.directory.name
        self.writer = MetricsWriter(self.directory, restored_step=start, writes=first)
        self.bar = ProgressBar(steps, start=start, title=title, visible=visible and first)
        try:
            for step in range(start, steps):
                self.watchdog.moved()
                if self.stop_agreed or (not self.several and self.stop.stopped):
                    raise Preempted
                batch = self.trainer.put(next(self.stream))
                state, metrics = self.trainer.step(state, batch)
                if self.several:
                    metrics[STOP] = self.trainer.vote(self.stop.stopped, after=metrics["loss"])
                self.log()
                self.pending = (step + 1, metrics)
                self.after(state, step + 1)
            self.events.write("end", step=steps)
        except Preempted:
            self.save(state)
            raise
        finally:
            self.watchdog.close()
            self.bar.close()
            self.writer.close()
        return state

    def after(self, state: TrainState, step: int) -> None:
        """Evaluates and saves where the recipe says so; the last step does both."""
        last = step == self.experiment.training.steps
        every = self.experiment.evaluation.every
        if self.evaluate is not None and (last or (every and step % every == 0)):
            self.log()
            with self.stop.region(lambda: self.save(state)):
                measured = self.evaluate(state)
            self.score = measured.get("score")
            self.events.write("evaluated", step=step)
            share = goodput(self.directory, self.throughput.seconds_per_step)
            measured |= {} if share is None else {"goodput": share}
            self.writer.write(step, measured, kind="eval")
            self.throughput.read()
        if last or step % self.experiment.training.save_every == 0:
            self.save(state, wait=last)

    def save(self, state: TrainState, *, wait: bool = True) -> None:
        """Logs what is pending, so that a continued run misses no line, and saves."""
        self.log()
        self.checkpoints.save(state, self.stream, score=self.score)
        self.score = None
        self.events.write("saving", step=int(state.step))
        if wait:
            self.checkpoints.wait()

    def log(self) -> None:
        """Reads the metrics of the last dispatched step, checks and writes them."""
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        values = {name: float(value) for name, value in metrics.items()}
        self.stop_agreed = bool(values.pop(STOP, False))
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                raise NonFiniteLossError(
                    f"the {name.replace('_', ' ')} of step {step} is {values[name]}; stopped. The "
                    f"newest good checkpoint is step {self.checkpoints.latest}; lower the learning "
                    "rate, warm up longer or clip gradients, and start again to continue from it"
                )
        self.throughput.add(values["tokens"])
        self.bar.advance(step)
        if step % self.experiment.training.log_every == 0:
            values |= self.throughput.read()
            self.writer.write(step, values, kind="train")
            self.bar.show(values)
