"""Position biases that depend on the distance between query and key, such as T5's and ALiBi."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments.base import Alignment, AttentionContext
from synthesizer_jax.attention import Terms, relative
from synthesizer_jax.attention.relative_table import arange, buckets_between
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length
from synthesizer_jax.primitives.initializers import GlorotUniform, Initializer
from synthesizer_jax.primitives.parameters import with_axes


@register
class RelativeBias(Alignment):
    """A position bias with a learned number for each head and each bucket of distances.

    `RelativeBias` is T5's relative position bias (Raffel et al. 2020, section 2.1). The distance of
    a pair is ``key − query``. Half of the buckets hold a single distance each. The bounds of the
    remaining buckets grow logarithmically up to `max_distance`. T5 has one table of learned numbers
    per stack. To share a table in a stack as in T5, pass a `RelativeBias` to the stack as `bias`.
    To give every layer its own table, add a `RelativeBias` to the layer's `Mixture`.

    Attributes:
      num_buckets: number of buckets. If `bidirectional` is True, `num_buckets` includes the buckets
        of both directions.
      max_distance: all distances of at least `max_distance` share the last bucket.
      bidirectional: whether keys after the query have their own buckets. Encoders use True.
        Decoders use False, because only past keys need buckets.
      table_init: initializer of the table ``[heads, num_buckets]``.
    """

    num_buckets: Length = 32
    max_distance: Length = 128
    bidirectional: bool = True
    table_init: Initializer = GlorotUniform()
    linear_in = ("rel_embedding",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        table = self.param(
            "rel_embedding",
            with_axes(self.table_init, "heads", "relpos_buckets"),
            (context.num_heads, self.num_buckets),
        )
        first, last = context.distance_range
        buckets = buckets_between(
            first,
            last + 1,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return (relative(table[:, buckets], first=first),)  # [h, distances]


@register
class ALiBi(Alignment):
    """A position bias with a fixed penalty that grows with the distance, ``-m_h · |key − query|``.

    ALiBi is described by Press et al. 2022, *Train Short, Test Long*, section 3. To add ALiBi to a
    dot product, use ``Mixture((DotProduct(), ALiBi()), weights="sum")``.

    If the number of heads is a power of two, the slopes of heads 1, 2, … are
    ``m_h = 2^(-8 h / heads)``. If the number of heads is not a power of two, let n be the largest
    power of two below the number of heads. The first n heads have the slopes of a model with n
    heads. The remaining heads have every second slope of a model with 2 n heads, as in the released
    code.
    """

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        first, last = context.distance_range
        dtype = logits_dtype(queries)
        distance = jnp.abs(arange(first, last + 1)).astype(dtype)
        slopes = jnp.asarray(alibi_slopes(context.num_heads), dtype)
        return (relative(-slopes[:, None] * distance[None], first=first),)  # [h, distances]


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the slope m_h of every head, ``[heads]``; see `ALiBi`."""

    def slopes_of(count: int) -> np.ndarray:
        """Returns the slopes for a number of heads that is a power of two."""
        return 2.0 ** (-8.0 / count * np.arange(1, count + 1))

    # `below` is the largest power of two that is at most the number of heads.
    below = 2 ** (num_heads.bit_length() - 1)
    others = slopes_of(2 * below)[::2]
    return np.concatenate([slopes_of(below), others[: num_heads - below]])
