"""A model's metrics task by task, and the files that hold them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from synthesizer_jax.evaluation.prediction import Predictor

EVALUATION_DIRECTORY = "evaluation"


class ExampleSet(Protocol):
    """What evaluation needs of a task's examples (`data.evaluation_sets` makes them)."""

    @property
    def name(self) -> str:
        """The task."""
        ...

    @property
    def split(self) -> str:
        """The split."""
        ...

    @property
    def inputs(self) -> Sequence[np.ndarray]:
        """Token ids of every example."""
        ...

    @property
    def label_words(self) -> Sequence[str] | None:
        """The allowed answers, if there are such."""
        ...

    def score(self, predictions: Sequence[str]) -> dict[str, float]:
        """The task's metrics, in percent."""
        ...


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One task's numbers.

    Attributes:
      task: its name.
      split: the split.
      n: number of examples.
      metrics: in percent.
      predictions: decoded answers, in the order of the examples.
      scores: log-probabilities of the label words, ``[n, words]``, where they were ranked.
    """

    task: str
    split: str
    n: int
    metrics: dict[str, float]
    predictions: tuple[str, ...]
    scores: np.ndarray | None = None

    @property
    def mean(self) -> float:
        """Mean of the task's metrics."""
        return sum(self.metrics.values()) / len(self.metrics)


def evaluate_tasks(predictor: Predictor, sets: Sequence[ExampleSet]) -> list[TaskResult]:
    """Predicts and scores every set."""
    results = []
    for examples in sets:
        predictions, scores = predictor.answer(examples.inputs, examples.label_words)
        results.append(
            TaskResult(
                task=examples.name,
                split=examples.split,
                n=len(examples.inputs),
                metrics=examples.score(predictions),
                predictions=tuple(predictions),
                scores=scores,
            )
        )
    return results


def score_of(results: Sequence[TaskResult]) -> float:
    """Mean over tasks of the mean of their metrics; NaN without results."""
    means = [r.mean for r in results if r.metrics]
    return float(np.mean(means)) if means else float("nan")


def flat(results: Sequence[TaskResult]) -> dict[str, float]:
    """``{"task/metric": value}`` for logs."""
    return {f"{r.task}/{name}": value for r in results for name, value in r.metrics.items()}


def write_results(
    directory: pathlib.Path, step: int, results: Sequence[TaskResult], extra: dict[str, Any]
) -> pathlib.Path:
    """Writes ``evaluation/step_<step>.json`` aside and renames it into place."""
    folder = directory / EVALUATION_DIRECTORY
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.json"
    kept = ("task", "split", "n", "metrics")
    tasks = [{name: getattr(r, name) for name in kept} for r in results]
    aside = path.with_suffix(".tmp")
    aside.write_text(
        json.dumps({"step": step, "tasks": tasks, **extra}, indent=1) + "\n", encoding="utf-8"
    )
    os.replace(aside, path)
    return path
