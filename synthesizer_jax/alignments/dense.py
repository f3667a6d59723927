"""Logits that every token computes by itself, without a look at the keys: the Dense Synthesizers."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import (
    Alignment,
    AttentionContext,
    check_length,
    project,
    slice_positions,
)
from synthesizer_jax.attention import Terms, low_rank, outer
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.parameters import with_axes


@register
class Dense(Alignment):
    """Every token computes its own row of logits, ``B_i = W₂ relu(W₁ x_i)``.

    Tay et al. 2021, section 3.1 (Dense Synthesizer), without biases. W₂'s rows act as keys that are
    the same for every example, so the engine treats it as a dot product with static keys.

    Attributes:
      max_length: number of key positions that W₂ addresses.
      hidden_dim: width of the hidden layer per head; None means the width of a head.
      share_heads: one W₂ for all heads, as in the released Mesh-TensorFlow code; the paper's text
        has one per head.
      hidden_init: initializer of W₁ ``[d_model, heads · hidden]``.
      table_init: initializer of W₂ ``[heads, max_length, hidden]``; None: variance 1 / hidden.
    """

    max_length: Length
    hidden_dim: Length | None = None
    share_heads: bool = False
    hidden_init: Initializer = FanIn()
    table_init: Initializer | None = None
    linear_in = ("table",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        # [b, q, h, e]
        hidden = _hidden(queries, self.hidden_dim or context.head_dim, self.hidden_init, context)
        width = hidden.shape[-1]
        init = self.table_init or Normal(width**-0.5)
        table = self.param(
            "table",
            with_axes(init, "heads", "key_length", "synth_hidden"),
            (1 if self.share_heads else context.num_heads, self.max_length, width),
        )
        # [h or 1, k, e]
        rows = slice_positions(table, context.key_span, axis=1).astype(hidden.dtype)
        rows = jnp.broadcast_to(rows, (context.num_heads, *rows.shape[1:]))
        return (low_rank(hidden, rows.swapaxes(0, 1)[None], token_keys=False),)  # keys [1, k, h, e]


@register
class FactorizedDense(Alignment):
    """Every token computes two short vectors whose outer product is its row of logits.

    ``C_i[p·B + r] = A_i[p] · B_i[r]`` with ``A_i = W_A relu(W₁ x_i)`` and ``B_i = W_B relu(W₁ x_i)``
    (Tay et al. 2021, section 3.3, Factorized Dense Synthesizer). The paper tiles both vectors to
    the full length; here one is repeated element by element and the other as a whole, so that every
    pair (p, r) occurs exactly once.

    Attributes:
      max_length: number of key positions, ``A · B`` with the most balanced factors, 16 · 32 for 512.
      hidden_dim: width of the hidden layer per head; None means the width of a head.
    """

    max_length: Length
    hidden_dim: Length | None = None
    hidden_init: Initializer = FanIn()
    factor_init: Initializer = FanIn()
    linear_in = ("first",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        hidden = _hidden(queries, self.hidden_dim or context.head_dim, self.hidden_init, context)
        axes = "heads", "synth_hidden", "key_length"

        def factor(name: str, width: int) -> jax.Array:
            init = with_axes(self.factor_init, *axes)
            kernel = self.param(name, init, (*hidden.shape[-2:], width))
            return jnp.einsum("bqhe,hea->bqha", hidden, kernel.astype(hidden.dtype))

        first, second = balanced_factors(self.max_length)
        return (outer(factor("first", first), factor("second", second)),)


def balanced_factors(length: int) -> tuple[int, int]:
    """The factor pair of `length` nearest to a square, smaller one first: 512 → (16, 32)."""
    first = next(a for a in range(math.isqrt(length), 0, -1) if length % a == 0)
    return first, length // first


def _hidden(
    queries: jax.Array, width: int, kernel_init: Initializer, context: AttentionContext
) -> jax.Array:
    """Computes the hidden layer of every head, ``[batch, q, heads, width]``."""
    if queries.ndim == 3:
        queries = project(
            queries,
            heads=context.num_heads,
            width=width,
            name="hidden",
            axes=("heads", "synth_hidden"),
            kernel_init=kernel_init,
        )
    return jax.nn.relu(queries)
