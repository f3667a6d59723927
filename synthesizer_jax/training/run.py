"""Trains or continues a run in a directory: reads the data, runs the loop, and evaluates."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import shlex
from collections.abc import Callable, Sequence

from synthesizer_jax.base.files import name_write_errors, storage_path
from synthesizer_jax.base.messages import escape_controls
from synthesizer_jax.base.typing import AUTO
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.data.pipeline import PrefetchedStream
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes, FileVocabulary, SentencePiece
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.evaluation.scoring import (
    evaluation_folder,
    flatten_results,
    write_predictions,
    write_results,
)
from synthesizer_jax.hosts import processes
from synthesizer_jax.hosts.preemption import StopSignal
from synthesizer_jax.models import TextToText
from synthesizer_jax.runs import code
from synthesizer_jax.runs.lock import lock_directory
from synthesizer_jax.runs.progress import summary_lines
from synthesizer_jax.runs.saved import open_vocabulary
from synthesizer_jax.tasks import synthetic, task_registry
from synthesizer_jax.tasks.splits import is_current, open_stream, requested_splits
from synthesizer_jax.training import run_directory
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.first_state import initializer_of
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.source import find_source, write_source
from synthesizer_jax.training.step import TrainState
from synthesizer_jax.training.trainer import Trainer


def run(
    experiment: Experiment,
    directory: pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    trainer: Trainer | None = None,
    initialize: Callable[[Trainer], TrainState] | None = None,
    prepare: Callable[[Experiment, pathlib.Path], None] | None = None,
    visible: bool = True,
    user_code: code.Code = code.NOTHING,
) -> TrainState:
    """Trains a run, or continues it if its directory contains an unfinished run.

    The directory afterwards contains everything that is needed to use the model or to continue.

    Args:
      experiment: the configuration of the run. If the model dtype is ``auto``, a run that continues
        uses its recorded dtype. A new run uses the default dtype of the devices, and records this
        dtype.
      directory: the run directory.
      data_dir: the directory of data sets. None means `task_registry.default_data_dir()`.
      trainer: the trainer, which makes the training steps. The default is a `Trainer` that trains
        the experiment's model on the targets of the data.
      initialize: a function that makes the first state of a new run. By default, the run starts
        from `init_from`, or from random parameters if `init_from` is not set.
      prepare: a function that prepares data that is missing in the data directory. The function is
        called after everything else is checked. None means that all data must be prepared already.
      visible: whether to show a progress bar.
      user_code: code that later commands need in order to load the run. This code is recorded in
        the run directory.

    Returns:
      The final state.

    Raises:
      FileNotFoundError: the data is not prepared. The message contains the command that prepares
        the data.
      Preempted: a SIGTERM or SIGINT was received. All finished steps are saved.
      ValueError: the directory holds another run, or settings do not fit together. Nothing was
        written into the directory.
      InUseError: another process trains in the directory.
    """
    # `pathlib.Path` changes gs://… to gs:/…, which `storage_path` understands as well.
    directory = storage_path(str(directory))
    data_path = storage_path(str(data_dir or task_registry.default_data_dir()))
    first = processes.is_process_zero()
    visible = visible and first
    report: Callable[[str], object] = print if visible else lambda _: None
    is_auto = experiment.model.dtype == AUTO
    experiment = run_directory.find_dtype(experiment, directory)
    if initialize is None:
        # A missing checkpoint is reported here, before any data is read. `initialize` keeps the
        # experiment of this moment, to which the vocabulary and the base of the adapters are added
        # only below. `initialize` does not read the vocabulary, and the trainer reads the base.
        initialize = initializer_of(experiment, report=report)
    if visible:
        print(escape_controls(f"{directory}: reading {experiment.data.mixture}"), flush=True)
        if is_auto:
            print(f"model.dtype=auto is {experiment.model.dtype}", flush=True)

    with contextlib.ExitStack() as stack:
        stack.enter_context(name_write_errors(directory, "Files that were finished are kept"))
        stop = stack.enter_context(StopSignal())
        # Nothing has to be saved yet. Inside `stop.region()`, a signal therefore ends the process
        # at once, instead of only being recorded for the training loop.
        with stop.region():
            # Add the tasks that the command `data import` has written into the data directory.
            task_registry.add_imported(data_path)
            experiment = run_directory.find_vocabulary(experiment, data_path)
            experiment = run_directory.find_base(experiment, directory)
            run_directory.check_same_run(experiment, directory)
            source = find_source(experiment, directory)
            if trainer is None:
                trainer = Trainer(experiment)
            # Preparation may take hours, so everything else that can be wrong is checked first.
            if prepare is not None:
                prepare(experiment, data_path)
            prepared = find_prepared(experiment, data_path)
            trainer.read_base(report)
            evaluator = Evaluator(
                experiment.model, experiment.data, experiment.evaluation, prepared=prepared
            )
            stream = open_stream(
                experiment.data,
                prepared.vocabulary,
                data_dir=data_path,
                ids=experiment.model.ids,
                shards=trainer.shards,
                saved=trainer.saved_shards,
            )
            batches = stack.enter_context(PrefetchedStream(stream))
        if first:
            stack.enter_context(lock_directory(directory))

        def save_run() -> None:
            """Records what defines the run, before anything else is written."""
            if first:
                code.record_code(directory, user_code)
                run_directory.save_run(experiment, directory)
                write_source(source, directory)

        state = train(
            trainer,
            batches,
            directory,
            stop=stop,
            evaluate=functools.partial(evaluate_state, evaluator, directory, trainer=trainer),
            initialize=initialize,
            ready=save_run,
            visible=visible,
        )
    if visible:
        # `prompt` is a placeholder in the suggested command. The placeholder stands for a text that
        # an encoder reads, or for a text that a language model continues.
        prompt = ""
        if isinstance(experiment.model, TextToText):
            prompt = "INPUT" if experiment.data.inputs_length else "TEXT"
        saved = finished_steps(directory / "checkpoints")
        text = summary_lines(directory, int(state.step), saved, data_dir=data_dir, prompt=prompt)
        print(text, flush=True)
    return state


def find_prepared(
    experiment: Experiment, data_dir: pathlib.Path, *, trains: bool = True, only: Sequence[str] = ()
) -> PreparedTasks:
    """Returns the prepared data of a run, after checking that it is complete and up to date.

    Args:
      experiment: an experiment with the absolute path of its vocabulary.
      data_dir: the directory of data sets.
      trains: whether training data is needed too, and not only evaluation data.
      only: names of the tasks to evaluate. An empty sequence means all tasks.

    Raises:
      FileNotFoundError: data is missing or outdated. The message contains the command that prepares
        the data.
    """
    if missing := missing_preparation(experiment, data_dir, trains=trains, only=only):
        raise FileNotFoundError(
            f"The mixture {experiment.data.mixture} is not prepared in {data_dir} with the "
            "settings of this run, or it has changed since it was prepared. Run "
            f"'{shlex.join(['synthesizer-jax', *missing])}', or call "
            "preparation.experiment.prepare_data(experiment, data_dir) in Python."
        )
    vocabulary = open_vocabulary(experiment.vocabulary, data_dir, model=experiment.model)
    return PreparedTasks(data_dir, vocabulary)


def missing_preparation(
    experiment: Experiment, data_dir: pathlib.Path, *, trains: bool = True, only: Sequence[str] = ()
) -> list[str]:
    """Returns the arguments of ``synthesizer-jax`` that prepare the missing data of a run.

    The list is empty if all data is prepared. If the original data sets are not available, prepared
    data cannot be compared with them. Any prepared data of the mixture is then accepted.

    Args:
      experiment: an experiment with the absolute path of its vocabulary.
      data_dir: the directory of data sets.
      trains: whether training data is needed too, and not only evaluation data.
      only: names of the tasks to evaluate. An empty sequence means all tasks.

    Raises:
      FileNotFoundError: nothing is prepared, and the original data sets are not available.
    """
    data, vocabulary = experiment.data, experiment.vocabulary
    assert vocabulary is not None
    name = vocabulary.path if isinstance(vocabulary, FileVocabulary) else "bytes"
    options = ["--vocabulary", name]
    if isinstance(vocabulary, Bytes | SentencePiece):
        options += ["--extra-ids", str(vocabulary.extra_ids)]
    if isinstance(vocabulary, SentencePiece) and vocabulary.bos:
        options.append("--bos")

    # The vocabulary of synthetic data is generated together with the data, so the command needs no
    # options for it. Before the first preparation, its file does not exist yet.
    generated_file = synthetic.vocabulary(data_dir).file
    is_generated = isinstance(vocabulary, SentencePiece) and vocabulary.file == generated_file
    if is_generated:
        options = []
    if not is_generated or generated_file.is_file():
        built = open_vocabulary(vocabulary, data_dir, model=experiment.model)
        prepared = PreparedTasks(data_dir, built)
        if _is_prepared(experiment, prepared, trains=trains, only=only):
            return []
    return [
        *("data", "prepare", data.mixture, "--data-dir", str(data_dir), *options),
        f"--inputs-length={data.lengths['inputs']}",
        f"--targets-length={data.lengths['targets']}",
        f"--split={data.split if trains else ''}",
        f"--evaluation-split={experiment.evaluation.split}",
        *(f"--task={name}" for name in only),
        *(f"--import={name}" for name in code.imported_names()),
    ]


def _is_prepared(
    experiment: Experiment, prepared: PreparedTasks, *, trains: bool, only: Sequence[str]
) -> bool:
    """Returns whether all data that a run reads is prepared and up to date."""
    data = experiment.data
    requested = functools.partial(requested_splits, data.mixture, prepared.data_dir, only=only)
    try:
        requests = requested(training_splits=(), evaluation_splits=[experiment.evaluation.split])
        if trains:
            requests += requested(training_splits=[data.split], evaluation_splits=())
    except FileNotFoundError:
        if prepared.rates(data.mixture) is not None:
            return True
        if data.mixture in synthetic.MIXTURES:  # preparation generates these data sets
            return False
        raise
    rates = task_registry.mixture_rates(data.mixture, prepared.data_dir)
    return prepared.rates(data.mixture) == rates and all(
        is_current(request, prepared, lengths=data.lengths) for request in requests
    )


def open_evaluator(
    experiment: Experiment,
    directory: pathlib.Path,
    data_dir: pathlib.Path,
    *,
    only: list[str] | None = None,
) -> Evaluator:
    """Returns the evaluator of a run, whose vocabulary is in the run directory.

    Args:
      experiment: the experiment of the run.
      directory: the run directory.
      data_dir: the directory of data sets.
      only: names of the tasks to evaluate. None means all tasks.

    Raises:
      FileNotFoundError: the data is not prepared; see `find_prepared`.
    """
    task_registry.add_imported(data_dir)
    experiment = run_directory.with_vocabulary_path(experiment, directory)
    prepared = find_prepared(experiment, data_dir, trains=False, only=only or ())
    model, data, evaluation = experiment.model, experiment.data, experiment.evaluation
    return Evaluator(model, data, evaluation, prepared=prepared, only=only)


def evaluate_state(
    evaluator: Evaluator, directory: pathlib.Path, state: TrainState, *, trainer: Trainer
) -> dict[str, float]:
    """Evaluates a state and writes results and predictions into the run directory.

    Returns:
      The overall measures, and the measures of every task, by name.
    """
    results, overall = evaluator.measure(trainer.averaged_variables(state), mesh=trainer.mesh)
    if processes.is_process_zero():
        step = int(state.step)
        folder = evaluation_folder(directory, step)
        for examples, result in zip(evaluator.sets, results, strict=True):
            if evaluator.evaluation.save_predictions and not examples.task.is_text:
                write_predictions(folder, result, examples=examples)
        write_results(folder, step, results, overall=overall)
    return {**overall, **flatten_results(results)}
