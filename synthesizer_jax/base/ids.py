"""The ids of a vocabulary that stand for no text."""

from __future__ import annotations

import dataclasses

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Number


@register
@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids that stand for no text; T5's by default.

    Attributes:
      padding: of what fills up rows.
      end: of the end of a text, EOS.
      start: of the decoder's first input.
      also_end: others with which decoding ends, as that of a turn.
    """

    padding: Number = 0
    end: Number = 1
    start: Number = 0
    also_end: tuple[Number, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """All ids with which decoding ends."""
        return self.end, *self.also_end


T5_IDS = SpecialIds()
