"""When a run stops before its last step because its score no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from synthesizer_jax.evaluation.config import Evaluation


def has_stopped(evaluation: Evaluation, scores: Mapping[int, float], step: int) -> bool:
    """Returns whether a run that has finished `step` steps has used up the patience of its evaluation.

    That is, whether so many evaluations in a row, up to the last, were not better than the best before
    them. The best is the last score that was better, not the maximum: smaller gains than
    `Evaluation.min_improvement` add up until together they exceed it. Evaluations without a score (NaN) do
    not count.

    Args:
      evaluation: with its `patience`; None: it never stops.
      scores: the score by step; those of later steps, which were lost with their checkpoints, do not count.
      step: number of finished steps.
    """
    best, count = -math.inf, 0
    for measured in sorted(s for s in scores if s <= step):
        if scores[measured] > best + evaluation.min_improvement:
            best, count = scores[measured], 0
        elif math.isfinite(scores[measured]):
            count += 1
    return evaluation.patience is not None and count >= evaluation.patience
