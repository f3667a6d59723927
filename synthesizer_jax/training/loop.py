"""The training loop.

`train` contains the loop. Each round saves a checkpoint and evaluates if these are due. The round
then fetches a batch, dispatches a step, and logs the previous step while the devices compute.
`_Loop` has a method for each part of a round. Only the variable `state` in `train` holds a state
that changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Mapping

import jax

from synthesizer_jax.checkpoints.contents import BatchStream
from synthesizer_jax.checkpoints.manager import Checkpoints, finished_steps
from synthesizer_jax.evaluation.config import Evaluation
from synthesizer_jax.hosts import processes
from synthesizer_jax.hosts.compilation_cache import shown_compilation_cache
from synthesizer_jax.hosts.preemption import Preempted, StopSignal
from synthesizer_jax.runs.events import read_events
from synthesizer_jax.runs.metrics import METRICS_FILE, read_scores
from synthesizer_jax.runs.progress import format_duration
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.run_log import STOP, RunLog
from synthesizer_jax.training.step import Batch, TrainState
from synthesizer_jax.training.trainer import Trainer

Evaluate = Callable[[TrainState], dict[str, float]]
"""A function that measures a state and returns measures by name.

The entry ``score`` (higher is better) determines which checkpoints are the best.
"""


def train(
    trainer: Trainer,
    stream: BatchStream,
    directory: pathlib.Path,
    *,
    stop: StopSignal,
    evaluate: Evaluate | None = None,
    initialize: Callable[[Trainer], TrainState] = Trainer.init,
    ready: Callable[[], None] = lambda: None,
    visible: bool = True,
) -> TrainState:
    """Trains until step `training.steps`, starting from the newest checkpoint if it exists.

    Training ends earlier if the score has not improved for `evaluation.patience` evaluations. A run
    that has stopped early does not train further when it is continued, unless the patience is
    larger.

    The function writes events with their times to ``events.jsonl``. The logged metrics include two
    utilizations of the devices. ``mfu`` is the model FLOP/s utilization, and is logged if the
    published peak rate of the devices is known. ``product_utilization`` is relative to the rate of
    a matrix product, which is measured after the first step.

    Args:
      trainer: makes the steps of an experiment.
      stream: the batches of the experiment.
      directory: the run directory, for checkpoints and logs.
      stop: the object that receives the signals that ask the run to stop.
      evaluate: a function that measures a state every `evaluation.every` steps and at the end,
        after the state is saved.
      initialize: a function that makes the first state of a new run, for example from the
        parameters of a checkpoint.
      ready: a function that is called when the state exists and the step is compiled. Nothing is
        written before this call.
      visible: whether to show progress.

    Returns:
      The final state.

    Raises:
      Preempted: a SIGTERM or SIGINT was received. All finished steps are saved.
      NonFiniteLossError: the run diverged. The last good checkpoint is unchanged.
      FileNotFoundError: the run has saved checkpoints, but its directory contains none.
    """
    training = trainer.experiment.training
    scores = read_scores(directory / METRICS_FILE)
    checkpoints = Checkpoints(
        directory / "checkpoints",
        keep_latest=training.keep_latest,
        keep_best=training.keep_best,
        scores=scores,
    )
    _check_not_lost(checkpoints, directory)

    with contextlib.ExitStack() as stack:
        stack.callback(checkpoints.close)
        log = RunLog(trainer.experiment, directory, checkpoints, visible=visible)
        # If an error ends the run, the log records the error.
        stack.push(lambda kind, error, traceback: log.close(error))

        # Restoring a checkpoint or making a first state may take minutes. Inside `stop.region()`, a
        # signal therefore ends the process at once. No training is lost, because all earlier
        # training is already saved.
        with stop.region():
            has_steps = not is_finished(training, trainer.experiment.evaluation, directory)
            state = _restore_or_initialize(
                trainer, checkpoints, stream, initialize, log=log, compiles=has_steps
            )
            start = int(state.step)
        ready()
        log.begin(start)

        loop = _Loop(
            trainer=trainer,
            stream=stream,
            directory=directory,
            stop=stop,
            evaluate=evaluate,
            checkpoints=checkpoints,
            log=log,
            start=start,
            # Scores of later steps were measured on states whose checkpoints are lost.
            scores={step: score for step, score in scores.items() if step <= start},
            trace=stack.enter_context(contextlib.ExitStack()),
        )

        # At the start of each round, `state` is the state after `step` steps.
        for step in range(start, training.steps + 1):
            loop.end_profile(state, step)
            loop.save_and_evaluate(state, step)
            if loop.has_ended(step):
                break
            loop.stop_after_signal(state)
            loop.begin_profile(state, step)
            batch = loop.next_batch(step)
            state = loop.dispatch_step(state, batch, step)

        checkpoints.prune()
        log.add_event(int(state.step), "end")
    return state


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The parts of a round of the training loop, in the order in which `train` calls them.

    In all methods, `step` is the number of finished steps, and `state` is the state after these
    steps.

    Attributes:
      trainer: see `train`.
      stream: see `train`.
      directory: see `train`.
      stop: see `train`.
      evaluate: see `train`.
      checkpoints: the checkpoints of the run.
      log: the log of the run.
      start: the number of steps that were finished before the first round.
      scores: the scores of evaluated steps. New evaluations add their scores.
      trace: a stack that holds the profiler during a trace. The stack ends the trace even after an
        error.
    """

    trainer: Trainer
    stream: BatchStream
    directory: pathlib.Path
    stop: StopSignal
    evaluate: Evaluate | None
    checkpoints: Checkpoints
    log: RunLog
    start: int
    scores: dict[int, float]
    trace: contextlib.ExitStack

    @property
    def training(self) -> Training:
        """The settings of training."""
        return self.trainer.experiment.training

    @property
    def evaluation(self) -> Evaluation:
        """The settings of the evaluation."""
        return self.trainer.experiment.evaluation

    def end_profile(self, state: TrainState, step: int) -> None:
        """Ends the trace if its last step is finished, before anything is saved or evaluated."""
        if self.training.profile is not None and step == self.training.profile[1]:
            jax.block_until_ready(state)
            self.trace.close()

    def save_and_evaluate(self, state: TrainState, step: int) -> None:
        """Saves and evaluates the state if this is due."""
        every = self.evaluation.every
        is_last = step == self.training.steps
        is_due = is_last or (step > 0 and every > 0 and step % every == 0)
        # If a signal interrupted the evaluation of the restored step, this step has no score, and
        # the first round evaluates it again.
        must_evaluate = self.evaluate is not None and is_due and step not in self.scores

        # A state is always saved before it is evaluated, so that a failure of the evaluation loses
        # no training.
        must_save = is_last or must_evaluate or step % self.training.save_every == 0
        if must_save and step > self.start:
            self._save(state, wait=is_last or must_evaluate)

        if self.evaluate is not None and must_evaluate:
            began = time.perf_counter()
            with self.stop.region():
                values = self.evaluate(state)
            self.scores[step] = values.get("score", math.nan)
            self.checkpoints.record_score(step, self.scores[step])
            self.log.add_evaluation(step, values, time.perf_counter() - began)

    def _save(self, state: TrainState, *, wait: bool) -> None:
        """Saves a checkpoint of a state, after logging everything up to the step of the state."""
        # A run that continues from this checkpoint does not log the earlier steps again.
        self.log.flush_files()
        self.checkpoints.save(state, self.stream)
        if wait:
            self.checkpoints.wait()
        self.log.report_saved()
        self.log.flush_writers()

    def has_ended(self, step: int) -> bool:
        """Returns whether all steps are finished, or the score does not improve any more."""
        if step == self.training.steps:
            return True
        if self.evaluation.patience is None or step not in self.scores:
            return False
        # All processes must stop at the same step, so they use the answer of process 0.
        stopped = has_stopped(self.evaluation, self.scores, step)
        if not processes.all_gather("stopped", stopped)[0]:
            return False
        text = f"stopped after {self.evaluation.patience} evaluations without a better score"
        self.log.say(step, text, event="stopped")
        return True

    def stop_after_signal(self, state: TrainState) -> None:
        """Saves the state and raises `Preempted` if the run has received a signal.

        Several processes must first agree on the signal, so that all processes stop at the same
        step.
        """
        signal = self.log.agreed_signal if jax.process_count() > 1 else self.stop.received
        if signal:
            self._save(state, wait=True)
            raise Preempted(signal)

    def begin_profile(self, state: TrainState, step: int) -> None:
        """Begins the trace if this is due.

        The trace begins after saving, and after the devices have finished the earlier steps, so
        that it contains neither of them.
        """
        if self.training.profile is not None and step == self.training.profile[0]:
            jax.block_until_ready(state)
            self.trace.enter_context(jax.profiler.trace(str(self.directory / "profile")))
            self.log.say(step, f"profiling until step {self.training.profile[1]}")

    def next_batch(self, step: int) -> Batch:
        """Fetches a batch, and compiles the step if this is the first batch of its shape."""
        batch = self.trainer.shard_batch(next(self.stream))
        if not self.trainer.is_compiled(batch):
            # The previous step must end before the clock is paused, because its time would not
            # count.
            self.log.flush()
            with self.log.throughput.pause():
                self.trainer.compile(batch)
            self.log.say(step, f"compiled for {self.trainer.num_compiled} shapes")
        return batch

    def dispatch_step(self, state: TrainState, batch: Batch, step: int) -> TrainState:
        """Dispatches a step, and returns its state, which the devices may still be computing.

        While the devices compute this step, the metrics of the previous step are logged.
        """
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, metrics = self.trainer.step(state, batch)

        # The rate of a matrix product is measured after the first step, so that the measurement
        # does not delay the step. It reads its results on the host, which users may have forbidden
        # for the rest of the loop with `jax.transfer_guard`.
        if step == self.start:
            jax.block_until_ready(metrics)
            with self.log.throughput.pause(), jax.transfer_guard("allow"):
                self.log.throughput.utilizations = self.trainer.measure_utilization()

        if jax.process_count() > 1:
            # The log reads this metric one step later, removes it from the metrics, and stores it
            # as `agreed_signal`, which `stop_after_signal` reads.
            received = self.stop.received
            metrics[STOP] = self.trainer.max_over_processes(received, after=metrics["loss"])
        self.log.add_step(step + 1, batch, metrics)
        return state


