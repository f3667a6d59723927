"""Factorized Dense Synthesizer."""

from __future__ import annotations

import math

import flax.linen as nn
import jax

from synthesizer_jax.alignments.base import Alignment, AttentionContext, check_length, project
from synthesizer_jax.attention import Terms, outer
from synthesizer_jax.initializers import FanIn, Initializer
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Length


@register
class FactorizedDense(Alignment):
    """Every token computes two short vectors whose outer product is its row of logits.

    ``C_i[p·B + r] = A_i[p] · B_i[r]`` with ``A_i = W_A relu(W₁ x_i)`` and ``B_i = W_B relu(W₁ x_i)``
    (Tay et al. 2021, section 3.3, Factorized Dense Synthesizer). The paper tiles both vectors to
    the full length; here one is repeated element by element and the other as a whole, so that every
    pair (p, r) occurs exactly once.

    Attributes:
      max_length: number of key positions, ``A · B``.
      factors: the pair (A, B); None means the most balanced factors of `max_length`.
      hidden_dim: width of the hidden layer per head; None means the width of a head.
    """

    max_length: Length
    factors: tuple[Length, Length] | None = None
    hidden_dim: Length | None = None
    hidden_init: Initializer = FanIn()
    factor_init: Initializer = FanIn()
    linear_in = ("first",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        if queries.ndim == 3:
            queries = project(
                queries,
                heads=context.num_heads,
                width=self.hidden_dim or context.head_dim,
                name="hidden",
                axis="synth_hidden",
                kernel_init=self.hidden_init,
            )
        hidden = jax.nn.relu(queries)
        first, second = self.resolved_factors
        return (outer(self.factor(hidden, "first", first), self.factor(hidden, "second", second)),)

    @property
    def resolved_factors(self) -> tuple[int, int]:
        """The pair (A, B)."""
        if self.factors is None:
            return balanced_factors(self.max_length)
        if math.prod(self.factors) != self.max_length:
            raise ValueError(
                f"FactorizedDense: factors={self.factors} multiply to {math.prod(self.factors)}, "
                f"not to max_length={self.max_length}; leave factors out for "
                f"{balanced_factors(self.max_length)}"
            )
        return self.factors

    def factor(self, hidden: jax.Array, name: str, width: int) -> jax.Array:
        """``[batch, q, heads, hidden]`` to ``[batch, q, heads, width]``, a matrix per head."""
        kernel = self.param(
            name,
            with_axes(self.factor_init, "heads", "synth_hidden", "key_length"),
            (hidden.shape[-2], hidden.shape[-1], width),
        )
        return jax.numpy.einsum("bqhe,hea->bqha", hidden, kernel.astype(hidden.dtype))


def balanced_factors(length: int) -> tuple[int, int]:
    """The factor pair of `length` nearest to a square, smaller one first: 512 → (16, 32)."""
    first = next(a for a in range(math.isqrt(length), 0, -1) if length % a == 0)
    return first, length // first
