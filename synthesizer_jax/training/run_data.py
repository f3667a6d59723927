"""The data of a run: what is prepared of it, its vocabulary, and what it is evaluated on."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence

import jax

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import SentencePiece, Vocabulary
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.evaluation.files import evaluation_folder, write_predictions, write_results
from synthesizer_jax.evaluation.scoring import flatten_results
from synthesizer_jax.hosts import processes
from synthesizer_jax.preparation import file_tasks as imported
from synthesizer_jax.preparation import synthetic
from synthesizer_jax.runs import code
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.splits import is_current, requested_splits
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

    A process of its own does it, which imports TensorFlow and ends. Where no data sets are, what is
    prepared has to suffice.

    Args:
      experiment: with its vocabulary.
      vocabulary: the vocabulary itself.
      data_dir: where data sets lie.
      training_splits: splits to train on; None: the experiment's.
      evaluation_splits: splits to evaluate on; None: the experiment's.
      only: names of the tasks to prepare; empty: all.

    Raises:
      FileNotFoundError: nothing is prepared, and there are no data sets.
      ValueError: the process failed.
    """
    splits = {
        "training_splits": [experiment.data.split] if training_splits is None else training_splits,
        "evaluation_splits": (
            [experiment.evaluation.split] if evaluation_splits is None else evaluation_splits
        ),
    }
    prepared = PreparedTasks(data_dir, vocabulary)
    with processes.process_zero_first("data"):
        if not _is_prepared(experiment.data, prepared, only=only, **splits):
            command = _preparation(experiment, data_dir, only=only, **splits)
            done = subprocess.run(
                command, check=False, stderr=subprocess.PIPE, text=True, errors="replace"
            )
            said, _, last = done.stderr.rstrip().rpartition("\n")
            # Notebooks do not show what a process prints.
            print(said if done.returncode else done.stderr, end="", file=sys.stderr)
            if done.returncode:
                reason = last.removeprefix("error: ") or f"exit code {done.returncode}"
                raise ValueError(
                    f"{experiment.data.mixture} could not be prepared: {reason}; the command was: "
                    f"{' '.join(command)}"
                )
    return prepared


def _is_prepared(
    data: DataConfig,
    prepared: PreparedTasks,
    *,
    only: Sequence[str],
    **splits: Sequence[str],
) -> bool:
    try:
        none: dict[str, Sequence[str]] = dict.fromkeys(splits, ())
        requests = [
            request
            for kind in filter(splits.get, splits)  # each kind that is asked for has to be there
            for request in requested_splits(
                data.mixture, prepared.data_dir, only=only, **none | {kind: splits[kind]}
            )
        ]
    except FileNotFoundError:
        if prepared.rates(data.mixture) is not None:
            return True
        if data.mixture in synthetic.MIXTURES:  # it is generated
            return False
        raise
    rates = task_registry.mixture_rates(data.mixture, prepared.data_dir)
    return prepared.rates(data.mixture) == rates and all(
        is_current(request, prepared, lengths=data.lengths) for request in requests
    )


def _preparation(
    experiment: Experiment,
    data_dir: pathlib.Path,
    *,
    training_splits: Sequence[str],
    evaluation_splits: Sequence[str],
    only: Sequence[str],
) -> list[str]:
    """Returns the command that prepares a run's data."""
    data, vocabulary = experiment.data, experiment.vocabulary
    assert vocabulary is not None
    name = vocabulary.path if isinstance(vocabulary, SentencePiece) else "bytes"
    return [
        *(sys.executable, "-m", "synthesizer_jax", "data", "prepare", data.mixture),
        *("--data-dir", str(data_dir), "--extra-ids", str(vocabulary.extra_ids)),
        *("--vocabulary", name),
        f"--inputs-length={data.lengths['inputs']}",
        f"--targets-length={data.lengths['targets']}",
        *(f"--split={split}" for split in training_splits or ("",)),
        *(f"--evaluation-split={split}" for split in evaluation_splits or ("",)),
        *(f"--task={name}" for name in only),
        *(f"--import={name}" for name in code.imported_names()),
    ]


def open_evaluator(
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
