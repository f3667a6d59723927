"""The training loop: save, evaluate, fetch, step, log the step before.

Only this loop holds a changing state.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from synthesizer_jax.sharding import hosts
from synthesizer_jax.training.checkpoints import Checkpoints
from synthesizer_jax.training.contents import DataPosition
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.logs import Logs
from synthesizer_jax.training.metrics import METRICS_FILE, MetricsWriter, Throughput, scores
from synthesizer_jax.training.progress import Progress, duration
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.step import Metrics
from synthesizer_jax.training.survival import Preempted, StopSignal, close_within
from synthesizer_jax.training.trainer import Trainer
from synthesizer_jax.training.watch import Events, Watchdog, goodput, read_events

Evaluate = Callable[[TrainState], dict[str, float]]
"""Measures a state; the entry ``score`` (higher is better) chooses the best checkpoint."""


STOP = "stop"
"""Among a step's metrics in several processes: the signal that one of them got, or 0."""

CLOSE_SECONDS = 900.0
"""More than Orbax gives a save that storage does not take."""


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
    ready: Callable[[], None] = lambda: None,
    visible: bool = True,
) -> TrainState:
    """Trains to `training.steps`, from the directory's newest checkpoint if there is one.

    Args:
      experiment: what to train.
      stream: its batches.
      directory: where checkpoints and logs lie.
      stop: listens for signals.
      evaluate: measures a state every `evaluation.every` steps and at the end, after it was saved.
      initial: changes a fresh state, such as to put a checkpoint's parameters into it; a resumed
        run does not need it.
      trainer: what makes the steps; None: one that trains the experiment's model on its targets.
      devices: None uses all devices.
      ready: called when the state is there and the step compiled. Nothing was written before.
      visible: say how it goes on.

    ``events.jsonl`` tells when what happened, and the log's ``goodput`` which share of the time since
    the run's first start its steps needed. Of the devices, the log has the model FLOP/s utilisation
    ``mfu``, where their published peak is known, and ``product_utilisation``, against a matrix product
    measured at the start.

    Returns:
      The final state.

    Raises:
      Preempted: after SIGTERM or SIGINT, with everything saved.
      NonFiniteLossError: the run diverged; the last good checkpoint is untouched.
      FileNotFoundError: the run's checkpoints are gone.
    """
    began = time.time()
    training, data = experiment.training, experiment.data
    trainer = Trainer(experiment, devices) if trainer is None else trainer
    measured = scores(directory / METRICS_FILE)
    checkpoints = Checkpoints(
        directory / "checkpoints",
        keep_latest=training.keep_latest,
        keep_best=training.keep_best,
        scores=measured,
    )
    check_not_lost(directory, checkpoints)
    progress = Progress(training.steps, title=directory.name, visible=visible and hosts.first())
    try:
        with stop.region():
            restored = checkpoints.restore_newest(trainer.layout.abstract, stream)
            if restored is not None:
                state = restored
            else:
                state = trainer.init() if initial is None else initial(trainer.init())
            utilisations: dict[str, float] = {}
            if int(state.step) < training.steps:
                size = sum(x.size for x in jax.tree.leaves(state.params))
                devices_there = trainer.described_devices
                progress.say(int(state.step), f"compiling: {size:,} parameters on {devices_there}")
                compiling = time.perf_counter()
                trainer.compile()
                trainer.check_memory()
                utilisations = trainer.measure_utilisation()
                seconds = duration(time.perf_counter() - compiling)
                progress.say(int(state.step), f"compiled in {seconds}")
        ready()
        logs = Logs(directory, writes=hosts.first())
        events = Events(logs.path, writes=hosts.first())
        events.write("start", step=int(state.step), at=began)
        throughput = Throughput(
            data.batch_size * (data.inputs_length + data.targets_length), utilisations
        )
        run = _Run(
            trainer=trainer,
            checkpoints=checkpoints,
            stream=stream,
            logs=logs,
            stop=stop,
            evaluate=evaluate,
            throughput=throughput,
            events=events,
            progress=progress,
        )
        return run.to_the_end(state, evaluated=set(measured))
    finally:
        progress.close()
        close_within(CLOSE_SECONDS, "the checkpoints", checkpoints.close)


def check_not_lost(directory: pathlib.Path, checkpoints: Checkpoints) -> None:
    """Raises a `FileNotFoundError` where a run has no checkpoints any more and would begin anew."""
    saved = [event["step"] for event in read_events(directory) if event["event"] == "saved"]
    if saved and not checkpoints.steps:
        raise FileNotFoundError(
            f"{directory / 'checkpoints'} holds no checkpoint, but the run has saved step {max(saved)}; "
            "mount or restore that directory, or start in a new --workdir"
        )


