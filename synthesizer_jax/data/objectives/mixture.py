"""Mixtures of objectives, such as UL2's mixture of denoisers."""

from __future__ import annotations

import dataclasses

import numpy as np

from synthesizer_jax.data.objectives.denoising import Denoising
from synthesizer_jax.data.objectives.draws import Draws
from synthesizer_jax.data.objectives.noise import Noise, RandomSpans, SuffixNoise
from synthesizer_jax.data.objectives.objective import (
    ExampleFormat,
    Objective,
    Segment,
    SegmentObjective,
)
from synthesizer_jax.registry import register


@register
@dataclasses.dataclass(frozen=True)
class ObjectiveMixture(Objective):
    """Every segment is of an objective drawn by its rate, and as long as that objective needs.

    Attributes:
      objectives: the objectives; all have the same `documents` and `document_eos`.
      rates: their relative rates; None: equal ones.
    """

    objectives: tuple[SegmentObjective, ...]
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ValueError("objectives is empty; name one or more")
        if len({(o.documents, o.document_eos) for o in self.objectives}) > 1:
            raise ValueError(
                "objectives differ in documents or document_eos; allowed: the same for all"
            )
        rates = self._rates()
        if len(rates) != len(self.objectives) or min(rates) < 0 or not sum(rates):
            raise ValueError(
                f"rates is {self.rates}; allowed: None, or {len(self.objectives)} numbers of 0 or "
                "more, one of them positive"
            )

    @property
    def documents(self) -> int:  # type: ignore[override]
        """Number of documents that are concatenated."""
        return self.objectives[0].documents

    @property
    def makes_inputs(self) -> bool:  # type: ignore[override]
        """Whether one of the objectives makes inputs."""
        return any(objective.makes_inputs for objective in self.objectives)

    @property
    def document_eos(self) -> bool:  # type: ignore[override]
        """Whether documents end with EOS and segments do not."""
        return self.objectives[0].document_eos

    def check(self, form: ExampleFormat) -> None:
        """Raises a `ValueError` if the examples of an objective do not fit."""
        for objective in self.objectives:
            objective.check(form)

    def split(self, num_tokens: int, draws: Draws, form: ExampleFormat) -> list[Segment]:
        """Returns the consecutive segments of a group of `num_tokens` tokens."""
        lengths = [objective.segment_length(form) for objective in self.objectives]
        cumulative_rates = np.cumsum(self._rates(), dtype=np.float64)
        uniform = draws.uniform(-(-num_tokens // min(lengths)))
        choices = np.searchsorted(
            cumulative_rates[:-1] / cumulative_rates[-1], uniform, side="right"
        )
        segments, start = [], 0
        for choice in choices.tolist():
            if start == num_tokens:
                break
            stop = min(start + lengths[choice], num_tokens)
            segments.append(Segment(start, stop, self.objectives[choice]))
            start = stop
        return segments

    def _rates(self) -> tuple[float, ...]:
        return (1.0,) * len(self.objectives) if self.rates is None else self.rates


def ul2(
    *,
    regular_mode: tuple[int, ...] = (),
    sequential_mode: tuple[int, ...] = (),
    extreme_mode: tuple[int, ...] = (),
    rates: tuple[float, ...] | None = None,
) -> ObjectiveMixture:
    """Returns UL2's mixture of seven denoisers (Tay et al. 2022, table 1).

    Regular: mean spans 3 and 8, density 0.15. Sequential: the last quarter. Extreme: mean spans 3,
    8 and 64 with density 0.5, and 64 with 0.15. Spans are T5's random partitions.

    Args:
      regular_mode: ids before the inputs of regular denoisers, those of ``[NLU]``.
      sequential_mode: of sequential ones, ``[S2S]``.
      extreme_mode: of extreme ones, ``[NLG]``.
      rates: of the seven denoisers in this order; None: equal ones.
    """
    denoisers: list[tuple[Noise, tuple[int, ...]]] = [
        (RandomSpans(0.15, mean_span=3.0), regular_mode),
        (RandomSpans(0.15, mean_span=8.0), regular_mode),
        (SuffixNoise(0.25), sequential_mode),
        (RandomSpans(0.5, mean_span=3.0), extreme_mode),
        (RandomSpans(0.5, mean_span=8.0), extreme_mode),
        (RandomSpans(0.5, mean_span=64.0), extreme_mode),
        (RandomSpans(0.15, mean_span=64.0), extreme_mode),
    ]
    return ObjectiveMixture(tuple(Denoising(noise, mode=mode) for noise, mode in denoisers), rates)