def _check_not_lost(checkpoints: Checkpoints, directory: pathlib.Path) -> None:
    """Raises a `FileNotFoundError` if a run has saved checkpoints, but its directory has none.

    Without this check, the run would begin again from step 0, for example if the directory of its
    checkpoints is not mounted.
    """
    saved = [event["step"] for event in read_events(directory) if event["event"] == "saved"]
    if saved and not checkpoints.steps:
        raise FileNotFoundError(
            f"{directory / 'checkpoints'} contains no checkpoint, but the run has saved step "
            f"{max(saved)}. Mount or restore this directory, or start in a new --workdir."
        )


def _restore_or_initialize(
    trainer: Trainer,
    checkpoints: Checkpoints,
    stream: BatchStream,
    initialize: Callable[[Trainer], TrainState],
    *,
    log: RunLog,
    compiles: bool,
) -> TrainState:
    """Restores the newest checkpoint, or makes a first state if there are no checkpoints.

    Args:
      trainer: makes the steps.
      checkpoints: the checkpoints of the run.
      stream: the batches. The stream is moved to the position of the restored checkpoint.
      initialize: makes the first state if there is no checkpoint.
      log: the log of the run.
      compiles: whether to compile the step at the same time. If no steps are left, `compiles` is
        false.
    """

    def restore_or_initialize() -> TrainState:
        """Returns the restored state, or the first state if there is no checkpoint."""
        state = checkpoints.restore_newest(trainer.layout.abstract, stream)
        return initialize(trainer) if state is None else state

    if not compiles:
        return restore_or_initialize()

    newest = max(checkpoints.steps, default=0)
    pool = processes.background_thread()
    try:
        log.say(newest, f"compiling: {trainer.description}")
        began = time.perf_counter()
        # A setting of JAX, such as `jax.threefry_partitionable`, may apply only to the thread in
        # which the caller has set it. The step is therefore traced, and the state is made, in this
        # thread. Only XLA's compilation runs in another thread.
        lowered = trainer.trace().lower()
        compiling = pool.submit(trainer.compile, lowered=lowered)
        state = restore_or_initialize()
        compiling.result()
        said = f"ready in {format_duration(time.perf_counter() - began)}"
        cache = shown_compilation_cache()
        if cache is not None:
            said += f" (compiled programs are kept in {cache})"
        log.say(newest, said)
        return state
    finally:
        # If restoring fails, the error is raised without waiting for the compilation.
        pool.shutdown(wait=False)


