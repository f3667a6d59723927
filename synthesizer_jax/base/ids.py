"""The special token ids of a model, such as padding and the end of a text."""

from __future__ import annotations

import dataclasses

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Number


@register
@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Token ids that do not stand for text. The defaults are T5's ids.

    Attributes:
      padding: the id of padding, which fills a row after the end of its text.
      end: the id of the end of a text (EOS).
      start: the id of the decoder's first input.
      also_end: further ids that end decoding, such as the id of the end of a turn.
    """

    padding: Number = 0
    end: Number = 1
    start: Number = 0
    also_end: tuple[Number, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """All ids that end decoding."""
        return self.end, *self.also_end


T5_IDS = SpecialIds()
