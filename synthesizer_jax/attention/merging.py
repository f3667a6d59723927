"""Merges attention over several sets of keys into one softmax.

Attention over the union of several sets of keys can be computed in parts. Each part is a call of
`attend_with_log_sums` with its own terms, mask and route. The log sum ``L = log Σ exp(S)`` of a row
of logits S says how much weight the part has in the softmax over all keys::

  out = Σ_i out_i · exp(L_i - L)   with   L = log Σ_i exp(L_i)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.terms import logits_dtype, no_log_sum


def merge_attention(
    parts: Sequence[tuple[jax.Array, jax.Array]], *, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over several sets of keys into attention with one softmax over all keys.

    For example, a decoder can attend to its own tokens and to the tokens of the encoder in the same
    softmax::

      own = attend_with_log_sums(own_terms, own_values, mask=Mask(causal=True))
      other = attend_with_log_sums(other_terms, other_values, mask=Mask(key_lengths=lengths))
      out, _ = merge_attention((own, other))

    The result is itself a part, so it can be merged again.

    Args:
      parts: one or more results of `attend_with_log_sums`. Each part is a pair of outputs
        ``[b, q, h, e]`` and log sums ``[b, q, h]``.
      sinks: ``[h]``, the logit of one more key for each head, whose value is zero. None means that
        there is no such key.

    Returns:
      The outputs ``[b, q, h, e]`` in the dtype of the first part, and the log sums ``[b, q, h]``,
      which include the sinks. If a query has no key in any part, its output is zero and its log sum
      is the lowest finite number, even if there are sinks. The sum of the parts is computed in
      float32 or wider.
    """
    outputs = [out for out, _ in parts]
    dtype = logits_dtype(*outputs, *(log_sums for _, log_sums in parts))
    all_log_sums = [log_sums.astype(dtype) for _, log_sums in parts]
    largest = functools.reduce(jnp.maximum, all_log_sums)  # [b, q, h]
    has_keys = largest > no_log_sum(dtype)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(dtype), largest.shape)
        largest = jnp.maximum(largest, column)

    # The maximum cancels in the quotient of the sums, so it needs no gradient.
    largest = jax.lax.stop_gradient(largest)
    weights = [jnp.exp(log_sums - largest) for log_sums in all_log_sums]
    total = sum(weights[1:], start=weights[0])
    if sinks is not None:
        total = total + jnp.exp(column - largest)

    # In a row without keys, all weights may be 1, but the outputs are zero.
    weighted = [
        out.astype(dtype) * (weight / total)[..., None]
        for out, weight in zip(outputs, weights, strict=True)
    ]
    merged = sum(weighted[1:], start=weighted[0]).astype(outputs[0].dtype)
    log_sums = jnp.where(has_keys, largest + jnp.log(total), no_log_sum(dtype))
    return merged, log_sums
