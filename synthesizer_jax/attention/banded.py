"""The banded route: weights of a window of keys, cost linear in the length."""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import zero_padding
from synthesizer_jax.attention.terms import Banded, Terms, wide


def attend_banded(terms: Terms, values: jax.Array, *, mask: Mask, q_length: int) -> jax.Array:
    """``out[b, q, h] = Σ_t weights[b, q, h, t] · values[b, start(q) + t, h]``.

    Args:
      terms: one `Banded`.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` in the values' dtype.
    """
    (term,) = terms
    assert isinstance(term, Banded)
    k_length, heads = values.shape[1:3]
    keys, queries = mask.keys(k_length), mask.queries(q_length)
    term, mask = only_seen(term, dataclasses.replace(mask, key_lengths=None, key_valid=None))
    seen = visible(term, mask, q_length=q_length, k_length=k_length)
    if seen is not None:
        term = dataclasses.replace(term, weights=jnp.where(seen, term.weights, 0))
    if keys is not None:
        values = zero_padding(values, keys)
    out = sum_taps(term, values, mask, q_length)
    if term.normalise:
        real = jnp.ones((values.shape[0], k_length), bool) if keys is None else keys
        ones = jnp.broadcast_to(real[..., None, None], (*real.shape, heads, 1))
        total = sum_taps(term, ones.astype(wide(values)), mask, q_length)
        out = jnp.where(total > 0, out / jnp.where(total > 0, total, 1), 0)
    if queries is not None:
        out = zero_padding(out, queries)
    return jnp.broadcast_to(out, (values.shape[0], *out.shape[1:])).astype(values.dtype)


