"""The banded route computes weighted sums over windows of keys, in linear time.

Gaussian attention and convolutions have weights that need no softmax. The weights of a window are
called taps. Usually, the window moves by one key from each query to the next, so the route needs no
gather. Instead, for each tap t, it shifts the values by t positions, and multiplies them by the
weights that the queries have for tap t.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.masks import Mask, zero_padding
from synthesizer_jax.attention.mesh_axes import match_varying_axes
from synthesizer_jax.attention.terms import Banded, Call, logits_dtype


def attend_banded(call: Call) -> jax.Array:
    """Returns the sum of the values in each query's window, ``[b, q, h, e]``.

    The output is ``out[b, q, h] = Σ_t weights[b, q, h, t] · values[b, start(q) + t, h]``. If
    `Banded.normalize` is True, the output is divided by the sum of the weights of the keys that the
    query may attend to.
    """
    call = call.cleared()
    (term,) = call.terms
    assert isinstance(term, Banded)
    values, mask, q_length = call.values, call.mask, call.q_length
    k_length, heads = values.shape[1:3]
    keys = mask.keys(k_length)
    queries = mask.queries(q_length)

    # In a call with a single example, `Call.cleared` takes the weights for parameters and does not
    # clear the weights of padding queries. A NaN in these weights would make the gradient of the
    # values NaN, so the weights are cleared here.
    is_cleared = term.depends_on_tokens("weights")
    if not is_cleared and queries is not None and term.weights.shape[:2] == queries.shape:
        term = dataclasses.replace(term, weights=zero_padding(term.weights, queries))

    # `Call.cleared` has set the values of padding keys to zero, so the weighted sum needs no mask
    # of keys. The sum of the weights below does need a mask of keys, because it multiplies the
    # weights by ones instead of values.
    mask = dataclasses.replace(mask, key_lengths=None, key_valid=None)
    term, mask = _trim_hidden_taps(term, mask)
    tap_mask = _tap_mask(term, mask, q_length=q_length, k_length=k_length)
    if tap_mask is not None:
        term = dataclasses.replace(term, weights=jnp.where(tap_mask, term.weights, 0))
    out = _sum_window(term, values, mask, q_length=q_length)

    if term.normalize:
        # The sum of each query's weights, [b, q, h, 1], is a windowed sum of values that are 1 for
        # real keys and 0 for padding.
        is_real = jnp.ones((values.shape[0], k_length), bool) if keys is None else keys
        ones = jnp.broadcast_to(is_real[..., None, None], (*is_real.shape, heads, 1))
        row_sum = _sum_window(term, ones.astype(logits_dtype(values)), mask, q_length=q_length)
        out = jnp.where(row_sum > 0, out / jnp.where(row_sum > 0, row_sum, 1), 0)

    out = zero_padding(out, queries)
    return jnp.broadcast_to(out, (values.shape[0], *out.shape[1:])).astype(values.dtype)


def obstacle(call: Call) -> str | None:
    """Explains why the banded route cannot compute a call, or returns None if it can."""
    if all(isinstance(term, Banded) for term in call.terms):
        return None
    return "This route takes only a Banded term, which consists of weights and not of logits."


def materialize_banded(
    term: Banded,
    *,
    mask: Mask,
    q_length: int,
    k_length: int,
    positions: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Returns the masked weights as one array ``[b or 1, h, q, k]``.

    The reference route uses this function for `Banded` terms.

    Args:
      term: the weights.
      mask: the keys that each query may attend to.
      q_length: the number of queries.
      k_length: the number of keys.
      positions: the positions of queries ``[b, q]`` and keys ``[b, k]`` in packed segments. If
        `positions` is given, each window is a range of positions in a segment, not in the row.
    """
    weights = term.weights.astype(logits_dtype(term.weights))
    width = weights.shape[-1]
    first_key = _first_tap_keys(term, mask, q_length)[None]  # [1, q]
    key = jnp.arange(k_length)[None]  # [1, k]
    if positions is not None:
        # In packed rows, the window and the weights of a query are looked up by the query's
        # position in the segment. The shape of `q_positions` is [b, q], and the shape of `key` is
        # [b, k].
        q_positions, key = positions
        first_key = _first_tap_keys(term, mask, first_key.shape[1])[q_positions]
        if weights.shape[0] == 1 and weights.shape[1] != 1:
            weights = weights[0][q_positions]  # [b, q, h, w]

    # For each pair of a query and a key, `tap` is the index of the key in the window of the query.
    # For most pairs, the key is outside of the window, and the index is invalid.
    tap = (key[:, None, :] - first_key[:, :, None])[:, :, None, :]  # [b or 1, q, 1, k]
    batch = max(weights.shape[0], tap.shape[0])
    weights = jnp.broadcast_to(weights, (batch, q_length, *weights.shape[2:]))
    if width == 0:
        return jnp.zeros((batch, weights.shape[2], q_length, k_length), weights.dtype)

    dense = jnp.take_along_axis(weights, jnp.clip(tap, 0, width - 1), axis=-1)  # [b or 1, q, h, k]
    dense = jnp.where((tap >= 0) & (tap < width), dense, 0).swapaxes(1, 2)  # [b or 1, h, q, k]
    pairs = mask.pairs(q_length, k_length)
    if pairs is not None:
        dense = jnp.where(pairs, dense, 0)
    if not term.normalize:
        return dense
    row_sum = dense.sum(axis=-1, keepdims=True)
    return jnp.where(row_sum > 0, dense / jnp.where(row_sum > 0, row_sum, 1), 0)


