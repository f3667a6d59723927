"""The training loop.

Each round of the loop saves a checkpoint and evaluates if these are due. The round then fetches a
batch, dispatches a step, and logs the previous step while the devices compute. Only the training
loop holds a state that changes.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Mapping

import jax

from synthesizer_jax.checkpoints.contents import BatchStream
from synthesizer_jax.checkpoints.manager import Checkpoints, finished_steps
from synthesizer_jax.evaluation.config import Evaluation
from synthesizer_jax.hosts import processes
from synthesizer_jax.hosts.preemption import Preempted, StopSignal
from synthesizer_jax.runs.events import read_events
from synthesizer_jax.runs.metrics import METRICS_FILE, read_scores
from synthesizer_jax.runs.progress import format_duration
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.run_log import STOP, RunLog
from synthesizer_jax.training.step import TrainState
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
    evaluation = trainer.experiment.evaluation
    has_several_processes = jax.process_count() > 1
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

        # Restore the newest checkpoint, or make a first state. Restoring may take minutes. Inside
        # `stop.region()`, a signal therefore ends the process at once. No training is lost, because
        # all earlier training is already saved.
        with stop.region():
            newest = max(checkpoints.steps, default=0)
            has_steps = newest < training.steps and not has_stopped(evaluation, scores, newest)
            state = _restore_or_init(
                trainer, checkpoints, stream, initialize, log=log, compiles=has_steps
            )
            start = int(state.step)
            # Scores of later steps were measured on states whose checkpoints are lost.
            scores = {step: score for step, score in scores.items() if step <= start}
        ready()
        log.begin(start)

        def save(state: TrainState, *, wait: bool) -> None:
            """Saves a checkpoint of `state`, after logging everything up to the step of `state`."""
            # A run that continues from this checkpoint does not log the earlier steps again.
            log.flush_files()
            checkpoints.save(state, stream)
            if wait:
                checkpoints.wait()
            log.report_saved()
            log.flush_writers()

        # The stack `trace` holds the profiler during a trace. The stack ends the trace even after
        # an error.
        trace = stack.enter_context(contextlib.ExitStack())

        # At the start of each round, `state` is the state after `step` steps.
        for step in range(start, training.steps + 1):
            if training.profile is not None and step == training.profile[1]:
                jax.block_until_ready(state)
                trace.close()

            # Save. A state is always saved before it is evaluated, so that a failure of the
            # evaluation loses no training.
            is_last = step == training.steps
            is_due = is_last or (step > 0 and evaluation.every and step % evaluation.every == 0)
            must_evaluate = bool(evaluate is not None and is_due and step not in scores)
            if step > start and (is_last or must_evaluate or step % training.save_every == 0):
                save(state, wait=is_last or must_evaluate)

            # Evaluate. If a signal interrupted the evaluation of the restored step, the first round
            # of the loop evaluates this step again.
            if evaluate is not None and must_evaluate:
                began = time.perf_counter()
                with stop.region():
                    values = evaluate(state)
                scores[step] = values.get("score", math.nan)
                checkpoints.record_score(step, scores[step])
                log.add_evaluation(step, values, time.perf_counter() - began)

            # Stop at the last step, if the score no longer improves, or after a signal. Several
            # processes must first agree on the signal, so that all processes stop at the same step.
            if is_last:
                break
            if evaluation.patience is not None and step in scores:
                stopped = has_stopped(evaluation, scores, step)
                if processes.all_gather("stopped", stopped)[0]:
                    text = f"stopped after {evaluation.patience} evaluations without a better score"
                    log.say(step, text, event="stopped")
                    break
            signal = log.agreed_signal if has_several_processes else stop.received
            if signal:
                save(state, wait=True)
                raise Preempted(signal)

            # Profile. The trace starts after saving, and after the devices have finished the
            # earlier steps.
            if training.profile is not None and step == training.profile[0]:
                jax.block_until_ready(state)
                trace.enter_context(jax.profiler.trace(str(directory / "profile")))
                log.say(step, f"profiling until step {training.profile[1]}")

            # Fetch. The step is compiled when a batch of a new shape occurs for the first time.
            batch = trainer.shard_batch(next(stream))
            if not trainer.is_compiled(batch):
                # The previous step must end before the clock is paused, because its time would not
                # count.
                log.flush()
                with log.throughput.pause():
                    trainer.compile(batch)
                log.say(step, f"compiled for {trainer.num_compiled} shapes")

            # Step. `trainer.step` only dispatches the step. While the devices compute this step,
            # `log.add_step` logs the previous step.
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = trainer.step(state, batch)

            # The rate of a matrix product is measured after the first step, so that the measurement
            # does not delay the step. It reads its results on the host, which users may have
            # forbidden for the rest of the loop with `jax.transfer_guard`.
            if step == start:
                jax.block_until_ready(metrics)
                with log.throughput.pause(), jax.transfer_guard("allow"):
                    log.throughput.utilizations = trainer.measure_utilization()

            if has_several_processes:
                metrics[STOP] = trainer.max_over_processes(stop.received, after=metrics["loss"])
            log.add_step(step + 1, batch, metrics)

        checkpoints.prune()
        log.add_event(int(state.step), "end")
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


def _restore_or_init(
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

    def restore_or_init() -> TrainState:
        """Returns the restored state, or the first state if there is no checkpoint."""
        state = checkpoints.restore_newest(trainer.layout.abstract, stream)
        return initialize(trainer) if state is None else state

    if not compiles:
        return restore_or_init()

    # XLA compiles in another thread while the state is restored or made. If restoring fails,
    # the error is raised without waiting for the compilation (`wait=False`).
    newest = max(checkpoints.steps, default=0)
    pool = processes.background_thread()
    try:
        log.say(newest, f"compiling: {trainer.description}")
        began = time.perf_counter()
        compiling = pool.submit(trainer.compile, lowered=trainer.trace().lower())
        state = restore_or_init()
        compiling.result()
        log.say(newest, f"ready in {format_duration(time.perf_counter() - began)}")
        return state
    finally:
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
