"""From an experiment to a finished run in a directory: data, loop, evaluation."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable

from synthesizer_jax.base.files import name_write_errors, storage_path
from synthesizer_jax.base.messages import escape_controls
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.data.pipeline import PrefetchedStream
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.hosts import processes
from synthesizer_jax.hosts.preemption import StopSignal
from synthesizer_jax.models import TextToText
from synthesizer_jax.runs import code
from synthesizer_jax.runs.lock import lock_directory
from synthesizer_jax.runs.progress import summary_lines
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.splits import open_stream
from synthesizer_jax.training import run_directory
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import initializer_of
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.run_data import evaluate_state, find_prepared
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.trainer import Trainer


def run(
    experiment: Experiment,
    directory: pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    trainer: Trainer | None = None,
    initial: Callable[[TrainState], TrainState] | None = None,
    prepare: Callable[[Experiment, pathlib.Path], None] | None = None,
    visible: bool = True,
    user_code: code.Code = code.NOTHING,
) -> TrainState:
    """Trains, or continues, a run; everything it needs later lies in its directory.

    Args:
      experiment: what to do.
      directory: the run's; an unfinished run in it is continued.
      data_dir: where data sets lie; None is `task_registry.default_data_dir()`.
      trainer: what makes the steps; None: one that trains the experiment's model on its targets.
      initial: changes a fresh state; None: puts `init_from`'s parameters into it, if any.
      prepare: prepares what is missing in the data directory, once all else is checked; None: nothing may
        be missing.
      visible: show a progress bar.
      user_code: code that later commands need before they can load the run, recorded in its directory.

    Returns:
      The final state.

    Raises:
      FileNotFoundError: the data is not prepared; the message has the command that prepares it.
      Preempted: after SIGTERM or SIGINT, with everything saved.
      ValueError: the directory holds another run, or something does not fit. Nothing was written into it.
      InUseError: another process trains in the directory.
    """
    directory = storage_path(str(directory))  # also what `pathlib` makes of gs://…
    data_path = storage_path(str(data_dir or task_registry.default_data_dir()))
    first = processes.is_process_zero()
    visible = visible and first
    if initial is None:
        initial = initializer_of(experiment, report=print if visible else lambda _: None)
    if visible:
        print(escape_controls(f"{directory}: reading {experiment.data.mixture}"), flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(name_write_errors(directory))
        stop = stack.enter_context(StopSignal())
        with stop.region():
            task_registry.add_imported(data_path)
            experiment = run_directory.find_vocabulary(experiment, data_path)
            run_directory.check_same_run(experiment, directory)
            if prepare is not None:
                prepare(experiment, data_path)
            prepared = find_prepared(experiment, data_path)
            trainer = Trainer(experiment) if trainer is None else trainer
            evaluator = Evaluator(
                experiment.model, experiment.data, experiment.evaluation, prepared=prepared
            )
            stream = open_stream(
                experiment.data,
                prepared.vocabulary,
                data_dir=data_path,
                shards=trainer.shards,
                saved=trainer.saved_shards,
            )
            batches = stack.enter_context(PrefetchedStream(stream))
        if first:
            stack.enter_context(lock_directory(directory))

        def save_run() -> None:
            if first:
                code.record_code(directory, user_code)
                run_directory.save_run(experiment, directory)

        state = train(
            trainer,
            batches,
            directory,
            stop=stop,
            evaluate=functools.partial(evaluate_state, evaluator, directory, mesh=trainer.mesh),
            initial=initial,
            ready=save_run,
            visible=visible,
        )
    if visible:
        prompt = "INPUT" if experiment.data.inputs_length else "TEXT"  # that is continued
        prompt = prompt if isinstance(experiment.model, TextToText) else ""
        saved, steps = finished_steps(directory / "checkpoints"), int(state.step)
        text = summary_lines(directory, steps, saved, data_dir=data_dir, prompt=prompt)
        print(text, flush=True)
    return state
