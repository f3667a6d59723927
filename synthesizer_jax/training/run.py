"""From an experiment to a finished run in a directory: data, loop, evaluation."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
from collections.abc import Callable, Sequence

import jax

from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.data.prefetching import PrefetchedStream
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.evaluation.evaluator import Evaluator, check_masked_tasks, log_values
from synthesizer_jax.evaluation.files import evaluation_folder, write_all_predictions, write_results
from synthesizer_jax.files import name_write_errors, storage_path
from synthesizer_jax.messages import escape_controls
from synthesizer_jax.models import TextToText
from synthesizer_jax.runs import code
from synthesizer_jax.runs.lock import lock_directory
from synthesizer_jax.runs.progress import summary_lines
from synthesizer_jax.runtime import processes
from synthesizer_jax.runtime.preemption import StopSignal
from synthesizer_jax.tasks import imported, task_registry
from synthesizer_jax.tasks.preparation import prepare_missing
from synthesizer_jax.tasks.streams import open_stream
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import find_checkpoint, initialize_from_checkpoint
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.movement import MOVEMENT_FILE, record_movement
from synthesizer_jax.training.run_directory import (
    check_same_run,
    open_vocabulary,
    resolve_vocabulary,
    save_run,
    with_vocabulary_path,
)
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.trainer import Trainer

_log = logging.getLogger(__name__)


def run(
    experiment: Experiment,
    directory: pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    trainer: Trainer | None = None,
    initial: Callable[[TrainState], TrainState] | None = None,
    devices: list[jax.Device] | None = None,
    visible: bool = True,
    own: code.Code = code.NOTHING,
) -> TrainState:
    """Trains, or continues, a run; everything it needs later lies in its directory.

    Args:
      experiment: what to do.
      directory: the run's; an unfinished run in it is continued.
      data_dir: where data sets lie; None is `task_registry.default_data_dir()`.
      trainer: what makes the steps; None: one that trains the experiment's model on its targets.
      initial: changes a fresh state; None: puts `init_from`'s parameters into it, if any.
      devices: None uses all devices.
      visible: show a progress bar.
      own: code that later commands need before they can load the run, recorded in its directory.

    Returns:
      The final state.

    Raises:
      Preempted: after SIGTERM or SIGINT, with everything saved.
      ValueError: the directory holds another run, or something does not fit. Nothing was written.
      InUseError: another process trains in the directory.
    """
    directory = storage_path(str(directory))  # also what `pathlib` makes of gs://…
    places = task_registry.default_data_dir() if data_dir is None else storage_path(str(data_dir))
    visible = visible and processes.is_process_zero()
    comes_from_elsewhere, source = initial is not None, None
    if experiment != experiment.starting_from(experiment.init_from) and not experiment.init_from:
        raise ValueError(
            "init_rules, init_share and init_optimizer say how a run starts from a checkpoint; set "
            "init_from, or leave them out"
        )
    if initial is None and experiment.init_from is not None:
        source = storage_path(experiment.init_from)
        find_checkpoint(source)  # fails before the data is read
        initial = functools.partial(
            initialize_from_checkpoint,
            experiment=experiment,
            source=source,
            report=print if visible else lambda _: None,
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(name_write_errors(directory))
        lock = stack.enter_context(contextlib.ExitStack())
        if processes.is_process_zero():
            lock.enter_context(lock_directory(directory))
        stop = stack.enter_context(StopSignal(release=lock.close))
        stop.trained = bool(finished_steps(directory / "checkpoints"))
        if visible:
            print(escape_controls(f"{directory}: reading {experiment.data.mixture}"), flush=True)
        with stop.region():
            experiment, vocabulary = _open_vocabulary(experiment, directory, places)
            check_masked_tasks(experiment.model, experiment.data)
            trainer = Trainer(experiment, devices) if trainer is None else trainer
            prepared = prepare_data(experiment, vocabulary, places)
            stream = open_stream(
                experiment.data,
                vocabulary,
                data_dir=places,
                shards=trainer.shards,
                saved=trainer.saved_shards,
            )
            evaluator = _make_evaluator(experiment, prepared)
            batches = stack.enter_context(PrefetchedStream(stream))
        state = train(
            trainer,
            batches,
            directory,
            stop=stop,
            evaluate=functools.partial(_evaluate, evaluator, directory, mesh=trainer.mesh),
            initial=initial,
            ready=functools.partial(_save_run_and_code, experiment, directory, own),
            visible=visible,
        )
        if not comes_from_elsewhere:
            with stop.region():
                _record_movement(trainer, state, directory, source=source)
    if visible:
        _print_summary(experiment, directory, int(state.step), data_dir=data_dir)
    return state


def _print_summary(
    experiment: Experiment, directory: pathlib.Path, step: int, *, data_dir: pathlib.Path | None
) -> None:
    """Prints what a finished run has reached and where it is, and what can be done with it."""
    prompt = "INPUT" if experiment.data.inputs_length else "TEXT"  # that is continued
    text = summary_lines(
        directory,
        steps=step,
        saved=finished_steps(directory / "checkpoints"),
        data_dir=data_dir,
        prompt=prompt if isinstance(experiment.model, TextToText) else None,
    )
    print(text, flush=True)


def _open_vocabulary(
    experiment: Experiment, directory: pathlib.Path, data_dir: pathlib.Path
) -> tuple[Experiment, Vocabulary]:
    """Returns the experiment of a run with its vocabulary, and that vocabulary."""
    with processes.process_zero_first("directory"):
        imported.add_imported(data_dir)
        experiment = resolve_vocabulary(experiment, data_dir)
        check_same_run(experiment, directory)
        return experiment, open_vocabulary(experiment, directory)


def _evaluate(
    evaluator: Evaluator,
    directory: pathlib.Path,
    state: TrainState,
    *,
    mesh: jax.sharding.Mesh,
) -> dict[str, float]:
    """Evaluates a state, writes results and predictions into the run's directory; returns the results."""
    results, overall = evaluator.measure(state.averaged_variables, mesh=mesh)
    if processes.is_process_zero():
        step = int(state.step)
        folder = evaluation_folder(directory, step)
        if evaluator.evaluation.save_predictions:
            pairs = zip(evaluator.sets, results, strict=True)
            write_all_predictions(folder, [pair for pair in pairs if not pair[0].is_text])
        write_results(folder, step, results, overall=overall)
    return log_values(results, overall)


