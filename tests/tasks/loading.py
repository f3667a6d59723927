"""Helps tests to prepare and read an evaluation set in one call."""

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet, load_evaluation_set
from synthesizer_jax.preparation.prepare import prepare

LENGTHS = {"inputs": 64, "targets": 16}
BYTES = Bytes().build()


def quiet(_: str) -> None:
    """Prints nothing."""


def load(
    name, split, data_dir, *, lengths=LENGTHS, vocabulary=BYTES, max_examples=None
) -> EvaluationSet:
    """Prepares a split of a task, and returns its evaluation examples."""
    prepared = PreparedTasks(data_dir, vocabulary)
    options = {"training_splits": (), "evaluation_splits": (split,), "lengths": lengths}
    prepare(name, prepared, log=quiet, **options)
    return load_evaluation_set(name, split, prepared, lengths=lengths, max_examples=max_examples)
