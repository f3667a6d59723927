"""The reference route, which follows the definition of attention and keeps all logits in memory.

The reference route supports all terms, and has derivatives of every order and mode. For short
sequences, the reference route is the fastest route. The tests compare all other routes with the
reference route.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.banded_route import materialize_banded
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.packed import cover_distances
from synthesizer_jax.attention.terms import (
    Banded,
    Call,
    Output,
    Split,
    Terms,
    cap_logits,
    materialize,
    multiply_examples,
    no_log_sum,
    uses_segment_positions,
)


def attend_reference(call: Call) -> Output:
    """Returns the attention output ``softmax(Σ terms) · values``, ``[b, q, h, e]``.

    If `call.returns_log_sums` is True, the log sums ``[b, q, h]`` are returned as well.
    """
    call = call.cleared()
    lengths: dict[str, Any] = {"q_length": call.q_length, "k_length": call.k_length}
    if not call.returns_log_sums:
        weights = softmax_weights(
            call.terms, mask=call.mask, soft_cap=call.soft_cap, sinks=call.sinks, **lengths
        )
        return weigh_values(weights, call.values)

    logits = materialize_logits(call.terms, mask=call.mask, **lengths)
    logits = cap_logits(logits, call.soft_cap)
    pairs = call.mask.pairs(**lengths)
    out = weigh_values(softmax(logits, pairs), call.values)
    log_sums = log_sum_exp(logits, pairs).swapaxes(1, 2)  # [b or 1, q, h]
    return out, jnp.broadcast_to(log_sums, out.shape[:3])


def weigh_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the sum of the values, weighted with the attention weights of every query.

    The sum is ``out[b, q, h] = Σ_k weights[b, h, q, k] · values[b, k, h]``.

    Args:
      weights: ``[b or 1, h, q, k]``.
      values: ``[b, k, h, e]``.

    Returns:
      The sum ``[b, q, h, e]`` in the dtype of the values. The sum is accumulated in the dtype of
      the weights.
    """
    weights = jnp.broadcast_to(weights, (values.shape[0], *weights.shape[1:]))  # [b, h, q, k]

    # On CPU, an einsum that returns [b, h, q, e] is three times as fast as an einsum that returns
    # [b, q, h, e]. The axes are therefore swapped after the einsum.
    out = multiply_examples("bhqk,bkhe->bhqe", weights.astype(values.dtype), values, weights.dtype)
    return out.swapaxes(1, 2).astype(values.dtype)


