"""Packed rows: several examples in one row, with positions that start anew in each.

Terms made of tokens, or in self-attention of ``key - query``, need the segment mask only. Terms
that look positions up in parameters are unpacked at the door where rows hold few segments: their
examples become rows of their own, the ordinary routes run on those, and the results go back. Where rows
hold many, the fused route looks positions up block by block (`Inputs.places`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask, positions
from synthesizer_jax.attention.terms import (
    Banded,
    LowRank,
    Outer,
    Relative,
    Split,
    Static,
    Term,
    Terms,
)

DENSER = 3
"""Unpacking is worth while up to this many times the logits of the packed rows."""


def by_position(term: Term, mask: Mask) -> tuple[bool, bool]:
    """Whether a term's rows, and its columns, are looked up by position in the segment."""
    match term:
        case Static():
            return True, True
        case LowRank():
            return not term.token_queries, not term.token_keys
        case Outer():
            return False, True
        case Banded():  # in self-attention a fixed distance is the same in the row
            moves = term.starts is not None or not mask.self_attention
            return moves, moves
        case Split():
            return False, False
        case Relative():
            return not mask.self_attention, not mask.self_attention


def segment_lengths(mask: Mask, q_length: int, k_length: int) -> tuple[int, int]:
    """How many positions a segment's queries and keys have at most."""
    longest = mask.segment_length or max(q_length, k_length)
    return min(longest, q_length), min(longest, k_length)


def unpacked_lengths(mask: Mask, q_length: int, k_length: int) -> tuple[int, int] | None:
    """Lengths of the rows after unpacking; None if that is not possible or not worth while."""
    if mask.segments is None or mask.allowed is not None:
        return None
    q, k = segment_lengths(mask, q_length, k_length)
    return (q, k) if mask.segments * q * k <= DENSER * q_length * k_length else None


def with_places(terms: Terms, mask: Mask) -> tuple[Terms, tuple[jax.Array, jax.Array]]:
    """Terms for packed rows as they are, and positions ``[b, q]`` and ``[b, k]`` inside the segments.

    Parameters that act as queries or keys are looked up here, ``[b, n, h, r]``; `Static`, `Relative` and
    `Outer` terms stay as they are, in positions.
    """
    assert mask.query_segments is not None and mask.key_segments is not None
    places = positions(mask.query_segments), positions(mask.key_segments)

    def look_up(x: jax.Array, tokens: bool, place: jax.Array) -> jax.Array:
        return x if tokens else jnp.take(x[0], place, axis=0)

    def in_rows(term: Term) -> Term:
        if not isinstance(term, LowRank):
            return term
        return LowRank(
            look_up(term.queries, term.token_queries, places[0]),
            look_up(term.keys, term.token_keys, places[1]),
            token_keys=True,
        )

    return tuple(in_rows(term) for term in terms), places


def attend_unpacked(
    route: Callable[..., jax.Array],
    terms: Terms,
    values: jax.Array,
    *,
    mask: Mask,
    q_length: int,
) -> jax.Array:
    """Runs a route on the packed examples as rows of their own.

    Args:
      route: one of the routes.
      terms: terms for the packed rows.
      values: ``[b, k, h, e]``.
      mask: with segments, and within `unpacked_lengths`.
      q_length: number of queries of a packed row.

    Returns:
      ``[b, q, h, e]``. A token that breaks the mask's promise, in a segment that is too long, not in
      one piece or one too many, gets NaN.
    """
    assert mask.query_segments is not None and mask.key_segments is not None
    lengths = unpacked_lengths(mask, q_length, values.shape[1])
    assert mask.segments is not None and lengths is not None
    queries, q_lengths, q_fit = _rows(mask.query_segments, mask.segments, lengths[0])
    keys, k_lengths, k_fit = _rows(mask.key_segments, mask.segments, lengths[1])
    bare = dataclasses.replace(mask, query_segments=None, key_segments=None)
    key_valid, query_valid = bare.keys(values.shape[1]), bare.queries(q_length)
    rows = dataclasses.replace(
        bare,
        key_lengths=k_lengths,
        query_lengths=q_lengths,
        key_valid=None if key_valid is None else _gather(key_valid, keys),
        query_valid=None if query_valid is None else _gather(query_valid, queries),
        segment_length=None,
        segments=None,
    )
    out = route(
        tuple(_unpack(t, queries, keys) for t in terms),
        _gather(values, keys),
        mask=rows,
        q_length=lengths[0],
    )
    fits = (q_fit & k_fit).reshape(-1)
    out = jnp.where(fits[:, None, None, None], out, jnp.nan)
    return _pack(out, mask.query_segments, mask.segments)


def _rows(segments: jax.Array, count: int, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each segment's tokens as a row of their own.

    Returns:
      Where they are ``[b, count, length]``, their number ``[b·count]``, and whether they are neighbours and
      no more than `length`, bool ``[b, count]``.
    """
    member = segments[:, None, :] == jnp.arange(1, count + 1)[:, None]
    start = jnp.argmax(member, axis=-1)
    index = start[..., None] + jnp.arange(length)
    number = member.sum(axis=-1)
    last = segments.shape[1] - 1 - jnp.argmax(member[..., ::-1], axis=-1)
    fits = (number == 0) | ((number <= length) & (last - start + 1 == number))
    lengths = jnp.minimum(number, length)
    return jnp.minimum(index, segments.shape[1] - 1), lengths.reshape(-1), fits


def _gather(x: jax.Array, rows: jax.Array) -> jax.Array:
    """``[b, n, ...]`` to ``[b·count, length, ...]``."""
    picked = jax.vmap(lambda x, i: x[i])(x, rows)
    return picked.reshape(-1, *picked.shape[2:])


def _unpack(term: Term, queries: jax.Array, keys: jax.Array) -> Term:
    """The term for rows of one segment each; `queries` and `keys` say where their tokens are."""
    q, k = queries.shape[-1], keys.shape[-1]
    match term:
        case Static(logits):
            return Static(logits[:, :q, :k])
        case LowRank():
            return dataclasses.replace(
                term,
                queries=_gather(term.queries, queries)
                if term.token_queries
                else term.queries[:, :q],
                keys=_gather(term.keys, keys) if term.token_keys else term.keys[:, :k],
            )
        case Outer(a, b):
            return Outer(_gather(a, queries), _gather(b, queries))
        case Banded():
            weights, starts = term.weights, term.starts
            if weights.shape[0] > 1:  # made of tokens, or of examples
                rows = queries if weights.shape[1] > 1 else jnp.zeros_like(queries[..., :1])
                weights = _gather(weights, rows)
            elif weights.shape[1] > 1:
                weights = weights[:, :q]
            return dataclasses.replace(
                term, weights=weights, starts=None if starts is None else starts[:q]
            )
        case Relative() | Split():
            return term


def _pack(out: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """Rows ``[b·count, length, h, e]`` back to the tokens of ``[b, q]`` segments."""
    batch, length = segments.shape[0], out.shape[1]
    place = positions(segments)
    kept = (segments > 0) & (segments <= count) & (place < length)
    index = jnp.where(kept, (segments - 1) * length + place, 0)
    tokens = _gather(out.reshape(batch, count * length, *out.shape[2:]), index[:, None])
    lost = jnp.where(segments > 0, jnp.nan, 0).astype(out.dtype)
    return jnp.where(kept[..., None, None], tokens, lost[..., None, None])
