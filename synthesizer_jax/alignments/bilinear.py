"""General bilinear attention."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import Alignment, AttentionContext, project
from synthesizer_jax.attention import Terms, low_rank
from synthesizer_jax.initializers import Initializer, Normal
from synthesizer_jax.registry import register


@register
class Bilinear(Alignment):
    """A full matrix between every pair of tokens, ``logits_h = (x W_h) yᵀ`` with W_h of d × d.

    General bilinear multi-head attention (Shazeer et al. 2020, section 3.3) is this alignment in an
    `Attention` with ``project_values=False``: the case of head size d_model, where key and value
    projections can be multiplied into those of the queries and the output.

    Attributes:
      query_init: initializer of the kernel ``[d_model, heads, d_model]``; None: standard deviation
        1 / d_model, which makes the logits of unit tokens about one.
    """

    query_init: Initializer | None = None
    linear_in = ("query",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        width = queries.shape[-1]
        queries = project(
            queries,
            heads=context.num_heads,
            width=width,
            name="query",
            kernel_init=self.query_init or Normal(1.0 / width),
        )
        keys = jnp.broadcast_to(keys[:, :, None], (*keys.shape[:2], context.num_heads, width))
        return (low_rank(queries, keys, token_keys=True),)
