"""T5's relative position bias, and the functions that assign distances to its buckets."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from synthesizer_jax.attention.terms import Relative


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeTable:
    """T5's relative position bias for any number of queries and keys.

    Use `relative_bias` to create a `RelativeTable`.

    Attributes:
      table: ``[h, num_buckets]``.
      bidirectional: whether half of the buckets are for keys after the query.
      max_distance: all distances of at least `max_distance` share the last bucket.
    """

    table: jax.Array
    bidirectional: bool = dataclasses.field(default=True, metadata={"static": True})
    max_distance: int = dataclasses.field(default=128, metadata={"static": True})

    def term(self, q_length: int, k_length: int, query_offset: int | jax.Array = 0) -> Relative:
        """Returns the bias as a `Relative` term for given numbers of queries and keys.

        Args:
          q_length: the number of queries.
          k_length: the number of keys. The first key is at position 0.
          query_offset: the position of the first query. If the offset is traced, the term covers
            all distances between two keys. This range is sufficient if every query is at the
            position of a key, as in decoding.
        """
        if isinstance(query_offset, int):
            start = 1 - q_length - query_offset
            end = k_length - query_offset
        else:
            start = 1 - k_length
            end = k_length
        buckets = buckets_between(
            start,
            end,
            num_buckets=self.table.shape[1],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return Relative(self.table[:, buckets], start)


def arange(start: int, end: int) -> np.ndarray | jax.Array:
    """Returns the integers from `start` to `end` - 1.

    If both numbers are known, the result is a NumPy array, which is a constant under `jax.jit`. If
    one number is a symbolic size of `jax.export`, the result is traced.
    """
    symbolic = is_symbolic_dim(start) or is_symbolic_dim(end)
    return jnp.arange(start, end) if symbolic else np.arange(start, end)


def relative_bias(
    table: jax.typing.ArrayLike,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    head_axis: int = 0,
) -> RelativeTable:
    """Returns T5's relative position bias, for the argument `bias` of `dot_product_attention`.

    The bias adds ``table[:, bucket(j − i)]`` to the logits of query i and key j (Raffel et al.
    2020, section 2.1). Neither the forward nor the backward pass creates an array of queries and
    keys for every example and head.

    Args:
      table: ``[num_heads, num_buckets]``, such as ``rel_embedding`` in T5X and in `RelativeBias`.
      bidirectional: whether keys after the query have separate buckets. Use True for encoders, and
        False for decoders, in which a query attends only to keys up to its own position.
      max_distance: all distances of at least `max_distance` share the last bucket.
      head_axis: the axis of heads. Use ``head_axis=1`` for a table ``[num_buckets, num_heads]``,
        such as ``relative_attention_bias`` in Hugging Face's transformers.

    Returns:
      The bias.

    Raises:
      ValueError: if the table does not have two axes, or if `head_axis` is neither 0 nor 1.
    """
    table = jnp.asarray(table)
    if table.ndim != 2 or head_axis not in (0, 1):
        raise ValueError(
            f"relative_bias: the table has shape {table.shape} and head_axis is {head_axis}. Pass "
            "a table [num_heads, num_buckets] with head_axis=0, or a table [num_buckets, "
            "num_heads] with head_axis=1."
        )
    return RelativeTable(table.T if head_axis else table, bidirectional, max_distance)


def buckets_between(
    start: int, end: int, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray | jax.Array:
    """Returns T5's buckets, int32 ``[end - start]``, for the distances from `start` to `end` - 1.

    See `relative_buckets` for the arguments. If `start` or `end` is a symbolic size of
    `jax.export`, the buckets are computed when the program runs.
    """
    buckets_of = functools.partial(
        relative_buckets,
        num_buckets=num_buckets,
        max_distance=max_distance,
        bidirectional=bidirectional,
    )
    distances = arange(start, end)
    if isinstance(distances, np.ndarray):
        return buckets_of(distances)

    # All distances of `last` or more share a bucket, so a table of the distances up to `last`
    # contains all buckets. The table is computed in NumPy. TPUs compute logarithms less exactly,
    # and would assign some distances to the wrong buckets.
    last = max(max_distance, num_buckets)
    table = jnp.asarray(buckets_of(np.arange(-last, last + 1)))
    return table[jnp.clip(distances, -last, last) + last]


def relative_buckets(
    distance: np.ndarray, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray:
    """Returns T5's bucket for each distance ``key − query``, int32.

    Each short distance has a separate bucket. Longer distances share buckets, and the bounds of
    these buckets are spaced logarithmically (Raffel et al. 2020, section 2.1; T5X,
    `_relative_position_bucket`).

    Args:
      distance: an array of integers.
      num_buckets: the number of buckets.
      max_distance: all distances of at least `max_distance` share the last bucket.
      bidirectional: whether half of the buckets are for keys after the query.
    """
    offset = np.zeros_like(distance)
    n = -distance
    if bidirectional:
        num_buckets //= 2
        offset = np.where(n < 0, num_buckets, 0)
        n = np.abs(n)
    # With bidirectional buckets, n is now the distance in either direction. Otherwise, n is the
    # distance of the key before the query, or 0 if the key comes after the query.
    n = np.maximum(n, 0)

    # The first half of the buckets is for single distances 0, 1, 2, …. The second half is for
    # ranges of distances.
    max_exact = num_buckets // 2
    log_ratio = np.log(n.astype(np.float32) / max_exact + np.finfo(np.float32).eps)
    logarithmic = max_exact + (
        log_ratio / np.log(max_distance / max_exact) * (num_buckets - max_exact)
    ).astype(np.int32)
    bucket = np.where(n < max_exact, n, np.minimum(logarithmic, num_buckets - 1))
    return np.asarray(offset + bucket, np.int32)
