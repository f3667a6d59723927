"""The results of a model on every task: metrics, and losses of the targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet
from synthesizer_jax.evaluation.prediction import Predictor
from synthesizer_jax.evaluation.texts import text_loss
from synthesizer_jax.messages import Phase, silent_phase
from synthesizer_jax.tasks.task import Answers


@dataclasses.dataclass(frozen=True)
class TargetLoss:
    """The teacher-forced loss of targets.

    Attributes:
      nats: negative log-probability of a target, mean over examples.
      tokens: number of tokens of a target, including EOS, mean over examples; 1 where it is a class.
    """

    nats: float
    tokens: float

    @property
    def per_token(self) -> float:
        """Nats per target token."""
        return self.nats / self.tokens


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The results of one task.

    Attributes:
      task: name of the task.
      split: the split.
      n: number of examples.
      labeled: number of examples with a label; only these are scored.
      metrics: metrics over the labeled examples, T5's in percent; empty if there are none.
      predictions: predictions in the order of the examples; none for texts.
      scores: ``[n]`` log-probabilities of the predictions, or of the texts, in nats.
      ranked: ``[n, words]`` log-probabilities of the label words; None if they were not ranked.
      words: the label words that were ranked.
      loss: the loss over labeled examples, or all texts; None if it was not computed.
      text_metrics: measures of texts (`texts.TextLoss.metrics`), of which lower is better; empty for
        other tasks.
    """

    task: str
    split: str
    n: int
    labeled: int
    metrics: dict[str, float]
    predictions: tuple[str, ...]
    scores: np.ndarray
    ranked: np.ndarray | None = None
    words: tuple[str, ...] = ()
    loss: TargetLoss | None = None
    text_metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean of the task's metrics."""
        return sum(self.metrics.values()) / len(self.metrics)


def evaluate_tasks(
    predictor: Predictor,
    sets: Sequence[EvaluationSet],
    *,
    loss_sets: Sequence[EvaluationSet] | None = None,
    phase: Phase = silent_phase,
) -> list[TaskResult]:
    """Predicts and scores every evaluation set; of texts, it computes the loss.

    Args:
      predictor: the model.
      sets: the evaluation sets.
      loss_sets: for each of them the labeled examples over which the loss is computed; None computes no
        losses.
      phase: is told of every set.
    """
    results = []
    for i, examples in enumerate(sets):
        size, window = len(examples.inputs), predictor.decoding.max_length
        passes = size * (1 + examples.scores_targets) + len(
            loss_sets[i].inputs if loss_sets else ()
        )
        if examples.is_text:
            passes = sum(-(-len(target) // window) for target in examples.targets)
        predictor.advance = phase(f"{examples.name}, {examples.split}: {size:,} examples", passes)
        if examples.is_text:
            results.append(_evaluate_texts(predictor, examples))
            continue
        found = predictor.predict_with_scores(examples.inputs, examples.label_words)
        answers = Answers(found.texts, found.tokens, found.scores)
        if examples.scores_targets:
            logp = predictor.log_probabilities(examples.inputs, examples.targets)
            answers = answers._replace(target_scores=np.asarray(logp))
        results.append(
            TaskResult(
                task=examples.name,
                split=examples.split,
                n=len(examples.inputs),
                labeled=len(examples.labeled),
                metrics=examples.score(answers),
                predictions=tuple(found.texts),
                scores=found.scores,
                ranked=found.ranked,
                words=found.words,
                loss=None if loss_sets is None else _target_loss(predictor, loss_sets[i]),
            )
        )
    return results


def _evaluate_texts(predictor: Predictor, examples: EvaluationSet) -> TaskResult:
    """Returns the loss of all texts, and what follows from it; nothing is decoded."""
    found = text_loss(predictor, examples.inputs, examples.targets, examples.texts)
    return TaskResult(
        task=examples.name,
        split=examples.split,
        n=len(examples.targets),
        labeled=len(examples.targets),
        metrics={},
        predictions=(),
        scores=-found.nats,
        loss=TargetLoss(nats=float(found.nats.mean()), tokens=float(found.tokens.mean())),
        text_metrics=found.metrics(),
    )


def _target_loss(predictor: Predictor, examples: EvaluationSet) -> TargetLoss | None:
    """Returns the loss of a set's targets; None if it is empty."""
    if not examples.inputs:
        return None
    logp = predictor.log_probabilities(examples.inputs, examples.targets)
    tokens = np.mean([1 if predictor.classes else len(target) for target in examples.targets])
    return TargetLoss(nats=-float(np.mean(logp)), tokens=float(tokens))


def mean_score(results: Sequence[TaskResult]) -> float:
    """Returns the mean over tasks of the mean of their metrics; NaN if there are none."""
    means = [r.mean for r in results if r.metrics]
    return float(np.mean(means)) if means else float("nan")


def flatten_results(results: Sequence[TaskResult]) -> dict[str, float]:
    """Returns ``{"task/metric": value}``, and ``"task/loss"`` in nats per target token."""
    values = {
        f"{r.task}/{name}": value
        for r in results
        for name, value in (r.metrics | r.text_metrics).items()
    }
    return values | {f"{r.task}/loss": r.loss.per_token for r in results if r.loss is not None}
