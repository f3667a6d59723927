"""Dense Synthesizers, in which every token computes its logits without looking at the keys."""

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
    """An alignment in which every token computes its own logits, ``B_i = W₂ relu(W₁ x_i)``.

    `Dense` is the Dense Synthesizer of Tay et al. 2021, section 3.1, without biases. The rows of W₂
    act as keys that are the same for every example, so the logits are computed as a dot product
    with static keys.

    Attributes:
      max_length: number of key positions for which W₂ has a row.
      hidden_dim: width of the hidden layer of one head. None means `AttentionContext.head_dim`.
      share_heads: whether all heads share one W₂, as in the released Mesh-TensorFlow code. In the
        paper's text, every head has a separate W₂.
      hidden_init: initializer of W₁ ``[d_model, heads · hidden]``.
      table_init: initializer of W₂ ``[heads, max_length, hidden]``. None means a normal
        distribution with variance 1 / hidden.
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
        # [b, q, h, e]. If the queries are already projected, their width e can differ from
        # `hidden_dim`.
        hidden = _hidden(queries, self.hidden_dim or context.head_dim, self.hidden_init, context)
        width = hidden.shape[-1]
        init = self.table_init or Normal(width**-0.5)
        table = self.param(
            "table",
            with_axes(init, "heads", "key_length", "synth_hidden"),
            (1 if self.share_heads else context.num_heads, self.max_length, width),
        )
        rows = slice_positions(table, context.key_span, axis=1)  # [h or 1, k, e]
        rows = rows.astype(hidden.dtype)
        rows = jnp.broadcast_to(rows, (context.num_heads, *rows.shape[1:]))
        static_keys = rows.swapaxes(0, 1)[None]  # [1, k, h, e]
        return (low_rank(hidden, static_keys, token_keys=False),)


@register
class FactorizedDense(Alignment):
    """An alignment in which every token computes two short vectors and combines them into logits.

    `FactorizedDense` is the Factorized Dense Synthesizer of Tay et al. 2021, section 3.3. Token i
    computes the vectors ``A_i = W_A relu(W₁ x_i)`` and ``B_i = W_B relu(W₁ x_i)``. If B_i has b
    elements, the logit of key ``p·b + r`` is ``C_i[p·b + r] = A_i[p] · B_i[r]``. The paper tiles
    both vectors to the full length. `FactorizedDense` instead repeats each element of A and tiles B
    as a whole, so that every pair (p, r) occurs exactly once.

    Attributes:
      max_length: number of key positions. `max_length` is split into the two factors that are
        nearest to each other. For example, 512 becomes 16 · 32.
      hidden_dim: width of the hidden layer of one head. None means `AttentionContext.head_dim`.
      hidden_init: initializer of W₁ ``[d_model, heads · hidden]``.
      factor_init: initializer of W_A and W_B, each ``[heads, hidden, factor]``.
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
            """Computes the vector A or B of every token, ``[batch, q, heads, width]``."""
            init = with_axes(self.factor_init, *axes)
            kernel = self.param(name, init, (*hidden.shape[-2:], width))
            return jnp.einsum("bqhe,hea->bqha", hidden, kernel.astype(hidden.dtype))

        first, second = balanced_factors(self.max_length)
        return (outer(factor("first", first), factor("second", second)),)


def balanced_factors(length: int) -> tuple[int, int]:
    """Returns the two factors of `length` that are nearest to each other, in ascending order.

    For example, `balanced_factors(512)` is (16, 32).
    """
    first = next(a for a in range(math.isqrt(length), 0, -1) if length % a == 0)
    return first, length // first


def _hidden(
    queries: jax.Array, width: int, kernel_init: Initializer, context: AttentionContext
) -> jax.Array:
    """Returns the hidden layer of every head, ``[batch, q, heads, width]``.

    If the queries are already projected, only the relu is applied, so that the parts of a mixture
    can share a projection.
    """
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
