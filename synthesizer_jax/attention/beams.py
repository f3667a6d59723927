"""Self-attention in beam search, without copying the cache in every step.

After each step of a beam search, every beam continues one of the old beams, so a cache with one row
for each beam would have to be reordered. The copies take longer than the attention itself. Instead,
the beams of an example share one row of the cache. Each step writes one key and one value for every
beam, and never moves them. The keys of n beams at position t have the indices ``t · n`` to
``t · n + n - 1``, and `Cache.sources` says which of the n keys belongs to the past of a beam.

In a decoding step, the n beams of an example are n queries of the same row. Every query computes
logits for all keys of the row, and the mask hides the keys that do not belong to its past. The
additional logits are cheap, because the keys and values are read only once for all n queries.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.cache import Cache, Values, extend
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import (
    Outer,
    Split,
    Static,
    Term,
    TermArray,
    Terms,
    map_arrays,
)


def share_among_beams(cache: Cache, beams: int) -> Cache:
    """Returns a cache in which the beams of each example share a row.

    All beams of an example start with the same past, which is the past of the example.

    Args:
      cache: a cache of self-attention with one row for each example, for which `can_share` returns
        True.
      beams: the number of beams of each example, n.
    """

    def repeat(x: jax.Array) -> jax.Array:
        """Repeats every position n times, which gives ``[b, h, m · n, ...]``."""
        return jnp.repeat(x, beams, axis=cache.position_axis(x))

    own = jnp.arange(beams, dtype=jnp.int32)[None, :, None]
    return dataclasses.replace(
        cache,
        keys=jax.tree.map(repeat, cache.keys),
        values=jax.tree.map(repeat, cache.values),
        beams=beams,
        sources=jnp.broadcast_to(own, (cache.batch, beams, cache.capacity)),
    )


def can_share(cache: Cache) -> bool:
    """Returns whether the beams of an example can share a row of a cache.

    Beams can share a row if all positions of the sequence stay in the cache, if all examples are at
    the same position, and if `Cache.is_shareable` says that the terms allow it.
    """
    return cache.is_shareable and not cache.window and jnp.ndim(cache.length) == 0


def reorder_beams(cache: Cache, source: jax.Array) -> Cache:
    """Returns the cache after every beam has taken over the past of another beam.

    Args:
      cache: a cache that beams share.
      source: ``[b, n]`` the beam whose past each beam takes over.
    """
    assert cache.sources is not None
    sources = jnp.take_along_axis(cache.sources, source[:, :, None], axis=1)
    return dataclasses.replace(cache, sources=sources)


def extend_for_beams(
    cache: Cache,
    terms: Terms,
    values: Values,
    *,
    bias: Terms,
    mask: Mask,
    at: int | jax.Array,
) -> tuple[Terms, Values, Terms, Mask, Cache]:
    """Writes the keys and values of one new token for each beam, and returns all keys and values.

    In shapes, b is the number of examples, n the number of beams, and m the number of positions.

    Args:
      cache: the cache, which the beams of each example share.
      terms: the terms of the decoding step, with one query for each of the ``b · n`` rows.
      values: the values of the new tokens, ``[b · n, 1, ...]``.
      bias: terms that are added to the logits, for one query and m keys.
      mask: the mask of the decoding step, for one query and m keys.
      at: the position of the new tokens.

    Returns:
      The terms, the values, the bias and the mask for b rows with n queries and ``m · n`` keys, and
      the extended cache.
    """
    n = cache.beams
    m = cache.capacity
    assert cache.sources is not None

    # From the new position on, the entries of `sources` have no meaning yet. The new key of every
    # beam belongs to its own past.
    own = jnp.arange(n, dtype=jnp.int32)[None, :, None]
    is_old = jnp.arange(m)[None, None, :] < at
    sources = jnp.where(is_old, cache.sources, own)  # [b, n, m]

    def convert(terms: Terms) -> Terms:
        """Returns the terms for n queries and ``m · n`` keys."""
        return tuple(_for_beams(term, n, m, at=at) for term in terms)

    plain = dataclasses.replace(cache, beams=1, sources=None, length=cache.length * n)
    all_terms, all_values, _, plain = extend(
        plain,
        convert(terms),
        jax.tree.map(lambda x: _merge_beams(x, n), values),
        at=at * n,
        mask=Mask(),
    )
    extended = dataclasses.replace(
        cache,
        keys=plain.keys,
        values=plain.values,
        # `plain` counts the tokens of all beams.
        length=plain.length // n,
        sources=sources,
    )

    slots = jnp.arange(n)[None, None, None, :]
    allowed = sources[..., None] == slots  # [b, n, m, n]
    allowed = allowed.reshape(cache.batch, 1, n, m * n)
    pairs = mask.pairs(1, m)
    if pairs is not None:
        heads = pairs.shape[1]
        pairs = jnp.broadcast_to(pairs, (cache.batch * n, heads, 1, m))
        pairs = pairs.reshape(cache.batch, n, heads, m).swapaxes(1, 2)  # [b, h or 1, n, m]
        allowed = allowed & jnp.repeat(pairs, n, axis=-1)
    return all_terms, all_values, convert(bias), Mask(allowed=allowed), extended


def _for_beams(term: Term, n: int, m: int, *, at: int | jax.Array) -> Term:
    """Returns a term for n queries and ``m · n`` keys, given a term for one query and m keys.

    Args:
      term: a term with one query for each of the ``b · n`` rows.
      n: the number of beams of each example.
      m: the number of positions.
      at: the position of the query.
    """
    if isinstance(term, Split):
        groups = [tuple(_for_beams(t, n, m, at=at) for t in group) for group in term.groups]
        return Split(tuple(groups))

    arrays = list(term.arrays())
    if not any(a.from_tokens for a in arrays):
        # These logits depend only on the positions of the query and of the keys. All beams of an
        # example are at the same position, so all beams have the same logits.
        logits = term.materialize(1, m, at)[0, :, :1, :m]  # [h, 1, m]
        logits = jnp.repeat(logits, n, axis=2)
        return Static(jnp.broadcast_to(logits, (logits.shape[0], n, m * n)))

    def convert(a: TermArray) -> jax.Array:
        """Returns an array with the beams of an example in one row."""
        if a.from_tokens:
            return _merge_beams(a.x, n)
        if "k" in a.axes:
            keys = jax.lax.slice_in_dim(a.x, 0, m, axis=a.axes.index("k"))
            return jnp.repeat(keys, n, axis=a.axes.index("k"))
        # The array has an entry for the one query, which is the same for all beams.
        queries = jax.lax.slice_in_dim(a.x, 0, 1, axis=a.axes.index("q"))
        return jnp.repeat(queries, n, axis=a.axes.index("q"))

    term = map_arrays(convert, term)
    if isinstance(term, Outer):
        # Key ``p · B + r`` has the logit ``a[p] · b[r]``, so the n keys of a position need n equal
        # entries of b.
        term = dataclasses.replace(term, b=jnp.repeat(term.b, n, axis=-1))
    return term


def _merge_beams(x: jax.Array, n: int) -> jax.Array:
    """Moves the n beams of an example to one row, from ``[b · n, 1, ...]`` to ``[b, n, ...]``."""
    return x.reshape(x.shape[0] // n, n, *x.shape[2:])
