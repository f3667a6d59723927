"""Random Synthesizers, whose logits are parameters that do not depend on the tokens."""

from __future__ import annotations

import flax.linen as nn
import jax

from synthesizer_jax.alignments.base import (
    Alignment,
    AttentionContext,
    check_length,
    slice_positions,
)
from synthesizer_jax.attention import Terms, low_rank, static
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length
from synthesizer_jax.primitives.initializers import Initializer, Normal
from synthesizer_jax.primitives.parameters import with_axes


@register
class Random(Alignment):
    """An alignment whose logits are a table of parameters, ``S = R[:q, :k]``, for every example.

    `Random` is the Random Synthesizer of Tay et al. 2021, section 3.2. Inputs with fewer than
    `max_length` tokens use the top-left corner of the table.

    With `trainable=False`, the layer is the Fixed Random Synthesizer, whose table keeps its initial
    values. A fixed table is in the collection ``constants``, which has no gradients and no
    optimizer state. Pass the collection ``constants`` along with the parameters:
    ``layer.apply({"params": params, **rest}, x)``.

    Attributes:
      max_length: number of query positions and of key positions in the table.
      trainable: whether the table is a parameter. False puts the table into the collection
        ``constants``, which is saved but never optimized.
      table_init: initializer of the table ``[heads, max_length, max_length]``.
    """

    max_length: Length
    trainable: bool = True
    table_init: Initializer = Normal(0.02)
    linear_in = ("table",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        init = with_axes(self.table_init, "heads", "query_length", "key_length")
        shape = (context.num_heads, self.max_length, self.max_length)

        def make_table() -> jax.Array:
            """Draws the initial table."""
            return init(self.make_rng("params"), shape)

        if self.trainable:
            table = self.param("table", init, shape)
        else:
            table = self.variable("constants", "table", make_table).value
        rows = slice_positions(table, context.query_span, axis=1)  # [h, q, max_length]
        return (static(slice_positions(rows, context.key_span, axis=2)),)


@register
class FactorizedRandom(Alignment):
    """An alignment whose logits are a product of two tables of parameters, ``S = R₁ R₂ᵀ``.

    `FactorizedRandom` is the Factorized Random Synthesizer of Tay et al. 2021, section 3.3, who use
    a rank of 8. The released Mesh-TensorFlow code differs from the paper and gives every query the
    same logits. This package implements only the form in the paper.

    Attributes:
      max_length: number of query positions and of key positions.
      rank: number of columns of R₁ and of R₂.
      factor_init: initializer of R₁ and R₂, each ``[heads, max_length, rank]``.
    """

    max_length: Length
    rank: Length = 8
    factor_init: Initializer = Normal(0.1)
    linear_in = ("query_factor",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        check_length(self, self.max_length, context.query_span, context.key_span)
        shape = (context.num_heads, self.max_length, self.rank)
        rows = self.param(
            "query_factor", with_axes(self.factor_init, "heads", "query_length", "rank"), shape
        )
        columns = self.param(
            "key_factor", with_axes(self.factor_init, "heads", "key_length", "rank"), shape
        )
        # [1, q, h, r]
        rows = slice_positions(rows, context.query_span, axis=1).swapaxes(0, 1)[None]
        # [1, k, h, r]
        columns = slice_positions(columns, context.key_span, axis=1).swapaxes(0, 1)[None]
        return (low_rank(rows, columns, token_keys=False, token_queries=False),)