def materialise_banded(
    term: Banded,
    *,
    mask: Mask,
    q_length: int,
    k_length: int,
    places: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The weights ``[b or 1, h, q, k]`` that a mask leaves, the oracle of the route.

    Args:
      term: the weights of the windows.
      mask: which keys a query may see.
      q_length: number of queries.
      k_length: number of keys.
      places: positions ``[b, q]`` and ``[b, k]`` inside packed segments, where windows lie by these.
    """
    weights, width = term.weights.astype(wide(term.weights)), term.weights.shape[-1]
    first = first_keys(term, mask, q_length)[None]
    key = jnp.arange(k_length)[None]
    if places is not None:
        first, key = first_keys(term, mask, first.shape[1])[places[0]], places[1]
        if weights.shape[0] == 1 and weights.shape[1] > 1:
            weights = weights[0][places[0]]
    tap = (key[:, None, :] - first[:, :, None])[:, :, None, :]
    batch = max(weights.shape[0], tap.shape[0])
    weights = jnp.broadcast_to(weights, (batch, q_length, *weights.shape[2:]))
    if width == 0:
        return jnp.zeros((batch, weights.shape[2], q_length, k_length), weights.dtype)
    full = jnp.take_along_axis(weights, jnp.clip(tap, 0, width - 1), axis=-1)
    full = jnp.where((tap >= 0) & (tap < width), full, 0).swapaxes(1, 2)
    pairs = mask.pairs(q_length, k_length)
    full = full if pairs is None else jnp.where(pairs, full, 0)
    if not term.normalise:
        return full
    total = full.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, full / jnp.where(total > 0, total, 1), 0)


def first_keys(term: Banded, mask: Mask, q_length: int) -> jax.Array:
    """``[q]`` the key of every query's first tap; it may lie outside of the row."""
    if term.starts is not None:
        return term.starts
    return jnp.arange(q_length) + mask.query_offset + term.first


def only_seen(term: Banded, mask: Mask) -> tuple[Banded, Mask]:
    """Cuts taps off that `causal`, `window` or `ahead` hide from every query alike."""
    if term.starts is not None or mask.prefix_lengths is not None or mask.counts_in_segments:
        return term, mask
    start, end = term.first, term.first + term.weights.shape[-1]
    if mask.window is not None:
        start = min(max(start, 1 - mask.window), end)
    for ahead in (0 if mask.causal else None, mask.ahead):
        if ahead is not None:
            end = max(min(end, 1 + ahead), start)
    taps = jax.lax.slice_in_dim(term.weights, start - term.first, end - term.first, axis=-1)
    term = dataclasses.replace(term, weights=taps, first=start)
    return term, dataclasses.replace(mask, causal=False, window=None, ahead=None)


def visible(term: Banded, mask: Mask, *, q_length: int, k_length: int) -> jax.Array | None:
    """What is left of a mask for every tap, bool ``[b or 1, q, h or 1, w]``; None: everything."""
    mask = dataclasses.replace(mask, query_lengths=None, query_valid=None)
    pairs = mask.pairs(q_length, k_length)
    if pairs is None:
        return None
    width = term.weights.shape[-1]
    index = first_keys(term, mask, q_length)[:, None] + jnp.arange(width)
    inside = (index >= 0) & (index < k_length)
    seen = jnp.take_along_axis(pairs, jnp.clip(index, 0, k_length - 1)[None, None], axis=-1)
    return (seen & inside).swapaxes(1, 2)


def sum_taps(term: Banded, values: jax.Array, mask: Mask, q_length: int) -> jax.Array:
    """The weighted sum of the window's values, ``[b, q, h, e]`` float32 or wider."""
    width = term.weights.shape[-1]
    if width == 0:
        shape = (values.shape[0], q_length, *values.shape[2:])
        return jnp.zeros(shape, wide(values))
    if term.starts is not None:
        return _sum_gathered(term.weights, values, term.starts)
    start, length = mask.query_offset + term.first, q_length + width - 1
    if isinstance(start, int):
        sides = (-start, start + length - values.shape[1], 0)
    else:  # a step of a decoding loop: any position up to the last key
        sides = (length, length, 0)
    padding = [(0, 0, 0), sides, (0, 0, 0), (0, 0, 0)]
    window = jax.lax.pad(values, jnp.zeros((), values.dtype), padding)
    if not isinstance(start, int):
        window = jax.lax.dynamic_slice_in_dim(window, start + length, length, axis=1)
    return taps(term.weights, window, q_length)


def taps(weights: jax.Array, window: jax.Array, q_length: int) -> jax.Array:
    """``out[b, q, h] = Σ_t weights[b, q, h, t] · window[b, q + t, h]``.

    Args:
      weights: ``[b or 1, q or 1, h, w]``.
      window: ``[b, q + w - 1, h, e]``.
      q_length: number of queries.

    Returns:
      ``[b, q, h, e]`` float32 or wider. One pass over the window forward and one backward each for
      the window and for the weights; nothing is kept but the arguments.
    """
    plain = functools.partial(_sum_windows, q_length=q_length)
    summed = with_gradient(
        lambda inputs: (plain(inputs), ()), _taps_backward, plain, reads_output=False
    )
    return summed((weights, window))


def _sum_windows(inputs: tuple[jax.Array, jax.Array], *, q_length: int) -> jax.Array:
    weights, window = inputs
    dtype = wide(window)
    weights, width = weights.astype(dtype), weights.shape[-1]
    products = (
        weights[..., t, None] * window[:, t : t + q_length].astype(dtype) for t in range(width)
    )
    return functools.reduce(operator.add, products)


def _taps_backward(
    inputs: tuple[jax.Array, jax.Array], out: None, kept: tuple[()], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del out, kept
    weights, window = inputs
    width, dtype, q_length = weights.shape[-1], g.dtype, g.shape[1]
    sides = ((0, 0), (width - 1, width - 1), (0, 0), (0, 0))
    gradient = jnp.pad(g, sides)
    wide_weights = weights.astype(dtype)
    if weights.shape[1] > 1:
        wide_weights = jnp.pad(wide_weights, sides)
    length = window.shape[1]
    dwindow, dweights = jnp.zeros_like(window, dtype=dtype), []
    axes = tuple(i for i in (0, 1) if weights.shape[i] == 1)
    for t in range(width):
        near = slice(width - 1 - t, width - 1 - t + length)
        tap = (
            wide_weights[:, near, :, t, None]
            if weights.shape[1] > 1
            else wide_weights[..., t, None]
        )
        dwindow = dwindow + tap * gradient[:, near]
        product = (g * window[:, t : t + q_length].astype(dtype)).sum(axis=-1)
        dweights.append(product.sum(axis=axes, keepdims=True))
    return (
        jnp.stack(dweights, axis=-1).astype(weights.dtype),
        dwindow.astype(window.dtype),
    )


def _sum_gathered(weights: jax.Array, values: jax.Array, starts: jax.Array) -> jax.Array:
    """As `taps`, where each query's window starts at a place of its own."""
    dtype, k_length = wide(values), values.shape[1]

    def one(t: int) -> jax.Array:
        index = starts + t
        inside = (index >= 0) & (index < k_length)
        rows = jnp.take(values, jnp.clip(index, 0, k_length - 1), axis=1).astype(dtype)
        return weights[..., t, None].astype(dtype) * jnp.where(inside[:, None, None], rows, 0)

    return functools.reduce(operator.add, (one(t) for t in range(weights.shape[-1])))
