"""Attention in packed rows, which contain several examples with separate positions.

Terms that consist of parameters are looked up by the position in the example, not by the position
in the row. If rows contain few examples, the rows are unpacked to one row per example, and the
ordinary routes run on the unpacked rows; see `attend_unpacked`. If rows contain many examples, the
fused route looks up the positions tile by tile; see `FusedInputs.positions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask, segment_positions
from synthesizer_jax.attention.terms import (
    Call,
    LowRank,
    Output,
    Relative,
    Term,
    TermArray,
    Terms,
    map_arrays,
    no_log_sum,
)

MAX_UNPACKING_FACTOR = 3
"""The largest factor by which unpacking may increase the number of logits.

Every unpacked row is as long as the longest segment, so unpacking many short segments would waste
work.
"""


def unpacked_lengths(mask: Mask, q_length: int, k_length: int) -> tuple[int, int] | None:
    """Returns the numbers of queries and keys in each row after unpacking.

    The result is None if the number of segments is not known, if the mask has a pattern of pairs,
    or if unpacking would create too many logits.
    """
    if mask.segments is None or mask.allowed is not None:
        return None
    q, k = mask.segment_lengths(q_length, k_length)
    return (q, k) if mask.segments * q * k <= MAX_UNPACKING_FACTOR * q_length * k_length else None


def cover_distances(terms: Terms, mask: Mask, q_length: int, k_length: int) -> Terms:
    """Pads the `Relative` terms of packed rows with zeros for distances that no segment reaches.

    The padded terms cover all distances in the row, which the routes require. The zeros have no
    effect, because the mask hides keys of other segments.
    """
    q, k = mask.segment_lengths(q_length, k_length)

    def cover(term: Term) -> Term:
        """Returns a `Relative` term with an entry for each distance in the row."""
        if not isinstance(term, Relative):
            return term
        last = term.first + term.logits.shape[1] - 1
        if term.first > 1 - q or last < k - 1:
            # The term does not cover all distances in a segment. The term is returned unchanged,
            # and `cut_diagonals` raises an error later.
            return term

        # The distances in the row are 1 - q_length to k_length - 1.
        before = max(0, term.first - 1 + q_length)
        after = max(0, k_length - 1 - last)
        logits = jnp.pad(term.logits, ((0, 0), (before, after)))
        return Relative(logits, term.first - before)

    return tuple(map(cover, terms))


def with_segment_positions(terms: Terms, mask: Mask) -> tuple[Terms, tuple[jax.Array, jax.Array]]:
    """Returns the terms for rows that are not unpacked, and the positions in segments.

    If the queries or keys of a `LowRank` term are parameters, this function looks up the vector of
    each token by its position. All other terms are returned unchanged, and the caller must look up
    their logits at the returned positions.

    Returns:
      The terms, and the positions of queries ``[b, q]`` and keys ``[b, k]``.
    """
    assert mask.query_segments is not None and mask.key_segments is not None
    positions = segment_positions(mask.query_segments), segment_positions(mask.key_segments)

    def look_up(term: Term) -> Term:
        """Returns a `LowRank` term with a vector for each token. Other terms are unchanged."""
        if not isinstance(term, LowRank):
            return term
        queries = term.queries
        if not term.token_queries:
            queries = jnp.take(queries[0], positions[0], axis=0)  # [b, q, h, r]
        keys = term.keys
        if not term.token_keys:
            keys = jnp.take(keys[0], positions[1], axis=0)  # [b, k, h, r]
        return LowRank(queries, keys, token_keys=True)

    return tuple(map(look_up, terms)), positions


def attend_unpacked(route: Callable[[Call], Output], call: Call) -> Output:
    """Unpacks packed rows to one row per example, runs a route, and packs the output again.

    The mask declares upper bounds on the number and the length of the segments. The output is NaN
    for tokens of a segment that is longer than the bound, is interrupted by other tokens, or has a
    number above the bound.

    Args:
      route: the function of the route.
      call: a call with packed rows, for which `unpacked_lengths` is not None.

    Returns:
      The output ``[b, q, h, e]``, in the packed rows. If `call.returns_log_sums` is True, the log
      sums ``[b, q, h]`` are returned as well.
    """
    values, mask, q_length = call.values, call.mask, call.q_length
    assert mask.query_segments is not None and mask.key_segments is not None
    lengths = unpacked_lengths(mask, q_length, values.shape[1])
    assert mask.segments is not None and lengths is not None

    # `queries` and `keys` contain the indices of the tokens of each segment, [b, count, length].
    # `q_lengths` and `k_lengths` contain the lengths of the segments, [b · count].
    queries, q_lengths, q_fit = _segment_rows(mask.query_segments, mask.segments, lengths[0])
    keys, k_lengths, k_fit = _segment_rows(mask.key_segments, mask.segments, lengths[1])

    # The mask may contain padding inside of segments, so `key_valid` and `query_valid` are gathered
    # like the tokens.
    bare = dataclasses.replace(mask, query_segments=None, key_segments=None)
    key_valid = bare.keys(values.shape[1])
    query_valid = bare.queries(q_length)
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
        """Returns an array of a term for the unpacked rows.

        Arrays that are computed from tokens are gathered. Parameters are looked up by position, so
        all rows share the first entries of a parameter.
        """
        x = a.x
        for axis, positions in (("q", queries), ("k", keys)):
            if axis not in a.axes:
                continue
            length = x.shape[a.axes.index(axis)]
            if a.from_tokens:
                # If all positions share a single entry of the array, every row gathers this entry.
                shared = jnp.zeros_like(positions[..., :1])
                x = jnp.broadcast_to(x, (positions.shape[0], *x.shape[1:]))
                x = _gather_rows(x, shared if length == 1 else positions)
            else:
                length = min(length, positions.shape[-1])
                x = jax.lax.slice_in_dim(x, 0, length, axis=a.axes.index(axis))
        return x

    terms = map_arrays(unpack, call.terms)
    values = _gather_rows(values, keys)
    call = dataclasses.replace(call, terms=terms, values=values, mask=rows, q_length=lengths[0])
    segments, count = mask.query_segments, mask.segments

    # The output is ``[b · count, length, h, e]``, and the log sums are ``[b · count, length, h]``.
    results = route(call)
    fits = (q_fit & k_fit).reshape(-1)  # [b · count]

    def pack(x: jax.Array, padding: jax.Array | float) -> jax.Array:
        """Moves a result of the route from the unpacked rows to the packed rows."""
        # The results of segments that do not fit into the unpacked rows are set to NaN.
        x = jnp.where(fits.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan)
        return _pack(x, segments, count, padding)

    if not isinstance(results, tuple):
        return pack(results, 0)
    out, log_sums = results
    return pack(out, 0), pack(log_sums, no_log_sum(log_sums.dtype))


def _segment_rows(
    segments: jax.Array, count: int, length: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the indices of the tokens of each segment, for gathering the tokens into rows.

    Args:
      segments: the segment number of each token, ``[b, n]``.
      count: the largest number of segments in a row.
      length: the largest length of a segment.

    Returns:
      A tuple ``(index, lengths, fits)``. `index` contains the indices of the tokens,
      ``[b, count, length]``. `lengths` contains the lengths of the segments, ``[b · count]``.
      `fits` is a bool array ``[b, count]`` that is True if the segment is contiguous and not longer
      than `length`.
    """
    member = segments[:, None, :] == jnp.arange(1, count + 1)[None, :, None]  # [b, count, n]
    start = jnp.argmax(member, axis=-1)  # [b, count]
    index = start[..., None] + jnp.arange(length)[None, None]  # [b, count, length]
    number = member.sum(axis=-1)  # [b, count]

    # A segment is contiguous if all tokens between its first and its last token belong to it.
    last = segments.shape[1] - 1 - jnp.argmax(member[..., ::-1], axis=-1)
    fits = (number == 0) | ((number <= length) & (last - start + 1 == number))
    lengths = jnp.minimum(number, length)
    return jnp.minimum(index, segments.shape[1] - 1), lengths.reshape(-1), fits