def _first_tap_keys(term: Banded, mask: Mask, q_length: int) -> jax.Array:
    """Returns the key position of each query's first tap, ``[q]``.

    The position may be outside of the row.
    """
    if term.starts is not None:
        return term.starts
    return jnp.arange(q_length) + mask.query_offset + term.first


def _trim_hidden_taps(term: Banded, mask: Mask) -> tuple[Banded, Mask]:
    """Removes the taps that the mask's band hides from all queries, and then removes the band.

    A causal mask hides the same taps from every query. If the hidden taps are removed, the windowed
    sum has fewer summands, and the mask needs no band. The term and the mask are returned unchanged
    if the term has `starts`, if the mask has a prefix, or if the band counts positions in segments.
    """
    if term.starts is not None or mask.prefix_lengths is not None or mask.counts_in_segments:
        return term, mask

    # The taps cover the distances from `start` to `end` - 1, and the band restricts this range.
    start = term.first
    end = term.first + term.weights.shape[-1]
    before, after = mask.band
    if before is not None:
        start = min(max(start, -before), end)
    if after is not None:
        end = max(min(end, 1 + after), start)
    taps = jax.lax.slice_in_dim(term.weights, start - term.first, end - term.first, axis=-1)
    term = dataclasses.replace(term, weights=taps, first=start)
    return term, dataclasses.replace(mask, causal=False, window=None)


def _tap_mask(term: Banded, mask: Mask, *, q_length: int, k_length: int) -> jax.Array | None:
    """Returns a bool mask of taps, ``[b or 1, q, h or 1, w]``, or None if all taps are allowed.

    This function does not mask padding queries. The caller sets the outputs of padding queries to
    zero.
    """
    mask = dataclasses.replace(mask, query_lengths=None, query_valid=None)
    pairs = mask.pairs(q_length, k_length)
    if pairs is None:
        return None
    width = term.weights.shape[-1]
    key = _first_tap_keys(term, mask, q_length)[:, None] + jnp.arange(width)[None]  # [q, w]
    in_row = (key >= 0) & (key < k_length)

    # `allowed` says for each tap whether the query may attend to the key of the tap. The shape of
    # `allowed` is [b or 1, h or 1, q, w].
    allowed = jnp.take_along_axis(pairs, jnp.clip(key, 0, k_length - 1)[None, None], axis=-1)
    return (allowed & in_row[None, None]).swapaxes(1, 2)


def _sum_window(term: Banded, values: jax.Array, mask: Mask, *, q_length: int) -> jax.Array:
    """Returns the weighted sum of the values in each window, ``[b, q, h, e]``.

    The sum is computed in float32 or wider.
    """
    width = term.weights.shape[-1]
    if width == 0:
        shape = (values.shape[0], q_length, *values.shape[2:])
        return jnp.zeros(shape, logits_dtype(values))
    if term.starts is not None:
        return _sum_gathered_values(term.weights, values, term.starts)

    # The window of query 0 begins at position `start`, and the windows of all queries together
    # cover `length` positions. Positions outside of the row are padded with zeros. If no window
    # covers the values at one end of the row, the padding at this end is negative, and `lax.pad`
    # removes these values.
    start = mask.query_offset + term.first
    length = q_length + width - 1
    if isinstance(start, int):
        sides = (-start, start + length - values.shape[1], 0)
    else:
        # In a decoding loop, `start` is traced and may be any position up to the last key.
        sides = (length, length, 0)
    padding = [(0, 0, 0), sides, (0, 0, 0), (0, 0, 0)]  # (low, high, interior) of each axis
    window = jax.lax.pad(values, jnp.zeros((), values.dtype), padding)  # [b, q + w - 1, h, e]
    if not isinstance(start, int):
        window = jax.lax.dynamic_slice_in_dim(window, start + length, length, axis=1)
    return _sum_shifted_values(term.weights, window, q_length)


