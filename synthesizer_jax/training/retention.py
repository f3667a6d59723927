"""Which checkpoints of a run are kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass
class Retention:
    """Which checkpoints Orbax keeps: the newest, and the best besides.

    Attributes:
      latest: how many of the newest.
      best: how many of the best.
      scores: of the steps that were evaluated; higher is better. The run adds to them.
    """

    latest: int
    best: int
    scores: dict[int, float]

    def kept(self, steps: Iterable[int]) -> set[int]:
        """The steps to keep; of equal scores the newer one is the better one."""
        rising = sorted(steps)
        measured = [s for s in rising if math.isfinite(self.scores.get(s, math.nan))]
        best = sorted(measured, key=lambda step: (self.scores[step], step), reverse=True)
        return {*rising[len(rising) - self.latest :], *best[: self.best]}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's question."""
        del context
        kept = self.kept(checkpoint.step for checkpoint in checkpoints)
        return [checkpoint.step in kept for checkpoint in checkpoints]
