"""The engine's door: checks what it is given and chooses a route."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.partition import Partition
from synthesizer_jax.attention.reference import attend_reference, weigh
from synthesizer_jax.attention.terms import LowRank, Outer, Relative, Static, Terms

IMPLEMENTATIONS = ("auto", "static", "fused", "reference")


def attend(
    terms: Terms,
    values: jax.Array,
    *,
    mask: Mask | None = None,
    q_length: int | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "auto",
    partition: Partition | None = None,
) -> jax.Array:
    """Attention, ``out[b, q, h] = Σ_k softmax_k(Σ terms)[b, h, q, k] values[b, k, h]``."""
    mask = Mask() if mask is None else mask
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attend: implementation={implementation!r}; allowed: {', '.join(IMPLEMENTATIONS)}"
        )
    q_length, _ = lengths(terms, q_length, values.shape[1])
    values = drop(values, dropout_rate, dropout_key)
    return attend_reference(terms, values, mask=mask, q_length=q_length)


def attention_weights(
    terms: Terms,
    *,
    mask: Mask | None = None,
    q_length: int | None = None,
    k_length: int | None = None,
) -> jax.Array:
    """The attention weights, for reports."""
    mask = Mask() if mask is None else mask
    q_length, k_length = lengths(terms, q_length, k_length)
    return weigh(terms, mask=mask, q_length=q_length, k_length=k_length)


def drop(values: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """T5's dropout of attention weights: whole value vectors."""
    if rate == 0.0 or key is None:
        return values
    keep = jax.random.bernoulli(key, 1.0 - rate, values.shape[:3])
    return jnp.where(keep[..., None], values / (1.0 - rate), 0)


def lengths(terms: Terms, q_length: int | None, k_length: int | None) -> tuple[int, int]:
    """The numbers of queries and keys: as given, or as the terms have them."""
    for term in terms:
        match term:
            case Static(logits):
                found = logits.shape[1], logits.shape[2]
            case LowRank(queries, keys):
                found = queries.shape[1], keys.shape[1]
            case Outer(a):
                found = a.shape[1], None
            case Relative():
                continue
        q_length = found[0] if q_length is None else q_length
        k_length = found[1] if k_length is None else k_length
    if q_length is None or k_length is None:
        raise ValueError(
            "attend: these terms do not tell their lengths; give q_length and k_length"
        )
    return q_length, k_length
