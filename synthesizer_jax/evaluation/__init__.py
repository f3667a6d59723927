"""Evaluation: predictions, metrics task by task, files of results."""

from synthesizer_jax.evaluation.files import (
    EVALUATION_DIRECTORY,
    write_predictions,
    write_results,
)
from synthesizer_jax.evaluation.prediction import METHODS, Answers, Predictor
from synthesizer_jax.evaluation.tasks import (
    ExampleSet,
    TargetLoss,
    TaskResult,
    evaluate_tasks,
    flat,
    score_of,
)

__all__ = [
    "EVALUATION_DIRECTORY",
    "METHODS",
    "Answers",
    "ExampleSet",
    "Predictor",
    "TargetLoss",
    "TaskResult",
    "evaluate_tasks",
    "flat",
    "score_of",
    "write_predictions",
    "write_results",
]
