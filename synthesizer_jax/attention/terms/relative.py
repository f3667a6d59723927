"""Logits that depend on the distance from query to key only."""

from __future__ import annotations

import dataclasses
import operator
from typing import Annotated

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms.base import Term, check_rank, logits_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relative(Term):
    """Logits that depend on ``key - query`` only: T5's relative bias, ALiBi, log-Gaussian.

    Attributes:
      logits: ``[h, n]``; column j belongs to ``key - query = j + first``.
      first: the distance of the first column.
    """

    logits: Annotated[jax.Array, "h", None]
    first: int = dataclasses.field(metadata={"static": True})

    linear = "logits"

    def has_absolute_positions(self, mask: Mask) -> tuple[bool, bool]:
        return not mask.self_attention, not mask.self_attention

    def materialize(
        self, *, q_length: int, k_length: int, query_offset: int | jax.Array
    ) -> jax.Array:
        return expand_diagonals(
            diagonals(self, q_length, k_length, query_offset=query_offset), q_length
        )[None]


def relative(logits: jax.Array, *, first: int) -> Relative:
    """Returns a checked `Relative` of logits ``[h, n]``; column 0 is ``key - query = first``."""
    check_rank("relative: logits", logits, "[heads, distances]", rank=2)
    is_symbolic = is_symbolic_dim(first)  # in `jax.export`
    return Relative(logits, first if is_symbolic else operator.index(first))


def add_relative(x: Relative, y: Relative) -> Relative:
    """Returns the sum over the distances that both terms cover."""
    first = max(x.first, y.first)
    end = min(t.first + t.logits.shape[1] for t in (x, y))
    x_logits, y_logits = (t.logits[:, first - t.first : end - t.first] for t in (x, y))
    return Relative(x_logits + y_logits, first)


def diagonals(
    term: Relative, q_length: int, k_length: int, *, query_offset: int | jax.Array = 0
) -> jax.Array:
    """Returns the columns that a block of logits needs, ``[h, q + k - 1]`` float32.

    If a traced `query_offset` leads beyond the term, they are NaN.

    Raises:
      ValueError: the term does not reach from the last query to the first key, or from the first
        query to the last key.
    """
    needed = q_length + k_length - 1
    start = 1 - q_length - query_offset - term.first
    logits = term.logits.astype(logits_dtype(term.logits))
    if not isinstance(start, int):
        fits = (start >= 0) & (start + needed <= logits.shape[1])
        if needed > logits.shape[1]:
            return jnp.full((logits.shape[0], needed), jnp.nan, logits.dtype)
        columns = jax.lax.dynamic_slice_in_dim(logits, start, needed, axis=1)
        return jnp.where(fits, columns, jnp.nan)
    if start < 0 or start + needed > logits.shape[1]:
        first = start + term.first
        raise ValueError(
            f"relative: logits cover key - query from {term.first} to "
            f"{term.first + logits.shape[1] - 1}, but the block needs {first} to "
            f"{first + needed - 1}; give a column for each"
        )
    return jax.lax.slice_in_dim(logits, start, start + needed, axis=1)


def expand_diagonals(columns: jax.Array, q_length: int) -> jax.Array:
    """Expands diagonals ``[..., q + k - 1]`` to a block ``[..., q, k]``, as a reshape.

    ``block[i, j] = columns[q - 1 + j - i]``; the transpose of this function sums a block along its
    diagonals.
    """
    *lead, n = columns.shape
    if is_symbolic_dim(n):  # the reshape would need to know that its size is not negative
        keys = jnp.arange(n + 1 - q_length)
        return columns[..., q_length - 1 + keys[None] - jnp.arange(q_length)[:, None]]
    rows = jnp.broadcast_to(columns[..., None, :], (*lead, q_length, n))
    flat = rows.reshape(*lead, q_length * n)
    flat = jnp.pad(flat, [(0, 0)] * len(lead) + [(0, q_length)])
    skewed = flat.reshape(*lead, q_length, n + 1)[..., : n + 1 - q_length]
    return skewed[..., ::-1, :]
