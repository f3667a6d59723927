"""When a run stops before its last step because its score no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from synthesizer_jax.evaluation.evaluator import Evaluation


def evaluations_without_improvement(
    scores: Mapping[int, float], *, min_improvement: float = 0.0
) -> int:
    """Returns how many evaluations in a row, up to the last, were not better than the best before them.

    The best is the last score that was better, not the maximum: with a `min_improvement`, smaller gains add
    up until together they exceed it. Evaluations without a score (NaN) do not count.

    Args:
      scores: the score by step; higher is better.
      min_improvement: a score is better if it exceeds the best by more than this.
    """
    best, count = -math.inf, 0
    for step in sorted(scores):
        if scores[step] > best + min_improvement:
            best, count = scores[step], 0
        elif math.isfinite(scores[step]):
            count += 1
    return count


def has_stopped(evaluation: Evaluation, scores: Mapping[int, float], step: int) -> bool:
    """Returns whether a run that has finished `step` steps has used up the patience of its evaluation.

    Args:
      evaluation: with its `patience`.
      scores: the score by step; those of later steps, which were lost with their checkpoints, do not count.
      step: number of finished steps.
    """
    if evaluation.patience is None:
        return False
    until = {s: score for s, score in scores.items() if s <= step}
    count = evaluations_without_improvement(until, min_improvement=evaluation.min_improvement)
    return count >= evaluation.patience
