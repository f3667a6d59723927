"""Dense Synthesizer."""

from __future__ import annotations

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
from synthesizer_jax.attention import Terms, low_rank
from synthesizer_jax.initializers import FanIn, Initializer, Normal
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Length


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
        if queries.ndim == 3:
            queries = project(
                queries,
                heads=context.num_heads,
                width=self.hidden_dim or context.head_dim,
                name="hidden",
                axis="synth_hidden",
                kernel_init=self.hidden_init,
            )
        width = queries.shape[-1]
        table = self.param(
            "table",
            with_axes(
                self.table_init or Normal(width**-0.5), "heads", "key_length", "synth_hidden"
            ),
            (1 if self.share_heads else context.num_heads, self.max_length, width),
        )
        rows = slice_positions(table, context.key_span, axis=1).astype(queries.dtype)
        rows = jnp.broadcast_to(rows, (context.num_heads, *rows.shape[1:]))
        return (low_rank(jax.nn.relu(queries), rows.swapaxes(0, 1)[None], token_keys=False),)
