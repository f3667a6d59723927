"""What a model reaches task by task: metrics, and the loss of the right answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from synthesizer_jax.evaluation.prediction import Predictor


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
    def targets(self) -> Sequence[np.ndarray]:
        """Token ids of every right answer."""
        ...

    @property
    def label_words(self) -> Sequence[str] | None:
        """The allowed answers, if there are such."""
        ...

    @property
    def labelled(self) -> Sequence[int]:
        """The examples whose right answer is known."""
        ...

    def score(self, predictions: Sequence[str]) -> dict[str, float]:
        """The task's metrics, in percent."""
        ...

    def record(self, index: int, prediction: str) -> dict[str, Any]:
        """An example and its prediction, as JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class TargetLoss:
    """How improbable right answers are, teacher-forced.

    Attributes:
      nats: negative log-probability of an example's target, mean over examples.
      tokens: target tokens of an example, end of sequence included, mean over examples.
    """

    nats: float
    tokens: float

    @property
    def per_token(self) -> float:
        """Nats per target token."""
        return self.nats / self.tokens


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One task's numbers.

    Attributes:
      task: its name.
      split: the split.
      n: number of examples.
      labelled: number of those whose right answer is known; the others are predicted, not scored.
      metrics: in percent, over the labelled examples; empty where there are none.
      predictions: decoded answers, in the order of the examples.
      scores: ``[n]`` log-probabilities of the predictions in nats.
      ranked: log-probabilities of the label words, ``[n, words]``, where they were ranked.
      loss: over labelled examples, where it was measured.
    """

    task: str
    split: str
    n: int
    labelled: int
    metrics: dict[str, float]
    predictions: tuple[str, ...]
    scores: np.ndarray
    ranked: np.ndarray | None = None
    loss: TargetLoss | None = None

    @property
    def mean(self) -> float:
        """Mean of the task's metrics."""
        return sum(self.metrics.values()) / len(self.metrics)


def evaluate_tasks(
    predictor: Predictor,
    sets: Sequence[ExampleSet],
    *,
    loss_sets: Sequence[ExampleSet] | None = None,
) -> list[TaskResult]:
    """Predicts and scores every set.

    Args:
      predictor: the model.
      sets: the examples.
      loss_sets: for each set the labelled examples of which the loss is taken; None takes no losses.
    """
    results = []
    for i, examples in enumerate(sets):
        answers = predictor.answer(examples.inputs, examples.label_words)
        results.append(
            TaskResult(
                task=examples.name,
                split=examples.split,
                n=len(examples.inputs),
                labelled=len(examples.labelled),
                metrics=examples.score(answers.texts),
                predictions=tuple(answers.texts),
                scores=answers.scores,
                ranked=answers.ranked,
                loss=None if loss_sets is None else target_loss(predictor, loss_sets[i]),
            )
        )
    return results


def target_loss(predictor: Predictor, examples: ExampleSet) -> TargetLoss | None:
    """The loss of a set's targets; None for an empty set."""
    if not examples.inputs:
        return None
    logp = predictor.log_probabilities(examples.inputs, examples.targets)
    tokens = np.mean([len(target) for target in examples.targets])
    return TargetLoss(nats=-float(np.mean(logp)), tokens=float(tokens))


def score_of(results: Sequence[TaskResult]) -> float:
    """Mean over tasks of the mean of their metrics; NaN without results."""
    means = [r.mean for r in results if r.metrics]
    return float(np.mean(means)) if means else float("nan")


def flat(results: Sequence[TaskResult]) -> dict[str, float]:
    """``{"task/metric": value}`` for logs, and ``"task/loss"`` in nats per target token."""
    values = {f"{r.task}/{name}": value for r in results for name, value in r.metrics.items()}
    return values | {f"{r.task}/loss": r.loss.per_token for r in results if r.loss is not None}
