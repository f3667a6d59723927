"""The engine's door: checks what it is given and chooses a route."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.banded import attend_banded
from synthesizer_jax.attention.fused import attend_fused
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.packed import attend_unpacked, by_position, unpacked_lengths
from synthesizer_jax.attention.partition import Partition
from synthesizer_jax.attention.reference import attend_reference, weigh
from synthesizer_jax.attention.static import attend_static
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

ROUTES = {
    "static": attend_static,
    "fused": attend_fused,
    "banded": attend_banded,
    "reference": attend_reference,
}

SMALL = 128 * 128
"""Logits of one head and example that are hardly more than its queries, keys and values: up to here the
reference route is as good as any."""


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
    """Attention, ``out[b, q, h] = Σ_k softmax_k(Σ terms)[b, h, q, k] · values[b, k, h]``.

    Logits and softmax are float32 or wider. A query that is padding, and one without a key, gets
    zeros and gives no gradient. All routes give the same answer, up to rounding:

    * ``static``, for parameters only (`Static`, `Relative`, parameters' `LowRank`): one softmax for
      all examples; falls back to the fused route where that could lose digits.
    * ``fused``: blocks of one head and example, recomputed in the backward pass.
    * ``banded``, for `Banded` weights: shifts of the values, cost linear in the length.
    * ``reference``: all logits in memory; the only route with forward-mode derivatives.

    Args:
      terms: the terms of the logits, for q queries and k keys.
      values: ``[b, k, h, e]``.
      mask: which keys a query may see; None: all.
      q_length: number of queries; needed where all terms are `Relative`.
      dropout_rate: probability of dropping a weight. The draw is T5's, one per example, key and
        head, shared by the queries: that is dropout of whole values after the softmax, scaled by
        ``1 / (1 - rate)``.
      dropout_key: key of that draw; None: no dropout.
      implementation: a route, or ``auto`` for the fastest.
      partition: how to spread the computation over a mesh.

    Returns:
      ``[b, q, h, e]`` in the values' dtype.

    Raises:
      ValueError: for shapes that do not agree, an unknown `implementation`, or one that cannot do
        what is asked.
    """
    mask = Mask() if mask is None else mask
    q_length, k_length = _lengths(terms, q_length, values.shape[1])
    _check(terms, values, mask, q_length)
    if isinstance(terms[0], Split):
        values = drop_values(values, dropout_rate, dropout_key)
        return _attend_groups(
            terms[0],
            values,
            mask,
            q_length=q_length,
            implementation=implementation,
            partition=partition,
        )
    unpack, route = _plan(terms, mask, q_length, k_length, implementation)
    values = drop_values(values, dropout_rate, dropout_key)

    def run(terms: Terms, values: jax.Array, mask: Mask, q_length: int) -> jax.Array:
        function = functools.partial(attend_unpacked, ROUTES[route]) if unpack else ROUTES[route]
        return function(terms, values, mask=mask, q_length=q_length)

    if partition is not None and (unpack or route != "reference"):
        return partition.spread(run, q_length)(terms, values, mask)
    return run(terms, values, mask, q_length)


def attention_weights(
    terms: Terms,
    *,
    mask: Mask | None = None,
    q_length: int | None = None,
    k_length: int | None = None,
) -> jax.Array:
    """The attention weights, for reports.

    Args:
      terms: as in `attend`.
      mask: as in `attend`.
      q_length: number of queries; needed where all terms are `Relative`.
      k_length: number of keys; needed where no term has an axis of keys.

    Returns:
      ``[b or 1, h, q, k]`` float32 or wider; rows sum to one, or to zero where a query is padding
      or sees no key.
    """
    mask = Mask() if mask is None else mask
    q_length, k_length = _lengths(terms, q_length, k_length)
    return weigh(terms, mask=mask, q_length=q_length, k_length=k_length)


def _attend_groups(
    split: Split, values: jax.Array, mask: Mask, *, q_length: int, **options: Any
) -> jax.Array:
    """`attend` for every group of heads by itself."""
    parts, start = [], 0
    for terms, count in zip(split.groups, split.heads, strict=True):
        part, own = mask.head_group(start, count), values[:, :, start : start + count]
        parts.append(attend(terms, own, mask=part, q_length=q_length, **options))
        start += count
    return jnp.concatenate(parts, axis=2)


def _plan(
    terms: Terms, mask: Mask, q_length: int, k_length: int, implementation: str
) -> tuple[bool, str]:
    """Whether to unpack the rows first, and the route."""
    packed = mask.query_segments is not None
    unpacked = unpacked_lengths(mask, q_length, k_length) if packed else None
    positional = any(any(by_position(t, mask)) for t in terms)
    no_static = _obstacle_to_static(terms, mask, packed and unpacked is None)
    no_fused = ""
    if packed and positional and unpacked is None:
        no_fused = (
            "positions in packed rows need Mask.segments, no Mask.allowed, and segments · "
            "segment_length² not far above the square of the row's length"
        )
    chosen = implementation
    banded = any(isinstance(t, Banded) for t in terms)
    no_banded = "" if banded else "it takes one Banded term, which is weights and not logits"
    if banded:
        no_static = no_fused = "Banded terms are weights without a softmax"
    if implementation == "auto" and banded:
        chosen = "banded"
    elif implementation == "auto":
        q, k = unpacked if unpacked and positional else (q_length, k_length)
        small = "reference" if no_fused or q * k <= SMALL else "fused"
        chosen = small if no_static else "static"
    reason = {
        "static": no_static,
        "fused": no_fused,
        "banded": no_banded,
        "reference": "",
    }.get(chosen)
    if reason is None:
        raise ValueError(
            f"attend: implementation={implementation!r}; allowed: auto, {', '.join(ROUTES)}"
        )
    if reason:
        raise ValueError(
            f"attend: implementation={implementation!r} is not possible here: {reason}; use 'auto'"
        )
    unpack = unpacked is not None and (positional or chosen == "static")
    return unpack and implementation != "reference", chosen


def _obstacle_to_static(terms: Terms, mask: Mask, stuck: bool) -> str:
    """Why the static route cannot run, or nothing."""
    for term in terms:
        if isinstance(term, Outer) or (
            isinstance(term, LowRank) and (term.token_queries or term.token_keys)
        ):
            return f"a {type(term).__name__} term is made from tokens"
    if mask.allowed is not None:
        return "Mask.allowed may differ between examples"
    return "it takes packed rows only after unpacking, which needs Mask.segments" if stuck else ""


def drop_values(values: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """T5's dropout of attention weights, as dropout of whole values; see `attend`.

    Args:
      values: ``[b, k, h, e]``.
      rate: probability of dropping a value; the others are multiplied by ``1 / (1 - rate)``.
      key: of the draw; None: no dropout.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"attend: dropout_rate={rate}; it must be at least 0 and below 1")
    if rate == 0.0 or key is None:
        return values
    keep = jax.random.bernoulli(key, 1.0 - rate, values.shape[:3])
    return jnp.where(keep[..., None], values / (1.0 - rate), 0)


