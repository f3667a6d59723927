"""Packed rows: several examples in one row, with positions that start anew in each.

Terms that look positions up in parameters are unpacked where rows hold few segments: their examples become
rows of their own, on which the ordinary routes run. Where rows hold many, the fused route looks positions
up block by block (`FusedInputs.positions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask, segment_positions
from synthesizer_jax.attention.terms import Call, LowRank, Relative, Term, TermArray, Terms, map_arrays

MAX_UNPACKING_FACTOR = 3
"""Rows are unpacked if that makes at most this many times as many logits."""


def unpacked_lengths(mask: Mask, q_length: int, k_length: int) -> tuple[int, int] | None:
    """Returns the lengths of the rows after unpacking; None if that is not possible or not worthwhile."""
    if mask.segments is None or mask.allowed is not None:
        return None
    q, k = mask.segment_lengths(q_length, k_length)
    return (q, k) if mask.segments * q * k <= MAX_UNPACKING_FACTOR * q_length * k_length else None


def cover_distances(terms: Terms, mask: Mask, q_length: int, k_length: int) -> Terms:
    """Returns the terms of packed rows, extended to distances that no segment reaches."""
    q, k = mask.segment_lengths(q_length, k_length)

    def cover(term: Term) -> Term:
        if not isinstance(term, Relative):
            return term
        last = term.first + term.logits.shape[1] - 1
        if term.first > 1 - q or last < k - 1:
            return term  # too short: `cut_diagonals` raises the error
        before, after = max(0, term.first - 1 + q_length), max(0, k_length - 1 - last)
        logits = jnp.pad(term.logits, ((0, 0), (before, after)))
        return Relative(logits, term.first - before)

    return tuple(map(cover, terms))


def with_segment_positions(terms: Terms, mask: Mask) -> tuple[Terms, tuple[jax.Array, jax.Array]]:
    """Returns terms for packed rows as they are, and positions ``[b, q]`` and ``[b, k]`` in the segments.

    Parameters that act as queries or keys are looked up here; other terms stay as they are, in positions.
    """
    assert mask.query_segments is not None and mask.key_segments is not None
    positions = segment_positions(mask.query_segments), segment_positions(mask.key_segments)

    def look_up(term: Term) -> Term:
        if not isinstance(term, LowRank):
            return term
        queries, keys = term.queries, term.keys
        queries = queries if term.token_queries else jnp.take(queries[0], positions[0], axis=0)
        keys = keys if term.token_keys else jnp.take(keys[0], positions[1], axis=0)
        return LowRank(queries, keys, token_keys=True)

    return tuple(map(look_up, terms)), positions


def attend_unpacked(route: Callable[[Call], jax.Array], call: Call) -> jax.Array:
    """Runs a route on the packed examples as rows of their own, within `unpacked_lengths`.

    A token that breaks the mask's promise, in a segment that is too long, not in one piece or one too many,
    gets NaN.
    """
    values, mask, q_length = call.values, call.mask, call.q_length
    assert mask.query_segments is not None and mask.key_segments is not None
    lengths = unpacked_lengths(mask, q_length, values.shape[1])
    assert mask.segments is not None and lengths is not None
    queries, q_lengths, q_fit = _segment_rows(mask.query_segments, mask.segments, lengths[0])
    keys, k_lengths, k_fit = _segment_rows(mask.key_segments, mask.segments, lengths[1])
    bare = dataclasses.replace(mask, query_segments=None, key_segments=None)
    key_valid, query_valid = bare.keys(values.shape[1]), bare.queries(q_length)
    rows = dataclasses.replace(
        bare,
        key_lengths=k_lengths,
        query_lengths=q_lengths,
        key_valid=None if key_valid is None else _gather_rows(key_valid, keys),
        query_valid=None if query_valid is None else _gather_rows(query_valid, queries),
        segment_length=None,
        segments=None,
    )

    def unpack(a: TermArray) -> jax.Array:
        x = a.x
        for axis, positions in (("q", queries), ("k", keys)):
            if axis not in a.axes:
                continue
            length = x.shape[a.axes.index(axis)]
            if a.from_tokens:
                shared = jnp.zeros_like(positions[..., :1])  # by all positions
                x = jnp.broadcast_to(x, (positions.shape[0], *x.shape[1:]))
                x = _gather_rows(x, shared if length == 1 else positions)
            else:
                length = min(length, positions.shape[-1])
                x = jax.lax.slice_in_dim(x, 0, length, axis=a.axes.index(axis))
        return x

    terms = map_arrays(unpack, call.terms)
    values = _gather_rows(values, keys)
    out = route(dataclasses.replace(call, terms=terms, values=values, mask=rows, q_length=lengths[0]))
    fits = (q_fit & k_fit).reshape(-1)
    out = jnp.where(fits[:, None, None, None], out, jnp.nan)
    return _pack(out, mask.query_segments, mask.segments)


def _segment_rows(segments: jax.Array, count: int, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each segment's tokens as a row of their own.

    Where they are ``[b, count, length]``, their number ``[b·count]``, and whether they are neighbors and no
    more than `length`, bool ``[b, count]``.
    """
    member = segments[:, None, :] == jnp.arange(1, count + 1)[None, :, None]
    start = jnp.argmax(member, axis=-1)
    index = start[..., None] + jnp.arange(length)[None, None]
    number = member.sum(axis=-1)
    last = segments.shape[1] - 1 - jnp.argmax(member[..., ::-1], axis=-1)
    fits = (number == 0) | ((number <= length) & (last - start + 1 == number))
    lengths = jnp.minimum(number, length)
    return jnp.minimum(index, segments.shape[1] - 1), lengths.reshape(-1), fits


def _pack(out: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """Rows ``[b·count, length, h, e]`` back to the tokens of ``[b, q]`` segments."""
    batch, length = segments.shape[0], out.shape[1]
    position = segment_positions(segments)
    kept = (segments > 0) & (segments <= count) & (position < length)
    index = jnp.where(kept, (segments - 1) * length + position, 0)
    tokens = _gather_rows(out.reshape(batch, count * length, *out.shape[2:]), index[:, None])
    tokens = jnp.where(kept[..., None, None], tokens, 0)
    return jnp.where((kept | (segments <= 0))[..., None, None], tokens, jnp.nan)


def _gather_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the rows ``[b, count, length]`` of ``[b, n, ...]``, as ``[b · count, length, ...]``."""
    picked = jax.vmap(lambda x, i: x[i])(x, rows)  # [b, count, length, ...]
    return picked.reshape(-1, *picked.shape[2:])