def _pack(out: jax.Array, segments: jax.Array, count: int, padding: jax.Array | float) -> jax.Array:
    """Returns the outputs of unpacked rows at the positions of their tokens in the packed rows.

    The output is NaN for tokens that do not fit into the unpacked rows.

    Args:
      out: outputs of the unpacked rows, ``[b · count, length, ...]``.
      segments: the segment number of each query, ``[b, q]``.
      count: the largest number of segments in a row.
      padding: the output of padding queries.

    Returns:
      Outputs ``[b, q, ...]``.
    """
    batch = segments.shape[0]
    length = out.shape[1]
    position = segment_positions(segments)
    kept = (segments > 0) & (segments <= count) & (position < length)

    # The unpacked rows are concatenated, and the output of each token is looked up by its index in
    # the concatenated rows.
    index = jnp.where(kept, (segments - 1) * length + position, 0)  # [b, q]
    tokens = _gather_rows(out.reshape(batch, count * length, *out.shape[2:]), index[:, None])

    shape = (*segments.shape, *(1,) * (out.ndim - 2))  # [b, q, 1, ...]
    is_padding = (segments <= 0).reshape(shape)
    kept = kept.reshape(shape)
    tokens = jnp.where(kept, tokens, padding)
    return jnp.where(kept | is_padding, tokens, jnp.nan)


def _gather_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Gathers the entries of an array into unpacked rows.

    Args:
      x: ``[b, n, ...]``.
      rows: indices, ``[b, count, length]``.

    Returns:
      The entries ``[b · count, length, ...]``.
    """
    picked = jax.vmap(lambda x, i: x[i])(x, rows)  # [b, count, length, ...]
    return picked.reshape(-1, *picked.shape[2:])
