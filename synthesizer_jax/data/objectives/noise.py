"""Noise masks: which tokens of a segment an objective corrupts (Raffel et al. 2020, section 3.3).

`IidNoise`, `RandomSpans` and `RandomPrefix` equal the functions of T5's
`preprocessors.py`. Like these, they compute in float32 and round half to even.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import numpy as np

from synthesizer_jax.data.objectives.draws import Draws
from synthesizer_jax.registry import register


@dataclasses.dataclass(frozen=True)
class Noise(abc.ABC):
    """A distribution of noise masks.

    Attributes:
      density: share of the tokens that are noise.
      max_density: the largest one.
    """

    max_density: ClassVar[float] = 1.0
    density: float

    def __post_init__(self) -> None:
        if not 0 < self.density <= self.max_density:
            raise ValueError(
                f"density is {self.density}; allowed: above 0, at most {self.max_density:g}"
            )

    @abc.abstractmethod
    def __call__(self, length: int, draws: Draws) -> np.ndarray:
        """Returns a mask ``[length]``, True for noise."""

    def counts(self, length: int) -> tuple[int, int] | None:
        """Returns the numbers of noise tokens and of noise spans; None if they are random.

        Args:
          length: number of tokens, at least 2.
        """
        del length
        return None


@register
@dataclasses.dataclass(frozen=True)
class IidNoise(Noise):
    """Every token is noise with probability `density`; T5's `iid_noise_mask`."""

    def __call__(self, length: int, draws: Draws) -> np.ndarray:
        """Returns a mask ``[length]``, True for noise."""
        return draws.uniform(length) < np.float32(self.density)


@register
@dataclasses.dataclass(frozen=True)
class RandomSpans(Noise):
    """A fixed number of spans of random lengths; T5's `random_spans_noise_mask`.

    Of n tokens (at least 2) round(n · density), but at least 1 and at most n − 1, are noise, in
    max(1, round(noise / mean_span)) spans. Noise and other tokens are partitioned into that many
    non-empty spans, all partitions being equally likely, and the spans alternate: the first tokens
    are not noise, the last ones are.

    Attributes:
      mean_span: mean length of the spans.
      roll: whether to rotate the mask by a random offset, so that all positions are alike.
    """

    mean_span: float = 3.0
    roll: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density == 1:
            raise ValueError("density is 1.0; allowed for random spans: below 1")
        if self.mean_span < 1:
            raise ValueError(f"mean_span is {self.mean_span}; allowed: 1 or more")

    def __call__(self, length: int, draws: Draws) -> np.ndarray:
        """Returns a mask ``[length]``, True for noise."""
        extended = max(length, 2)
        num_noise, num_spans = self.counts(extended)
        noise = _random_partition(num_noise, num_spans, draws)
        kept = _random_partition(extended - num_noise, num_spans, draws)
        spans = np.stack([kept, noise], axis=1).reshape(-1)
        mask = np.repeat(np.arange(2 * num_spans) % 2 == 1, spans)[:length]
        if self.roll:
            mask = np.roll(mask, draws.integers(1, low=0, high=extended)[0])
        return mask

    def counts(self, length: int) -> tuple[int, int]:
        """Returns the numbers of noise tokens and of noise spans."""
        num_noise = _clamped_round(length, self.density)
        num_spans = int(np.round(np.float32(num_noise) / np.float32(self.mean_span)))
        return num_noise, min(max(num_spans, 1), length - num_noise)


@register
@dataclasses.dataclass(frozen=True)
class SuffixNoise(Noise):
    """The last round(n · density) tokens; UL2's sequential denoising (Tay et al. 2022, section 3.1.2).

    At least one token is noise and at least one is not.
    """

    def __call__(self, length: int, draws: Draws) -> np.ndarray:
        """Returns a mask ``[length]``, True for noise."""
        del draws
        extended = max(length, 2)
        return np.arange(length) >= extended - self.counts(extended)[0]

    def counts(self, length: int) -> tuple[int, int]:
        """Returns the number of noise tokens, and one span."""
        return _clamped_round(length, self.density), 1


@register
@dataclasses.dataclass(frozen=True)
class RandomPrefix(Noise):
    """Everything after a prefix of random length; the complement of T5's `random_prefix_noise_mask`.

    Of n tokens the prefix has a uniform number between max(1, round((1 − 2 · density)(n − 1)))
    and n − 1. In T5 the prefix itself is the noise; here noise is what the model predicts.

    Attributes:
      density: at most 0.5.
    """

    max_density: ClassVar[float] = 0.5
    density: float = 0.5

    def __call__(self, length: int, draws: Draws) -> np.ndarray:
        """Returns a mask ``[length]``, True for noise."""
        most = length - 1
        least = int(np.round(np.float32(1 - 2 * self.density) * np.float32(most)))
        (prefix,) = draws.integers(1, low=min(max(1, least), most), high=most + 1).tolist()
        return np.arange(length) >= prefix


@register
@dataclasses.dataclass(frozen=True)
class ChosenTokens(Noise):
    """round(n · density) tokens, but at least 1, in any places; BERT (Devlin et al. 2019, A.1)."""

    density: float = 0.15

    def __call__(self, length: int, draws: Draws) -> np.ndarray:
        """Returns a mask ``[length]``, True for noise."""
        count = max(1, round(length * self.density))
        return draws.permutation(length) < count


def _clamped_round(length: int, density: float) -> int:
    """Returns ``round(length · density)`` in float32, at least 1 and at most ``length - 1``."""
    rounded = int(np.round(np.float32(length) * np.float32(density)))
    return min(max(rounded, 1), length - 1)


def _random_partition(total: int, parts: int, draws: Draws) -> np.ndarray:
    """Returns the lengths of `parts` non-empty parts of `total` items, ``[parts]``."""
    is_start = (np.arange(total - 1) < parts - 1)[draws.permutation(total - 1)]
    return np.diff(np.flatnonzero(is_start) + 1, prepend=0, append=total)
