"""What becomes of marked tokens: the inputs and targets functions of T5's objectives.

An objective applies one corruption to its noise, which gives the inputs, and one to the other
tokens, which gives the targets (Raffel et al. 2020, section 3.3). ``UniqueSentinels`` as inputs is
therefore T5's `noise_span_to_unique_sentinel`, and as targets `nonnoise_span_to_unique_sentinel`.

Sentinels count down from the last id of the vocabulary, ``<extra_id_0>``. As in T5, a segment with
more spans than sentinels also uses the ids below them.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import numpy as np

from synthesizer_jax.data.objectives.draws import Draws
from synthesizer_jax.registry import register

RESERVED = 3
"""Padding, EOS and unknown: ids that are never drawn as random tokens."""


class Corruption(abc.ABC):
    """A function from tokens and a mask of those to replace, to tokens.

    Attributes:
      keeps_length: whether the result has as many tokens.
      tokens_per_span: otherwise, number of tokens that a span of marked ones becomes.
    """

    keeps_length: ClassVar[bool] = True
    tokens_per_span: ClassVar[int] = 0

    @abc.abstractmethod
    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns the corrupted tokens, at most ``[length]``.

        Args:
          tokens: ids ``[length]``.
          marked: which tokens to replace, ``[length]``.
          draws: random numbers.
          vocab_size: number of ids, including sentinels.
        """

    def length(self, *, marked: int, unmarked: int, spans: int) -> int:
        """Returns the number of tokens of the result.

        Args:
          marked: number of marked tokens.
          unmarked: number of other tokens.
          spans: number of spans of marked tokens.
        """
        return unmarked + (marked if self.keeps_length else spans * self.tokens_per_span)


@register
@dataclasses.dataclass(frozen=True)
class KeepTokens(Corruption):
    """Nothing is replaced: the full text as targets (code f)."""

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns the tokens."""
        del marked, draws, vocab_size
        return tokens


@register
@dataclasses.dataclass(frozen=True)
class DropTokens(Corruption):
    """Marked tokens are left out (code d); T5's `drop_noise_tokens`."""

    keeps_length: ClassVar[bool] = False

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns the other tokens."""
        del draws, vocab_size
        return tokens[~marked]


@register
@dataclasses.dataclass(frozen=True)
class SentinelPerToken(Corruption):
    """Every marked token becomes the same sentinel (code m); T5's `noise_token_to_sentinel`."""

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns tokens ``[length]``."""
        del draws
        return np.where(marked, tokens.dtype.type(vocab_size - 1), tokens)


@register
@dataclasses.dataclass(frozen=True)
class SentinelPerSpan(Corruption):
    """Every span of marked tokens becomes the same sentinel (code s); T5's `noise_span_to_sentinel`."""

    keeps_length: ClassVar[bool] = False
    tokens_per_span: ClassVar[int] = 1

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns the other tokens and one sentinel per span."""
        del draws
        starts = _span_starts(marked)
        return np.where(marked, tokens.dtype.type(vocab_size - 1), tokens)[~marked | starts]


@register
@dataclasses.dataclass(frozen=True)
class UniqueSentinels(Corruption):
    """Every span of marked tokens becomes a sentinel of its own, in descending order (code u).

    T5's `noise_span_to_unique_sentinel`.
    """

    keeps_length: ClassVar[bool] = False
    tokens_per_span: ClassVar[int] = 1

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns the other tokens and one sentinel per span."""
        del draws
        starts = _span_starts(marked)
        sentinels = (vocab_size - np.cumsum(starts)).astype(tokens.dtype)
        return np.where(starts, sentinels, tokens)[~marked | starts]


@register
@dataclasses.dataclass(frozen=True)
class PermuteTokens(Corruption):
    """Marked tokens change places among themselves (code p); T5's `permute_noise_tokens`."""

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns tokens ``[length]``."""
        del vocab_size
        permuted = tokens.copy()
        permuted[marked] = tokens[marked][draws.permutation(int(marked.sum()))]
        return permuted


@register
@dataclasses.dataclass(frozen=True)
class GatheredTokens(Corruption):
    """A marked token becomes a random one of the segment (code g).

    T5's `noise_token_to_gathered_token`.
    """

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns tokens ``[length]``."""
        del vocab_size
        return np.where(
            marked, tokens[draws.integers(len(tokens), low=0, high=len(tokens))], tokens
        )


@register
@dataclasses.dataclass(frozen=True)
class RandomTokens(Corruption):
    """A marked token becomes a random one of the vocabulary (code r).

    T5's `noise_token_to_random_token`; the ids are drawn from `RESERVED` on and may be sentinels.
    """

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns tokens ``[length]``."""
        drawn = draws.integers(len(tokens), low=RESERVED, high=vocab_size)
        return np.where(marked, drawn.astype(tokens.dtype), tokens)


@register
@dataclasses.dataclass(frozen=True)
class RandomTokensOrSentinel(Corruption):
    """A marked token becomes a random one, or else the sentinel (code r10s90).

    T5's `noise_token_to_random_token_or_sentinel`.

    Attributes:
      random_share: probability of a random token.
    """

    random_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.random_share <= 1:
            raise ValueError(f"random_share is {self.random_share}; allowed: 0 to 1")

    def __call__(
        self, tokens: np.ndarray, marked: np.ndarray, draws: Draws, *, vocab_size: int
    ) -> np.ndarray:
        """Returns tokens ``[length]``."""
        is_random = draws.uniform(len(tokens)) < np.float32(self.random_share)
        random = RandomTokens()(tokens, marked, draws, vocab_size=vocab_size)
        sentinels = SentinelPerToken()(tokens, marked, draws, vocab_size=vocab_size)
        return np.where(is_random, random, sentinels)


def _span_starts(marked: np.ndarray) -> np.ndarray:
    """Returns which tokens are the first of a span of marked ones, ``[length]``."""
    return marked & ~np.concatenate([[False], marked[:-1]])
