"""Factorized Random Synthesizer."""

from __future__ import annotations

import flax.linen as nn
import jax

from synthesizer_jax.alignments.base import Alignment, check_length, take
from synthesizer_jax.attention import Span, Terms, low_rank
from synthesizer_jax.initializers import Initializer, Normal
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register


@register
class FactorizedRandom(Alignment):
    """A Random table of low rank, ``S = R₁ R₂ᵀ``.

    Tay et al. 2021, section 3.3 (Factorized Random Synthesizer; rank 8 in the paper). The released
    Mesh-TensorFlow code computes something else (every query gets the same row), which is not
    offered here.

    Attributes:
      max_length: number of query and key positions.
      rank: inner width k of the factors.
      factor_init: initialiser of R₁ and R₂, each ``[heads, max_length, rank]``.
    """

    max_length: int
    rank: int = 8
    factor_init: Initializer = Normal(0.1)

    @nn.compact
    def __call__(
        self,
        queries: jax.Array,
        keys: jax.Array | None = None,
        *,
        num_heads: int,
        head_dim: int,
        query_span: Span,
        key_span: Span,
    ) -> Terms:
        check_length(self, self.max_length, query_span, key_span)
        shape = (num_heads, self.max_length, self.rank)
        rows = self.param(
            "query_factor", with_axes(self.factor_init, "heads", "query_length", "rank"), shape
        )
        columns = self.param(
            "key_factor", with_axes(self.factor_init, "heads", "key_length", "rank"), shape
        )
        rows = take(rows, query_span, axis=1).swapaxes(0, 1)[None]
        columns = take(columns, key_span, axis=1).swapaxes(0, 1)[None]
        return (low_rank(rows, columns, token_keys=False, token_queries=False),)
