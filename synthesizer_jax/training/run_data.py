"""The data of a run: what is prepared of it, its vocabulary, and what it is evaluated on."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.evaluation.files import evaluation_folder, write_predictions, write_results
from synthesizer_jax.evaluation.scoring import flatten_results
from synthesizer_jax.runs import code
from synthesizer_jax.runtime import processes
from synthesizer_jax.tasks import imported
from synthesizer_jax.tasks.splits import prepare_missing
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.run_directory import open_vocabulary, with_vocabulary_path
from synthesizer_jax.training.state import TrainState


def prepare_data(
    experiment: Experiment,
    vocabulary: Vocabulary,
    data_dir: pathlib.Path,
    *,
    training_splits: Sequence[str] | None = None,
    evaluation_splits: Sequence[str] | None = None,
    only: Sequence[str] = (),
) -> PreparedTasks:
    """Prepares what is missing of the data of a run, and returns where it is.

    Args:
      experiment: with its vocabulary.
      vocabulary: the vocabulary itself.
      data_dir: where data sets lie.
      training_splits: splits to train on; None: the experiment's.
      evaluation_splits: splits to evaluate on; None: the experiment's.
      only: names of the tasks to prepare; empty: all.
    """
    assert experiment.vocabulary is not None
    train, evaluate = experiment.data.split, experiment.evaluation.split
    prepared = PreparedTasks(data_dir, vocabulary)
    with processes.process_zero_first("data"):
        prepare_missing(
            experiment.data,
            prepared,
            experiment.vocabulary,
            training_splits=(train,) if training_splits is None else training_splits,
            evaluation_splits=(evaluate,) if evaluation_splits is None else evaluation_splits,
            only=only,
            imports=code.imported_names(),
        )
    return prepared


def open_data(
    experiment: Experiment,
    directory: pathlib.Path,
    data_dir: pathlib.Path,
    *,
    only: list[str] | None = None,
) -> Evaluator:
    """Returns what a run with its vocabulary in `directory` is evaluated on; `only` names tasks."""
    imported.add_imported(data_dir)
    vocabulary = open_vocabulary(experiment, directory)
    experiment = with_vocabulary_path(experiment, directory)
    prepared = prepare_data(experiment, vocabulary, data_dir, training_splits=(), only=only or ())
    model, data, evaluation = experiment.model, experiment.data, experiment.evaluation
    return Evaluator(model, data, evaluation, prepared=prepared, only=only)


def evaluate_state(
    evaluator: Evaluator, directory: pathlib.Path, state: TrainState, *, mesh: jax.sharding.Mesh
) -> dict[str, float]:
    """Evaluates a state, writes results and predictions into the run's directory; returns the results."""
    results, overall = evaluator.measure(state.averaged_variables, mesh=mesh)
    if processes.is_process_zero():
        step = int(state.step)
        folder = evaluation_folder(directory, step)
        for examples, result in zip(evaluator.sets, results, strict=True):
            if evaluator.evaluation.save_predictions and not examples.task.is_text:
                write_predictions(folder, result, examples=examples)
        write_results(folder, step, results, overall=overall)
    return {**overall, **flatten_results(results)}