def _record_movement(
    trainer: Trainer, state: TrainState, directory: pathlib.Path, *, source: pathlib.Path | None
) -> None:
    """Writes ``movement.json``; a run that is saved does not fail because what it started from is gone."""
    try:
        record_movement(trainer, state, directory, source=source)
    except (ValueError, OSError) as error:
        _log.warning("%s is not written: %s", MOVEMENT_FILE, error)


def _save_run_and_code(experiment: Experiment, directory: pathlib.Path, own: code.Code) -> None:
    if processes.is_process_zero():
        code.record_code(directory, own)
        save_run(experiment, directory)


def prepare_data(
    experiment: Experiment,
    vocabulary: Vocabulary,
    data_dir: pathlib.Path,
    *,
    training_splits: Sequence[str] | None = None,
    evaluation_splits: Sequence[str] | None = None,
) -> PreparedTasks:
    """Prepares what is missing of the data of a run, and returns where it is.

    Args:
      experiment: with its vocabulary.
      vocabulary: the vocabulary itself.
      data_dir: where data sets lie.
      training_splits: splits to train on; None: the experiment's.
      evaluation_splits: splits to evaluate on; None: the experiment's.
    """
    assert experiment.vocabulary is not None
    prepared = PreparedTasks(data_dir, vocabulary)
    with processes.process_zero_first("data"):
        prepare_missing(
            experiment.data,
            prepared,
            experiment.vocabulary,
            training_splits=(experiment.data.split,)
            if training_splits is None
            else training_splits,
            evaluation_splits=(experiment.evaluation.split,)
            if evaluation_splits is None
            else evaluation_splits,
            imports=code.imported_names(),
        )
    return prepared


def _make_evaluator(
    experiment: Experiment, prepared: PreparedTasks, *, only: list[str] | None = None
) -> Evaluator:
    return Evaluator(
        experiment.model, experiment.data, experiment.evaluation, prepared=prepared, only=only
    )


def open_data(
    experiment: Experiment,
    directory: pathlib.Path,
    data_dir: pathlib.Path,
    *,
    only: list[str] | None = None,
) -> tuple[Vocabulary, Evaluator]:
    """Returns a run's vocabulary, and what it is evaluated on.

    Args:
      experiment: with its vocabulary in `directory`.
      directory: the run's.
      data_dir: where data sets lie.
      only: see `Evaluator`.
    """
    imported.add_imported(data_dir)
    vocabulary = open_vocabulary(experiment, directory)
    experiment = with_vocabulary_path(experiment, directory)
    prepared = prepare_data(experiment, vocabulary, data_dir, training_splits=())
    return vocabulary, _make_evaluator(experiment, prepared, only=only)