def is_finished(training: Training, evaluation: Evaluation, directory: pathlib.Path) -> bool:
    """Returns whether a run needs no more training.

    A run needs no more training if its newest checkpoint is the checkpoint of its last step. A run
    that has stopped early also needs no more training; see `has_stopped`.
    """
    newest = max(finished_steps(directory / "checkpoints"), default=0)
    scores = read_scores(directory / METRICS_FILE)
    return newest >= training.steps or has_stopped(evaluation, scores, newest)


def has_stopped(evaluation: Evaluation, scores: Mapping[int, float], step: int) -> bool:
    """Returns whether a run has stopped early after `step` steps because its score did not improve.

    A run stops after `Evaluation.patience` evaluations in a row without an improvement. An
    evaluation is an improvement if its score exceeds the best score by more than
    `Evaluation.min_improvement`. The best score is the score of the last improvement, which may be
    less than the maximum. Several small gains together can therefore count as an improvement.
    Evaluations without a score (NaN) are ignored.

    Args:
      evaluation: the settings of the evaluation. If its `patience` is None, the run never stops
        early.
      scores: the scores by step. Scores after `step` are ignored, because the checkpoints of later
        steps were lost.
      step: number of finished steps.
    """
    if evaluation.patience is None:
        return False
    best = -math.inf
    not_better = 0  # the number of evaluations since the last improvement
    for measured in sorted(s for s in scores if s <= step):
        if scores[measured] > best + evaluation.min_improvement:
            best = scores[measured]
            not_better = 0
        elif math.isfinite(scores[measured]):
            not_better += 1
    return not_better >= evaluation.patience
