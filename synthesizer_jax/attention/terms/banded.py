"""Attention weights of a window of keys around every query."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms.base import Term, check_rank, gather_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Banded(Term):
    """Attention *weights*, not logits, of a window of keys around every query; no softmax.

    Hard-coded Gaussian attention, lightweight and dynamic convolution. It stands alone: weights do
    not add to logits.

    Attributes:
      weights: ``[b or 1, q or 1, h, w]``.
      first: ``key - query`` of the first tap.
      starts: ``[q]`` the key of each query's first tap, in place of `first`: hard-coded
        cross-attention, whose center moves at another rate than the query.
      normalize: divide by the sum over the keys that are seen; otherwise what lies outside of the
        row or is masked just does not count.
    """

    weights: Annotated[jax.Array, "b", "q", "h", None]
    first: int = dataclasses.field(metadata={"static": True})
    starts: Annotated[jax.Array | None, "q"] = None
    normalize: bool = dataclasses.field(default=False, metadata={"static": True})

    is_weights = True
    stands_alone = True

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The number of queries, if the weights differ between them, and None."""
        return (self.weights.shape[1] if self.weights.shape[1] > 1 else None), None

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        # In self-attention a fixed distance is the same in the row.
        moves = self.starts is not None or not mask.self_attention
        return moves, moves

    def zero_padding(self, clear: Callable[[jax.Array, str], jax.Array]) -> Banded:
        return self

    def materialize(
        self, *, q_length: int, k_length: int, query_offset: int | jax.Array
    ) -> jax.Array:
        """Raises a `ValueError`: weights are no logits."""
        raise ValueError(
            "Banded is not made of logits alone, which is asked for here (talking heads exchange "
            "logits); use GaussianBias, or plain Attention"
        )

    def unpack(self, queries: jax.Array, keys: jax.Array) -> Banded:
        q, weights, starts = queries.shape[-1], self.weights, self.starts
        if weights.shape[0] > 1:  # made of tokens, or of examples
            rows = queries if weights.shape[1] > 1 else jnp.zeros_like(queries[..., :1])
            weights = gather_rows(weights, rows)
        elif weights.shape[1] > 1:
            weights = weights[:, :q]
        starts = None if starts is None else starts[:q]
        return dataclasses.replace(self, weights=weights, starts=starts)


def banded(
    weights: jax.Array,
    *,
    first: int = 0,
    starts: jax.Array | None = None,
    normalize: bool = False,
) -> Banded:
    """Returns a checked `Banded` of weights ``[b or 1, q or 1, h, w]``; see there for the others."""
    check_rank("banded: weights", weights, "[batch or 1, q or 1, heads, window]", rank=4)
    if starts is not None:
        check_rank("banded: starts", starts, "[q]", rank=1)
    return Banded(weights, operator.index(first), starts, normalize)