def _sum_shifted_values(weights: jax.Array, window: jax.Array, q_length: int) -> jax.Array:
    """Returns ``out[b, q, h] = Σ_t weights[b, q, h, t] · window[b, q + t, h]``.

    The result is float32 or wider. Only the arguments are saved for the backward pass.

    Args:
      weights: ``[b or 1, q or 1, h, w]``.
      window: the values at all positions that the windows of the queries cover,
        ``[b, q + w - 1, h, e]``.
      q_length: the number of queries.
    """
    forward = functools.partial(_sum_shifted_values_fwd, q_length=q_length)
    sum_shifted_values = with_gradient(forward, _sum_shifted_values_bwd, reads_output=False)
    return sum_shifted_values(match_varying_axes(weights, window))


def _sum_shifted_values_fwd(
    inputs: tuple[jax.Array, jax.Array], *, q_length: int
) -> tuple[jax.Array, tuple[()]]:
    """Returns the weighted sum, and an empty tuple of residuals."""
    weights, window = inputs
    dtype = logits_dtype(window)
    weights = weights.astype(dtype)
    # Query q multiplies its weight for tap t by the value at index q + t of `window`. The products
    # for each tap have the shape [b, q, h, e].
    products = (
        weights[..., t, None] * window[:, t : t + q_length].astype(dtype)
        for t in range(weights.shape[-1])
    )
    return functools.reduce(operator.add, products), ()


def _sum_shifted_values_bwd(
    inputs: tuple[jax.Array, jax.Array], out: None, residuals: tuple[()], dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of the weights and of the window."""
    del out, residuals
    weights, window = inputs
    dtype = dout.dtype
    width = weights.shape[-1]
    length = window.shape[1]
    q_length = dout.shape[1]
    queries_share = weights.shape[1] == 1

    # The cotangent and the weights are padded with w - 1 zeros on both sides, so that the slice for
    # each tap is as long as `window`.
    padding = ((0, 0), (width - 1, width - 1), (0, 0), (0, 0))
    padded_dout = jnp.pad(dout, padding)
    padded_weights = weights.astype(dtype)
    if not queries_share:
        padded_weights = jnp.pad(padded_weights, padding)

    dwindow = jnp.zeros_like(window, dtype=dtype)
    dweights = []
    shared_axes = tuple(i for i in (0, 1) if weights.shape[i] == 1)
    for t in range(width):
        # dwindow[b, n, h] = Σ_t weights[b, n - t, h, t] · dout[b, n - t, h]
        queries = slice(width - 1 - t, width - 1 - t + length)
        if queries_share:
            tap = padded_weights[..., t, None]
        else:
            tap = padded_weights[:, queries, :, t, None]
        dwindow = dwindow + tap * padded_dout[:, queries]

        # dweights[b, q, h, t] = Σ_e dout[b, q, h, e] · window[b, q + t, h, e].
        # If examples or queries share weights, this cotangent is summed over them.
        product = (dout * window[:, t : t + q_length].astype(dtype)).sum(axis=-1)
        dweights.append(product.sum(axis=shared_axes, keepdims=True))
    return jnp.stack(dweights, axis=-1).astype(weights.dtype), dwindow.astype(window.dtype)


def _sum_gathered_values(weights: jax.Array, values: jax.Array, starts: jax.Array) -> jax.Array:
    """Returns ``out[b, q, h] = Σ_t weights[b, q, h, t] · values[b, starts[q] + t, h]``.

    Values at positions outside of the row count as zeros.

    Args:
      weights: ``[b or 1, q or 1, h, w]``.
      values: ``[b, k, h, e]``.
      starts: the key position of each query's first tap, ``[q]``.
    """
    dtype = logits_dtype(values)
    k_length = values.shape[1]

    def weigh_tap(t: int) -> jax.Array:
        """Returns the values at tap t of each window, times their weights, ``[b, q, h, e]``."""
        key = starts + t  # [q]
        in_row = (key >= 0) & (key < k_length)
        tap_values = jnp.take(values, jnp.clip(key, 0, k_length - 1), axis=1).astype(dtype)
        tap_values = jnp.where(in_row[None, :, None, None], tap_values, 0)
        return weights[..., t, None].astype(dtype) * tap_values

    return functools.reduce(operator.add, (weigh_tap(t) for t in range(weights.shape[-1])))
