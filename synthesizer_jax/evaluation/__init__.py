"""Evaluation: predictions, metrics task by task, files of results."""

from synthesizer_jax.evaluation.prediction import METHODS, Predictor
from synthesizer_jax.evaluation.tasks import (
    EVALUATION_DIRECTORY,
    ExampleSet,
    TaskResult,
    evaluate_tasks,
    flat,
    score_of,
    write_results,
)

__all__ = [
    "EVALUATION_DIRECTORY",
    "METHODS",
    "ExampleSet",
    "Predictor",
    "TaskResult",
    "evaluate_tasks",
    "flat",
    "score_of",
    "write_results",
]
