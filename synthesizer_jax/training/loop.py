"""The training loop: save, evaluate, fetch, step, log the step before.

Only this loop holds a changing state.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np

from synthesizer_jax.checkpoints.contents import DataPosition
from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.runs.events import Events, goodput, read_events
from synthesizer_jax.runs.metrics import METRICS_FILE, MetricsWriter, Throughput, read_scores
from synthesizer_jax.runs.progress import Progress, format_duration
from synthesizer_jax.runtime import processes
from synthesizer_jax.runtime.preemption import Preempted, StopSignal, close_within
from synthesizer_jax.runtime.watchdog import Watchdog
from synthesizer_jax.training.early_stopping import has_stopped
from synthesizer_jax.training.state import TrainState, restart_ema
from synthesizer_jax.training.step import Metrics
from synthesizer_jax.training.trainer import Trainer

Evaluate = Callable[[TrainState], dict[str, float]]
"""Measures a state; the entry ``score`` (higher is better) chooses the best checkpoint."""


STOP = "stop"
"""Among a step's metrics in several processes: the signal that one of them got, or 0."""

SPARSE_STEPS = 100
"""After so many steps in a row with more padding than tokens a line says what helps, once."""

CLOSE_SECONDS = 900.0
"""More than Orbax gives a save that storage does not take."""
_SPARSE = (
    "data.pack=true fills rows with several examples; for models that refuse that, data.buckets=[[64,16]] "
    "shortens batches; or lower data.inputs_length and data.targets_length"
)


class Stream(DataPosition, Protocol):
    """An endless stream of host batches with a position that can be saved."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch."""
        ...


class NonFiniteLossError(RuntimeError):
    """The loss or a gradient became infinite or not a number."""


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
    start_time = time.time()
    scores = read_scores(directory / METRICS_FILE)
    checkpoints = _open_checkpoints(trainer, directory, scores)
    progress = Progress(
        trainer.experiment.training.steps,
        title=directory.name,
        visible=visible and processes.is_process_zero(),
    )
    try:
        with stop.region():
            state = checkpoints.restore_newest(trainer.layout.abstract, stream)
            if state is None:
                state = trainer.init() if initial is None else restart_ema(initial(trainer.init()))
            finished = _is_finished(trainer, scores, int(state.step))
            utilizations = {} if finished else _compile(trainer, progress, step=int(state.step))
        ready()
        run = _Run(
            trainer,
            checkpoints,
            stream,
            stop=stop,
            evaluate=evaluate,
            progress=progress,
            directory=directory,
            utilizations=utilizations,
        )
        run.events.write("start", step=int(state.step), at=start_time)
        return run.train_to_the_end(state, scores=scores)
    finally:
        progress.close()
        close_within(CLOSE_SECONDS, "the checkpoints", checkpoints.close)


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


def _is_finished(trainer: Trainer, scores: Mapping[int, float], step: int) -> bool:
    """Returns whether a run has done its steps, or has stopped early."""
    experiment = trainer.experiment
    return step >= experiment.training.steps or has_stopped(experiment.evaluation, scores, step)


def _compile(trainer: Trainer, progress: Progress, *, step: int) -> dict[str, float]:
    """Compiles the step; returns the utilizations of a step a second."""
    size = sum(x.size for x in jax.tree.leaves(trainer.layout.abstract.params))
    progress.say(step, f"compiling: {size:,} parameters on {trainer.described_devices}")
    start = time.perf_counter()
    trainer.compile()
    trainer.check_memory()
    utilizations = trainer.measure_utilization()
    progress.say(step, f"compiled in {format_duration(time.perf_counter() - start)}")
    return utilizations


