"""Prepares the data of an experiment from Python."""

from __future__ import annotations

import pathlib

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.preparation import synthetic
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.preparation.rows import import_tensorflow
from synthesizer_jax.tasks.synthetic import MIXTURES
from synthesizer_jax.tasks.task_registry import add_imported, default_data_dir
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.run_directory import find_vocabulary


def prepare_data(experiment: Experiment, data_dir: pathlib.Path | None = None) -> None:
    """Prepares the data that `training.run.run` reads, if the data is missing or outdated.

    The function imports TensorFlow, and can prepare tasks that were added in this process. The
    command ``synthesizer-jax data prepare`` prepares the same data in a separate process, which
    does not know tasks that were added in this process.

    Args:
      experiment: the experiment that is going to run.
      data_dir: the directory of the data sets. The default is `task_registry.default_data_dir()`.

    Raises:
      FileNotFoundError: if no task of the mixture has the splits that the experiment needs.
      ValueError: if a data set is damaged, or if the experiment has no vocabulary.
    """
    import_tensorflow()
    directory = storage_path(str(data_dir or default_data_dir()))
    add_imported(directory)
    if experiment.data.mixture in MIXTURES:
        synthetic.train_vocabulary(directory)
    vocabulary = find_vocabulary(experiment, directory).vocabulary
    assert vocabulary is not None
    prepare(
        experiment.data.mixture,
        PreparedTasks(directory, vocabulary.build()),
        training_splits=[experiment.data.split],
        evaluation_splits=[experiment.evaluation.split],
        lengths=experiment.data.lengths,
    )
