"""The policy of keeping checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orbax.checkpoint import checkpoint_managers


@dataclasses.dataclass
class Retention:
    """A policy of Orbax that keeps the newest and the best checkpoints.

    Attributes:
      latest: number of newest checkpoints to keep.
      best: number of best checkpoints to keep.
      scores: scores of the evaluated steps; higher is better. The run adds to them.
    """

    latest: int
    best: int
    scores: dict[int, float]

    def steps_to_keep(self, steps: Iterable[int]) -> set[int]:
        """Returns the steps to keep; of equal scores the newer step is better."""
        rising = sorted(steps)
        measured = [s for s in rising if math.isfinite(self.scores.get(s, math.nan))]
        best = sorted(measured, key=lambda step: (self.scores[step], step), reverse=True)
        return {*rising[max(len(rising) - self.latest, 0) :], *best[: self.best]}

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """Returns whether to keep each checkpoint; called by Orbax."""
        del context
        kept = self.steps_to_keep(checkpoint.step for checkpoint in checkpoints)
        return [checkpoint.step in kept for checkpoint in checkpoints]
