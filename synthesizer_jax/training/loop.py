"""The training loop: save, evaluate, fetch, step, log the step before.

Only this loop holds a changing state.
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
"""Measures a state; the entry ``score`` (higher is better) chooses the best checkpoint."""


def train(
    trainer: Trainer,
    stream: BatchStream,
    directory: pathlib.Path,
    *,
    stop: StopSignal,
    evaluate: Evaluate | None = None,
    initial: Callable[[Trainer], TrainState] = Trainer.init,
    ready: Callable[[], None] = lambda: None,
    visible: bool = True,
) -> TrainState:
    """Trains to `training.steps`, from the directory's newest checkpoint if there is one.

    It ends earlier when `evaluation.patience` is used up; then it does nothing more when it is continued,
    unless the patience is larger.

    ``events.jsonl`` tells when what happened. The log has the model FLOP/s utilization ``mfu``, where the
    published peak of the devices is known, and ``product_utilization``, against a matrix product measured
    after the first step.

    Args:
      trainer: makes the steps of an experiment.
      stream: its batches.
      directory: where checkpoints and logs lie.
      stop: listens for signals.
      evaluate: measures a state every `evaluation.every` steps and at the end, after it was saved.
      initial: makes the state of a run that begins, such as from a checkpoint's parameters.
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
    with contextlib.ExitStack() as stack:
        stack.callback(checkpoints.close)
        log = RunLog(trainer.experiment, directory, checkpoints, visible=visible)
        stack.push(lambda kind, error, traceback: log.close(error))

        # Continue where the run was saved, or start. While work that may take minutes is inside of
        # `stop.region()`, a signal ends the process at once: everything is saved, or there is nothing.
        with stop.region():
            newest = max(checkpoints.steps, default=0)
            has_steps = newest < training.steps and not has_stopped(evaluation, scores, newest)
            if has_steps:  # XLA compiles while the state is read or made; an error there does not wait
                pool = processes.background_thread()
                stack.callback(pool.shutdown, wait=False)
                log.say(newest, f"compiling: {trainer.description}")
                began = time.perf_counter()
                compiling = pool.submit(trainer.compile, lowered=trainer.trace().lower())
            state = checkpoints.restore_newest(trainer.layout.abstract, stream) or initial(trainer)
            if has_steps:
                compiling.result()
                log.say(newest, f"ready in {format_duration(time.perf_counter() - began)}")
            start = int(state.step)
            scores = {step: score for step, score in scores.items() if step <= start}
        ready()
        log.begin(start)

        def save(state: TrainState, *, wait: bool) -> None:
            log.flush_files()  # everything is logged that a continued run would not log again
            checkpoints.save(state, stream)
            if wait:
                checkpoints.wait()
            log.report_saved()
            log.flush_writers()

        trace = stack.enter_context(contextlib.ExitStack())
        for step in range(start, training.steps + 1):  # `state` has done `step` steps
            if training.profile is not None and step == training.profile[1]:
                jax.block_until_ready(state)
                trace.close()

            # Save. A step that is evaluated is saved before, so an evaluation that fails loses nothing.
            last = step == training.steps
            due = last or bool(evaluation.every and step and step % evaluation.every == 0)
            must_evaluate = evaluate is not None and due and step not in scores
            if step > start and (last or must_evaluate or step % training.save_every == 0):
                save(state, wait=last or must_evaluate)

            # Evaluate. The first round makes up for an evaluation that a signal has cut off.
            if evaluate is not None and must_evaluate:
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
                stopped = has_stopped(evaluation, scores, step)
                if processes.all_gather("stopped", stopped)[0]:
                    text = f"stopped: no better score in {evaluation.patience} evaluations"
                    log.say(step, text, event="stopped")
                    break
            if signal := log.agreed_signal if jax.process_count() > 1 else stop.received:
                save(state, wait=True)
                raise Preempted(signal)

            # Profile. Neither what the devices have not computed yet nor what was just saved is part of it.
            if training.profile is not None and step == training.profile[0]:
                jax.block_until_ready(state)
                trace.enter_context(jax.profiler.trace(str(directory / "profile")))
                log.say(step, f"profiling to step {training.profile[1]}")

            # Fetch. Batches of another shape than those before need a program of their own.
            batch = trainer.shard_batch(next(stream))
            if not trainer.is_compiled(batch):
                log.flush()  # the last step has ended when the clock stops
                with log.throughput.pause():
                    trainer.compile(batch)
                log.say(step, f"compiled for {trainer.num_compiled} shapes")

            # Step. This only dispatches it; while the devices compute, the step before is logged.
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = trainer.step(state, batch)
            if step == start:  # not before: the first step need not wait for this
                jax.block_until_ready(metrics)
                with log.throughput.pause(), jax.transfer_guard("allow"):
                    log.throughput.utilizations = trainer.measure_utilization()
            if jax.process_count() > 1:
                metrics[STOP] = trainer.max_over_processes(stop.received, after=metrics["loss"])
            log.add_step(step + 1, batch, metrics)

        checkpoints.prune()
        log.add_event(int(state.step), "end")
    return state


def is_finished(training: Training, evaluation: Evaluation, directory: pathlib.Path) -> bool:
    """Returns whether the newest checkpoint of a run is its last one; see `Training` and `has_stopped`."""
    newest = max(finished_steps(directory / "checkpoints"), default=0)
    scores = read_scores(directory / METRICS_FILE)
    return newest >= training.steps or has_stopped(evaluation, scores, newest)


def has_stopped(evaluation: Evaluation, scores: Mapping[int, float], step: int) -> bool:
    """Returns whether a run that has finished `step` steps has used up the patience of its evaluation.

    That is, whether so many evaluations in a row, up to the last, were not better than the best before
    them. The best is the last score that was better, not the maximum: smaller gains than
    `Evaluation.min_improvement` add up until together they exceed it. Evaluations without a score (NaN) do
    not count.

    Args:
      evaluation: with its `patience`; None: it never stops.
      scores: the score by step; those of later steps, which were lost with their checkpoints, do not count.
      step: number of finished steps.
    """
    best, count = -math.inf, 0
    for measured in sorted(s for s in scores if s <= step):
        if scores[measured] > best + evaluation.min_improvement:
            best, count = scores[measured], 0
        elif math.isfinite(scores[measured]):
            count += 1
    return evaluation.patience is not None and count >= evaluation.patience