def softmax_weights(
    terms: Terms,
    *,
    mask: Mask,
    q_length: int,
    k_length: int,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention weights ``[b or 1, h, q, k]``, in float32 or wider.

    The weights of padding queries, and of queries that may attend to no key, are zero. The
    arguments are the same as in `attend`, but must already be checked.
    """
    term = terms[0]

    # `Split` and `Banded` cannot be added to other terms, so it suffices to look at the first term.
    if isinstance(term, Split):
        return _group_weights(
            term, sinks, mask=mask, q_length=q_length, k_length=k_length, soft_cap=soft_cap
        )
    if isinstance(term, Banded):
        positions = mask.packed_positions if uses_segment_positions(terms, mask) else None
        return materialize_banded(
            term, mask=mask, q_length=q_length, k_length=k_length, positions=positions
        )
    logits = materialize_logits(terms, mask=mask, q_length=q_length, k_length=k_length)
    logits = cap_logits(logits, soft_cap)
    pairs = mask.pairs(q_length, k_length)
    if sinks is None:
        return softmax(logits, pairs)

    # A sink is an additional column of logits. The softmax includes the column, and the column is
    # removed from the weights afterwards.
    column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1)).astype(logits.dtype)
    if pairs is not None:
        pairs = jnp.broadcast_to(pairs, (*pairs.shape[:-1], k_length))
        pairs = jnp.concatenate([pairs, jnp.ones_like(pairs[..., :1])], axis=-1)
    return softmax(jnp.concatenate([logits, column], axis=-1), pairs)[..., :-1]


def softmax(logits: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """Returns the softmax along the last axis, with zeros in rows without any key.

    A row has no key if all of its logits are -inf or masked. In such rows, `jax.nn.softmax` would
    return NaN, or equal weights for all keys.

    Args:
      logits: ``[..., k]``.
      pairs: a bool array, broadcastable to the logits, which is False for masked logits. None masks
        no logits.
    """
    return _softmax(_mask_logits(logits, pairs), pairs)


@jax.custom_jvp
def _softmax(logits: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """Computes `softmax`, with a derivative that does not divide by the sum of a row."""
    weights, _ = _unnormalized_weights(logits, pairs)
    row_sum = jnp.sum(weights, axis=-1, keepdims=True)

    # The inner `where` avoids a division by zero in rows without keys.
    return weights * jnp.where(row_sum > 0, 1 / jnp.where(row_sum > 0, row_sum, 1), 0)


@_softmax.defjvp
def _softmax_jvp(
    primals: tuple[jax.Array, jax.Array | None], tangents: tuple[jax.Array, jax.Array | None]
) -> tuple[jax.Array, jax.Array]:
    weights = _softmax(*primals)
    # dP = P ∘ dS - P Σ_k (P ∘ dS)
    weighted = weights * tangents[0]
    return weights, weighted - weights * weighted.sum(axis=-1, keepdims=True)


def log_sum_exp(logits: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """Returns ``log Σ exp(logits)`` over the last axis, and `no_log_sum` for rows without any key.

    Args:
      logits: ``[..., k]``.
      pairs: as in `softmax`.

    Returns:
      The log sums ``[...]``. Their derivative is the softmax, which is zero in rows without keys.
    """
    return _log_sum_exp(_mask_logits(logits, pairs), pairs)


@jax.custom_jvp
def _log_sum_exp(logits: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """Computes `log_sum_exp`, with a derivative that does not divide by the sum of a row."""
    weights, row_max = _unnormalized_weights(logits, pairs)
    row_sum = jnp.sum(weights, axis=-1)
    has_keys = row_sum > 0
    log_sums = row_max[..., 0] + jnp.log(jnp.where(has_keys, row_sum, 1))
    return jnp.where(has_keys, log_sums, no_log_sum(logits.dtype))


@_log_sum_exp.defjvp
def _log_sum_exp_jvp(
    primals: tuple[jax.Array, jax.Array | None], tangents: tuple[jax.Array, jax.Array | None]
) -> tuple[jax.Array, jax.Array]:
    weighted = _softmax(*primals) * tangents[0]
    return _log_sum_exp(*primals), weighted.sum(axis=-1)


def _mask_logits(logits: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """Returns the logits, with the lowest finite number in place of masked logits."""
    return logits if pairs is None else jnp.where(pairs, logits, jnp.finfo(logits.dtype).min)


def _unnormalized_weights(
    logits: jax.Array, pairs: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns ``exp(logits - row_max)`` ``[..., k]``, and the finite `row_max` ``[..., 1]``.

    Args:
      logits: the results of `_mask_logits`, ``[..., k]``.
      pairs: as in `softmax`.
    """
    row_max = jnp.max(logits, axis=-1, keepdims=True)
    row_max = jnp.where(row_max == -jnp.inf, 0, row_max)
    weights = jnp.exp(logits - row_max)

    # If all logits of a row are masked, the exponential of a masked logit is 1 instead of 0. The
    # weights of masked logits are therefore set to zero.
    if pairs is not None:
        weights = jnp.where(pairs, weights, 0)
    return weights, row_max


def _group_weights(
    split: Split, sinks: jax.Array | None, *, mask: Mask, **options: Any
) -> jax.Array:
    """Returns the `softmax_weights` of all groups of heads, concatenated along the heads."""
    groups = []
    for terms, start, num_heads in split.slices():
        group_mask = mask.take_heads(start, num_heads)
        group_sinks = None if sinks is None else sinks[start : start + num_heads]
        groups.append(softmax_weights(terms, mask=group_mask, sinks=group_sinks, **options))

    # If the terms of a group consist of parameters, the weights of the group have a batch axis of
    # size 1. They are broadcast to the batch size of the other groups.
    batch = max(x.shape[0] for x in groups)
    return jnp.concatenate([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in groups], axis=1)


def materialize_logits(terms: Terms, *, mask: Mask, q_length: int, k_length: int) -> jax.Array:
    """Returns the sum of the terms as logits ``[b or 1, h, q, k]``, in float32 or wider.

    In packed rows, terms that are looked up by position use the position in the segment, not the
    position in the row. The mask is not applied to the logits. The mask only provides the positions
    in packed rows.
    """
    q_positions, k_positions = mask.packed_positions or (None, None)
    if q_positions is not None:
        terms = cover_distances(terms, mask, q_length, k_length)
    total = None
    for term in terms:
        # First, the logits are computed for all positions. In packed rows, the rows and columns of
        # the logits are then gathered by the positions of the tokens in their segments.
        logits = materialize(
            (term,), q_length=q_length, k_length=k_length, query_offset=mask.query_offset
        )
        by_query, by_key = term.has_absolute_positions(mask)
        if by_query and q_positions is not None:
            logits = jnp.take_along_axis(logits, q_positions[:, None, :, None], axis=2)
        if by_key and k_positions is not None:
            logits = jnp.take_along_axis(logits, k_positions[:, None, None, :], axis=3)
        total = logits if total is None else total + logits
    assert total is not None
    return total