def _lengths(terms: Terms, q_length: int | None, k_length: int | None) -> tuple[int, int]:
    """The numbers of queries and keys: as given, or as the terms have them."""
    for term in terms:
        q, k = _term_lengths(term)
        q_length = q if q_length is None else q_length
        k_length = k if k_length is None else k_length
    if q_length is None or k_length is None:
        name = "q_length" if q_length is None else "k_length"
        raise ValueError(f"attention: no term tells how long the rows are; give {name}")
    return q_length, k_length


def _term_lengths(term: Term) -> tuple[int | None, int | None]:
    match term:
        case Static(logits):
            return logits.shape[1], logits.shape[2]
        case LowRank(queries, keys):
            return queries.shape[1], keys.shape[1]
        case Outer(a):
            return a.shape[1], None
        case Banded(weights):
            return (weights.shape[1] if weights.shape[1] > 1 else None), None
        case Split():
            found = [_term_lengths(t) for terms in term.groups for t in terms]
            q = next((q for q, _ in found if q is not None), None)
            return q, next((k for _, k in found if k is not None), None)
        case Relative():
            return None, None


def _check(terms: Terms, values: jax.Array, mask: Mask, q_length: int) -> None:
    """Raises a `ValueError` for what does not fit together."""
    if values.ndim != 4:
        raise ValueError(
            f"attend: values have shape {values.shape}; it must be [batch, k, heads, e]"
        )
    if not terms:
        raise ValueError("attend: terms are empty; give at least one")
    batch, k_length, heads, _ = values.shape
    weights = [t for t in terms if isinstance(t, Banded | Split)]
    if weights and len(terms) > 1:
        raise ValueError(f"attend: a {type(weights[0]).__name__} term stands alone; see terms.add")
    for term in terms:
        name = f"attend: a {type(term).__name__} term"
        q, k = _term_lengths(term)
        if q not in (None, q_length) or k not in (None, k_length):
            raise ValueError(
                f"{name} is for {q} queries and {k} keys, but there are {q_length} queries and "
                f"{k_length} values"
            )
        if isinstance(term, Outer) and term.a.shape[-1] * term.b.shape[-1] < k_length:
            raise ValueError(
                f"{name} reaches {term.a.shape[-1]} · {term.b.shape[-1]} keys, but there are "
                f"{k_length} values; make its factors longer"
            )
        if isinstance(term, Split):
            if sum(term.heads) != heads:
                raise ValueError(f"{name} is for {term.heads} heads, but the values have {heads}")
            continue
        for x in jax.tree.leaves(term):
            if x.ndim == 1:
                continue
            axis = 2 if x.ndim == 4 else 0
            if x.shape[axis] != heads or (x.ndim == 4 and x.shape[0] not in (1, batch)):
                raise ValueError(
                    f"{name} holds an array of shape {x.shape}, but the values {values.shape} have "
                    f"batch {batch} and {heads} heads"
                )
    _check_segments(mask)


def _check_segments(mask: Mask) -> None:
    if (mask.query_segments is None) != (mask.key_segments is None):
        raise ValueError(
            "attend: Mask has only one of query_segments and key_segments; give both, or call "
            "for_self_attention()"
        )
    if mask.query_segments is None:
        return
    if mask.prefix_lengths is not None:
        raise ValueError(
            "attend: Mask.prefix_lengths counts from the start of a row, which in packed rows is "
            "the first example only; use Mask.allowed"
        )
    if isinstance(mask.query_offset, int) and mask.query_offset != 0:
        raise ValueError(
            f"attend: Mask.query_offset={mask.query_offset} with segments; packed rows have none"
        )