class _Run:
    """A run between its restored and its final state."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        stream: Stream,
        *,
        stop: StopSignal,
        evaluate: Evaluate | None,
        progress: Progress,
        directory: pathlib.Path,
        utilizations: Mapping[str, float],
    ):
        self.trainer, self.checkpoints, self.stream = trainer, checkpoints, stream
        self.stop, self.evaluate, self.progress = stop, evaluate, progress
        self.training = trainer.experiment.training
        writes = processes.is_process_zero()
        self.directory = directory
        self.events = Events(directory, writes=writes)
        data = trainer.experiment.data
        self.throughput = Throughput(
            data.batch_size * (data.inputs_length + data.targets_length), utilizations
        )
        self.watchdog = Watchdog(self.training.watchdog_seconds)
        self.unread_metrics: tuple[int, Metrics, int] | None = None
        self.agreed_signal, self.sparse_steps = 0, 0

    def train_to_the_end(self, state: TrainState, *, scores: Mapping[int, float]) -> TrainState:
        """Runs the remaining steps.

        Args:
          state: where the run stands.
          scores: of the steps that were evaluated before. An evaluation that a signal cut off is made up
            for.
        """
        start, self.scores = int(state.step), dict(scores)
        self.earlier_updates = self.trainer.earlier_updates(state)
        self.writer = MetricsWriter(
            self.directory, restored_step=start, writes=processes.is_process_zero()
        )
        self.progress.begin(start)
        try:
            if start and self.is_evaluated(start) and start not in scores:
                self.evaluate_state(state, start)
            for step in range(start, self.training.steps):
                if self.has_stopped(step):
                    break
                self.watchdog.reset()
                if signal := self.received_signal():
                    raise Preempted(signal)
                batch = self.trainer.shard_batch(next(self.stream))
                if step == start:
                    self.trainer.check_memory()  # again: reading data has taken some
                if not self.trainer.is_compiled(batch):
                    self.log()  # the last step has ended when the clock stops
                    with self.throughput.pause():
                        self.trainer.compile(batch)
                    self.progress.say(step, f"compiled for {self.trainer.num_compiled} shapes")
                state, metrics = self.trainer.step(state, batch)
                if jax.process_count() > 1:
                    metrics[STOP] = self.trainer.max_over_processes(
                        self.stop.received, after=metrics["loss"]
                    )
                self.log()
                sides = ("encoder_input_tokens", "decoder_target_tokens")
                capacity = sum(batch[side].size for side in sides)
                self.unread_metrics = (step + 1, metrics, capacity)
                self.save_and_evaluate(state, step + 1)
            self.checkpoints.prune()
            self.events.write("end", step=int(state.step))
        except Preempted:
            self.save(state)
            raise
        finally:
            self.watchdog.close()
            self.writer.close()
        return state

    def has_stopped(self, step: int) -> bool:
        """Returns whether the run stops early after that many steps; process zero decides for all.

        It is asked again after evaluations only.
        """
        evaluation = self.trainer.experiment.evaluation
        if evaluation.patience is None or step not in self.scores:
            return False
        own = has_stopped(evaluation, self.scores, step)
        stopped: bool = processes.Exchange("stopped").all_gather(own)[0]
        if stopped:
            self.events.write("stopped", step=step)
            self.progress.say(
                step, f"stopped: no better score in {evaluation.patience} evaluations"
            )
        return stopped

    def received_signal(self) -> int:
        """Returns the signal on which all processes stop before the next step, or 0."""
        return self.agreed_signal if jax.process_count() > 1 else self.stop.received

    def is_evaluated(self, step: int) -> bool:
        """Returns whether the recipe wants a step to be evaluated; it wants the last one always."""
        every = self.trainer.experiment.evaluation.every
        last = step == self.training.steps
        return self.evaluate is not None and (last or bool(every and step % every == 0))

    def save_and_evaluate(self, state: TrainState, step: int) -> None:
        """Saves and evaluates where the recipe says so; every step that is evaluated is saved before."""
        evaluated, last = self.is_evaluated(step), step == self.training.steps
        if last or evaluated or step % self.training.save_every == 0:
            self.save(state, wait=last or evaluated)
        if evaluated:
            self.evaluate_state(state, step)

    def evaluate_state(self, state: TrainState, step: int) -> None:
        """Evaluates a saved state."""
        assert self.evaluate is not None
        start = time.perf_counter()
        with self.stop.region():
            values = self.evaluate(state)
        seconds = time.perf_counter() - start
        self.scores[step] = values.get("score", math.nan)
        self.checkpoints.record_score(step, self.scores[step])
        self.events.write("evaluated", step=step)
        share = goodput(self.directory, self.throughput.seconds_per_step)
        values |= {} if share is None else {"goodput": share}
        self.writer.write(step, values, kind="eval")
        self.progress.log_evaluation(step, values, seconds)
        self.throughput.read()

    def save(self, state: TrainState, *, wait: bool = True) -> None:
        """Logs the last step, so that a continued run misses no line, and saves."""
        self.log()
        self.writer.flush()
        self.checkpoints.save(state, self.stream)
        self.stop.trained = True
        if wait:
            self.checkpoints.wait()
        self.report_saved()

    def report_saved(self) -> None:
        """Reports the checkpoints that were finished in the meantime."""
        for step in self.checkpoints.take_newly_saved():
            self.events.write("saved", step=step)
            self.progress.say(step, "saved")

    def log(self) -> None:
        """Reads the metrics of the last dispatched step, checks and writes them."""
        if self.unread_metrics is None:
            return
        step, metrics, capacity = self.unread_metrics
        self.unread_metrics = None
        values = {name: float(value) for name, value in metrics.items()}
        self.agreed_signal = int(values.pop(STOP, 0))
        self.check_finite(values, step)
        self.throughput.add(values["tokens"], capacity=capacity)
        self.progress.advance(step)
        if self.sparse_steps < SPARSE_STEPS:
            self.sparse_steps = self.sparse_steps + 1 if 2 * values["tokens"] < capacity else 0
            if self.sparse_steps == SPARSE_STEPS:
                self.progress.say(step, f"more than half of the tokens are padding: {_SPARSE}")
        self.report_saved()
        if step % self.training.log_every == 0:
            values |= self.read_learning_rate(step)
            values |= self.throughput.read()
            self.writer.write(step, values, kind="train")
            self.progress.log_training(step, values)

    def read_learning_rate(self, step: int) -> dict[str, float]:
        """Returns the learning rate of a step for the log; nothing if it is not known."""
        if self.earlier_updates is None:
            return {}
        rate = self.trainer.learning_rate(self.earlier_updates + step)
        return {} if rate is None else {"learning_rate": rate}

    def check_finite(self, values: Mapping[str, float], step: int) -> None:
        """Raises a `NonFiniteLossError` where the loss or the gradient of a step is not finite."""
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                self.checkpoints.wait()
                newest = self.checkpoints.latest
                saved = (
                    "no checkpoint was saved yet" if newest is None else f"step {newest} is saved"
                )
                raise NonFiniteLossError(
                    f"the {name.replace('_', ' ')} of step {step} is {values[name]}; stopped, {saved}: "
                    "lower the learning rate, warm up longer or clip gradients, and start again"
                )
