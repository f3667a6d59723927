"""T5's relative position bias: its buckets, and its table as an argument of attention functions."""

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
    """T5's bias for any number of queries and keys; `relative_bias` creates it.

    Attributes:
      table: ``[h, num_buckets]``.
      bidirectional: whether half of the buckets are for keys after the query.
      max_distance: all distances from this one on share the last bucket.
    """

    table: jax.Array
    bidirectional: bool = dataclasses.field(default=True, metadata={"static": True})
    max_distance: int = dataclasses.field(default=128, metadata={"static": True})

    def term(self, q_length: int, k_length: int, query_offset: int | jax.Array = 0) -> Relative:
        """Returns the term for keys from position 0 on, and queries from `query_offset` on.

        If the offset is traced, the term covers all distances between two keys, which suffices for
        queries at the positions of keys.
        """
        if isinstance(query_offset, int):
            start, end = 1 - q_length - query_offset, k_length - query_offset
        else:
            start, end = 1 - k_length, k_length
        buckets = buckets_between(
            start,
            end,
            num_buckets=self.table.shape[1],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return Relative(self.table[:, buckets], start)


def arange(start: int, end: int) -> np.ndarray | jax.Array:
    """Returns the integers from `start` to `end`, exclusive.

    They are NumPy's, and so constants, where both are known; symbolic ones (`jax.export`) are traced.
    """
    symbolic = is_symbolic_dim(start) or is_symbolic_dim(end)
    return jnp.arange(start, end) if symbolic else np.arange(start, end)


def relative_bias(
    table: jax.typing.ArrayLike, *, bidirectional: bool = True, max_distance: int = 128, head_axis: int = 0
) -> RelativeTable:
    """Returns T5's relative position bias, for the argument `bias` of `dot_product_attention`.

    It adds ``table[:, bucket(j − i)]`` to the logit of query i and key j (Raffel et al. 2020, section
    2.1). Neither the forward nor the backward pass creates an array of queries times keys for every
    example and head.

    Args:
      table: ``[num_heads, num_buckets]``, as T5X and `RelativeBias` store it (``rel_embedding``).
      bidirectional: True for encoders; False for decoders, where only keys up to the query have buckets.
      max_distance: all distances from this one on share the last bucket.
      head_axis: 1 for a table ``[num_buckets, num_heads]``, as Hugging Face's transformers store it
        (``relative_attention_bias``).

    Raises:
      ValueError: if the table does not have two axes, or for another `head_axis`.
    """
    table = jnp.asarray(table)
    if table.ndim != 2 or head_axis not in (0, 1):
        raise ValueError(
            f"relative_bias: the table has shape {table.shape} and head_axis={head_axis}; give "
            "[num_heads, num_buckets] and 0, or [num_buckets, num_heads] and 1"
        )
    return RelativeTable(table.T if head_axis else table, bidirectional, max_distance)


def buckets_between(
    start: int, end: int, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray | jax.Array:
    """Returns T5's buckets, see `relative_buckets`, of the distances from `start` to `end`, exclusive.

    Where a length is symbolic (`jax.export`), so are these, and the buckets are looked up when the program
    runs.
    """
    buckets_of = functools.partial(
        relative_buckets, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional
    )
    distances = arange(start, end)
    if isinstance(distances, np.ndarray):
        return buckets_of(distances)
    # Distances beyond the last bound share a bucket, so a table of the others holds all buckets. NumPy's
    # logarithm fills it: that of a TPU is less exact, and would move bounds.
    last = max(max_distance, num_buckets)
    table = jnp.asarray(buckets_of(np.arange(-last, last + 1)))
    return table[jnp.clip(distances, -last, last) + last]


def relative_buckets(
    distance: np.ndarray, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> np.ndarray:
    """Returns T5's bucket of each distance ``key − query``.

    Short distances have one bucket each; longer distances share buckets with logarithmically spaced
    bounds (Raffel et al. 2020, section 2.1; T5X, `_relative_position_bucket`).
    """
    offset = np.zeros_like(distance)
    n = -distance
    if bidirectional:
        num_buckets //= 2
        offset = np.where(n < 0, num_buckets, 0)
        n = np.abs(n)
    n = np.maximum(n, 0)
    max_exact = num_buckets // 2
    log_ratio = np.log(n.astype(np.float32) / max_exact + np.finfo(np.float32).eps)
    logarithmic = max_exact + (
        log_ratio / np.log(max_distance / max_exact) * (num_buckets - max_exact)
    ).astype(np.int32)
    bucket = np.where(n < max_exact, n, np.minimum(logarithmic, num_buckets - 1))
    return np.asarray(offset + bucket, np.int32)
