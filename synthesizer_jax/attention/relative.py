"""T5's relative position bias: its buckets, and a table of it as an argument of attention."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention.terms import Relative


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeTable:
    """T5's bias for any number of queries and keys; made by `relative_bias`.

    Attributes:
      table: ``[h, num_buckets]``.
      bidirectional: half of the buckets are for keys after the query.
      max_distance: distances from here on share the last bucket.
    """

    table: jax.Array
    bidirectional: bool = dataclasses.field(default=True, metadata={"static": True})
    max_distance: int = dataclasses.field(default=128, metadata={"static": True})

    def term(self, q_length: int, k_length: int, query_offset: int | jax.Array = 0) -> Relative:
        """The term for keys from position 0 on, and queries from `query_offset` on.

        Where the offset is traced, the term reaches as far as queries among the keys need.
        """
        if isinstance(query_offset, int):
            first, end = 1 - q_length - query_offset, k_length - query_offset
        else:
            first, end = 1 - k_length, k_length
        buckets = relative_buckets(
            np.arange(first, end),
            num_buckets=self.table.shape[1],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return Relative(self.table[:, buckets], first)


def relative_bias(
    table: jax.typing.ArrayLike,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    head_axis: int = 0,
) -> RelativeTable:
    """T5's relative position bias, as `bias` of `dot_product_attention`.

    The logit of query i and key j gets ``table[:, bucket(j − i)]`` (Raffel et al. 2020, section
    2.1). No array of queries times keys is made, forward or backward: the gradient goes straight
    to the table.

    Args:
      table: ``[num_heads, num_buckets]``, as T5X and `RelativeBias` keep it (``rel_embedding``).
      bidirectional: True in encoders; in decoders only the past has buckets.
      max_distance: distances from here on share the last bucket.
      head_axis: 1 for a table ``[num_buckets, num_heads]``, as Hugging Face's transformers keep it
        (``relative_attention_bias``).

    Raises:
      ValueError: for a table that has not two axes, or another `head_axis`.
    """
    table = jnp.asarray(table)
    if table.ndim != 2 or head_axis not in (0, 1):
        raise ValueError(
            f"relative_bias: the table has shape {table.shape} and head_axis={head_axis}; give "
            "[num_heads, num_buckets] and 0, or [num_buckets, num_heads] and 1"
        )
    return RelativeTable(table.T if head_axis else table, bidirectional, max_distance)


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
