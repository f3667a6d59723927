"""T5's relative position bias."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np

from synthesizer_jax.alignments.base import Alignment
from synthesizer_jax.attention import Span, Terms, relative
from synthesizer_jax.initializers import GlorotUniform, Initializer
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register


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
      table_init: initialiser of the table ``[heads, num_buckets]``.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    table_init: Initializer = GlorotUniform()

    @nn.compact
    def __call__(
        self,
        queries: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        num_heads: int,
        head_dim: int = 0,
        query_span: Span,
        key_span: Span,
    ) -> Terms:
        table = self.param(
            "rel_embedding",
            with_axes(self.table_init, "heads", "relpos_buckets"),
            (num_heads, self.num_buckets),
        )
        first, last = distances(query_span, key_span)
        buckets = relative_buckets(
            np.arange(first, last + 1),
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return (relative(table[:, buckets], first=first),)


def distances(query_span: Span, key_span: Span) -> tuple[int, int]:
    """The smallest and largest ``key − query`` that can occur; any step of a decoding loop fits."""
    if not isinstance(key_span.start, int):
        raise ValueError("the first key position must be known when the function is traced")
    last = key_span.start + key_span.length - 1
    if isinstance(query_span.start, int):
        return key_span.start - (query_span.start + query_span.length - 1), last - query_span.start
    return -last, last


def relative_buckets(
    distance: np.ndarray, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray:
    """T5's bucket of each distance ``key − query`` (Raffel et al. 2020; T5X, `_relative_position_bucket`).

    Args:
      distance: integers of any shape.
      num_buckets: number of buckets.
      max_distance: where the logarithmic buckets end.
      bidirectional: half of the buckets for keys after the query.

    Returns:
      Buckets in ``[0, num_buckets)``, int32.
    """
    offset = np.zeros_like(distance)
    behind = -distance
    if bidirectional:
        num_buckets //= 2
        offset = np.where(behind < 0, num_buckets, 0)
        behind = np.abs(behind)
    behind = np.maximum(behind, 0)
    exact = num_buckets // 2
    ratio = np.log(behind.astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (ratio / np.log(max_distance / exact) * (num_buckets - exact)).astype(np.int32)
    bucket = np.where(behind < exact, behind, np.minimum(far, num_buckets - 1))
    return np.asarray(offset + bucket, np.int32)
