"""T5's relative position bias."""

from __future__ import annotations

import flax.linen as nn
import jax

from synthesizer_jax.alignments.base import Alignment, AttentionContext
from synthesizer_jax.attention import Terms, relative
from synthesizer_jax.attention.relative import buckets_between
from synthesizer_jax.initializers import GlorotUniform, Initializer
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Length


@register
class RelativeBias(Alignment):
    """A learned number per head for each bucket of the distance ``key − query``.

    Raffel et al. 2020, section 2.1: half of the buckets are exact, the others grow logarithmically
    up to `max_distance`. T5 keeps one such table per stack: give it to a stack as `bias`, or put it
    into a `Mixture`.

    Attributes:
      num_buckets: number of buckets, over both directions when `bidirectional`.
      max_distance: distances from here on share the last bucket.
      bidirectional: True in encoders; in decoders only the past has buckets.
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
        return (relative(table[:, buckets], first=first),)
