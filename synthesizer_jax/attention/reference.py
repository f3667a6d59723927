"""The reference route: every logit in memory, the oracle of all other routes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.banded import materialise_banded
from synthesizer_jax.attention.masks import Mask, positions
from synthesizer_jax.attention.packed import by_position
from synthesizer_jax.attention.terms import Banded, Split, Terms, materialise


def attend_reference(terms: Terms, values: jax.Array, *, mask: Mask, q_length: int) -> jax.Array:
    """``softmax(Σ terms) · values`` with all weights in memory.

    Args:
      terms: terms for q queries and k keys.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` in the values' dtype.
    """
    weights = weigh(terms, mask=mask, q_length=q_length, k_length=values.shape[1])
    weights = jnp.broadcast_to(weights, (values.shape[0], *weights.shape[1:]))
    out = jnp.einsum(
        "bhqk,bkhe->bqhe",
        weights.astype(values.dtype),
        values,
        preferred_element_type=weights.dtype,
    )
    return out.astype(values.dtype)


def weigh(terms: Terms, *, mask: Mask, q_length: int, k_length: int) -> jax.Array:
    """The attention weights ``[b or 1, h, q, k]``, float32 or wider; empty rows are zero."""
    first = terms[0]
    options: Any = {"mask": mask, "q_length": q_length, "k_length": k_length}
    if isinstance(first, Split):
        return weigh_groups(first, **options)
    if isinstance(first, Banded):
        places = None
        if mask.query_segments is not None and any(by_position(first, mask)):
            assert mask.key_segments is not None
            places = positions(mask.query_segments), positions(mask.key_segments)
        return materialise_banded(first, places=places, **options)
    logits = packed_logits(terms, **options)
    return softmax(logits, mask.pairs(q_length, k_length))


def softmax(logits: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """The softmax over the last axis of the allowed logits; rows with nothing above −inf are zero.

    Args:
      logits: ``[..., k]``.
      pairs: bool, which of them are allowed; None: all.
    """
    return _softmax(logits if pairs is None else jnp.where(pairs, logits, -jnp.inf))


@jax.custom_jvp
def _softmax(logits: jax.Array) -> jax.Array:
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights * jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)


@_softmax.defjvp
def _softmax_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    weights = _softmax(*primals)
    moved = weights * tangents[0]
    return weights, moved - weights * moved.sum(axis=-1, keepdims=True)


def weigh_groups(split: Split, *, mask: Mask, q_length: int, k_length: int) -> jax.Array:
    """As `weigh`, the groups' heads one after another."""
    groups, start = [], 0
    for terms, count in zip(split.groups, split.heads, strict=True):
        part = mask.head_group(start, count)
        groups.append(weigh(terms, mask=part, q_length=q_length, k_length=k_length))
        start += count
    batch = max(x.shape[0] for x in groups)
    return jnp.concatenate([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in groups], axis=1)


def packed_logits(terms: Terms, *, mask: Mask, q_length: int, k_length: int) -> jax.Array:
    """The logits ``[b or 1, h, q, k]`` with positions counted inside packed segments, if any."""
    total = None
    for term in terms:
        logits = materialise(
            (term,), q_length=q_length, k_length=k_length, query_offset=mask.query_offset
        )
        by_query, by_key = by_position(term, mask)
        if by_query and mask.query_segments is not None:
            rows = positions(mask.query_segments)[:, None, :, None]
            logits = jnp.take_along_axis(logits, rows, axis=2)
        if by_key and mask.key_segments is not None:
            columns = positions(mask.key_segments)[:, None, None, :]
            logits = jnp.take_along_axis(logits, columns, axis=3)
        total = logits if total is None else total + logits
    assert total is not None
    return total