@dataclasses.dataclass
class _Run:
    """The loop's moving parts."""

    trainer: Trainer
    checkpoints: Checkpoints
    stream: Stream
    logs: Logs
    stop: StopSignal
    evaluate: Evaluate | None
    throughput: Throughput
    events: Events
    progress: Progress

    def __post_init__(self) -> None:
        self.experiment = self.trainer.experiment
        self.pending: tuple[int, Metrics] | None = None
        self.watchdog = Watchdog(self.experiment.training.watchdog_seconds)
        self.several, self.agreed = jax.process_count() > 1, 0

    def to_the_end(self, state: TrainState, *, evaluated: set[int]) -> TrainState:
        """Runs the remaining steps.

        Args:
          state: where the run stands.
          evaluated: steps that were evaluated before. An evaluation that a signal cut off is made up for.
        """
        start, steps = int(state.step), self.experiment.training.steps
        self.writer = MetricsWriter(self.logs.path, restored_step=start, writes=hosts.first())
        self.progress.begin(start)
        try:
            if start and self.is_measured(start) and start not in evaluated:
                self.measure(state, start)
            for step in range(start, steps):
                self.watchdog.moved()
                if number := self.agreed if self.several else self.stop.received:
                    raise Preempted(number)
                batch = self.trainer.put(next(self.stream))
                if step == start:
                    self.trainer.check_memory()  # again: reading data has taken some
                state, metrics = self.trainer.step(state, batch)
                if self.several:
                    metrics[STOP] = self.trainer.largest(self.stop.received, after=metrics["loss"])
                self.log()
                self.pending = (step + 1, metrics)
                self.after(state, step + 1)
            self.checkpoints.prune()
            self.events.write("end", step=steps)
        except Preempted:
            self.save(state)
            raise
        finally:
            self.watchdog.close()
            self.writer.close()
            self.logs.close()
        return state

    def is_measured(self, step: int) -> bool:
        """Whether the recipe wants a step to be evaluated; the last one always."""
        every = self.experiment.evaluation.every
        last = step == self.experiment.training.steps
        return self.evaluate is not None and (last or bool(every and step % every == 0))

    def after(self, state: TrainState, step: int) -> None:
        """Saves and evaluates where the recipe says so; every step that is evaluated is saved before."""
        measured, last = self.is_measured(step), step == self.experiment.training.steps
        if last or measured or step % self.experiment.training.save_every == 0:
            self.save(state, wait=last or measured)
        if measured:
            self.measure(state, step)

    def measure(self, state: TrainState, step: int) -> None:
        """Evaluates a saved state."""
        assert self.evaluate is not None
        began = time.perf_counter()
        with self.stop.region():
            measured = self.evaluate(state)
        seconds = time.perf_counter() - began
        self.checkpoints.measured(step, measured.get("score", math.nan))
        self.events.write("evaluated", step=step)
        share = goodput(self.logs.path, self.throughput.seconds_per_step)
        measured |= {} if share is None else {"goodput": share}
        self.writer.write(step, measured, kind="eval")
        self.progress.evaluated(step, measured, seconds)
        self.throughput.read()

    def save(self, state: TrainState, *, wait: bool = True) -> None:
        """Logs what is pending, so that a continued run misses no line, and saves."""
        self.log()
        self.logs.copy()
        self.checkpoints.save(state, self.stream)
        if wait:
            self.checkpoints.wait()
        self.tell_saved()

    def tell_saved(self) -> None:
        """Tells of checkpoints that were finished in the meantime."""
        for step in self.checkpoints.newly_saved():
            self.events.write("saved", step=step)
            self.progress.say(step, "saved")

    def log(self) -> None:
        """Reads the metrics of the last dispatched step, checks and writes them."""
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        values = {name: float(value) for name, value in metrics.items()}
        self.agreed = int(values.pop(STOP, 0))
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                self.checkpoints.wait()
                newest = self.checkpoints.latest
                found = (
                    "no checkpoint was saved yet" if newest is None else f"step {newest} is saved"
                )
                raise NonFiniteLossError(
                    f"the {name.replace('_', ' ')} of step {step} is {values[name]}; stopped, {found}: "
                    "lower the learning rate, warm up longer or clip gradients, and start again"
                )
        self.throughput.add(values["tokens"])
        self.progress.advance(step)
        self.tell_saved()
        if step % self.experiment.training.log_every == 0:
            rate = self.trainer.learning_rate(step)
            values |= {} if rate is None else {"learning_rate": rate}
            values |= self.throughput.read()
            self.writer.write(step, values, kind="train")
            self.progress.trained(step, values)
