"""What `attend` is given, checked in one place."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.packed import by_position, segment_lengths
from synthesizer_jax.attention.parts import zero_padding
from synthesizer_jax.attention.terms import (
    TERMS,
    Banded,
    LowRank,
    Outer,
    Relative,
    Split,
    Static,
    Term,
    Terms,
    heads_of,
)


def check(
    terms: Any, values: jax.Array, mask: Mask | jax.Array | None, q_length: int | None
) -> tuple[Terms, jax.Array, Mask, int]:
    """The arguments of `attend` as its routes take them.

    Padding is zero in tokens' queries, keys and values, so that a NaN there stays without effect.

    Returns:
      Terms, values, the mask with arrays of their full shapes, and the number of queries.

    Raises:
      TypeError: `terms` are not terms, or `mask` is not a mask.
      ValueError: for shapes that do not go together.
    """
    if getattr(values, "ndim", None) != 4:
        raise ValueError(
            f"attend: values have shape {jnp.shape(values)}; it must be [batch, k, heads, e]"
        )
    batch, k_length, heads, _ = values.shape
    terms, mask, q_length, _ = check_weights(terms, mask, q_length, k_length, batch, heads)
    terms, values = _without_padding(terms, values, mask, q_length)
    return terms, values, mask, q_length


def check_weights(
    terms: Any,
    mask: Mask | jax.Array | None,
    q_length: int | None,
    k_length: int | None,
    batch: int | None = None,
    heads: int | None = None,
) -> tuple[Terms, Mask, int, int]:
    """The arguments of `attention_weights`, which come without values.

    Returns:
      Terms, the mask with arrays of their full shapes, and the numbers of queries and keys.

    Raises:
      TypeError: `terms` are not terms, or `mask` is not a mask.
      ValueError: for shapes that do not go together.
    """
    check_types(terms)
    terms = tuple(_of_floats(term) for term in terms)
    mask = Mask.of(mask)
    q_length, k_length = _lengths(terms, q_length, k_length)
    heads = heads_of(terms[0]) if heads is None else heads
    if batch is None:
        arrays = [x for x in jax.tree.leaves((terms, mask)) if jnp.ndim(x)]
        own = [x.shape[0] for x in jax.tree.leaves(mask) if jnp.ndim(x)]
        batch = max([1, *own, *(x.shape[0] for x in arrays if x.ndim == 4)])
    mask = check_mask(mask, batch=batch, heads=heads, q_length=q_length, k_length=k_length)
    for term in terms:
        _check_term(term, mask, (batch, q_length, k_length, heads))
    lengths = q_length, k_length
    return tuple(covering(term, mask, *lengths) for term in terms), mask, *lengths


def _of_floats(term: Term) -> Term:
    """Integer logits as float32."""
    if not isinstance(term, Static | Relative) or jnp.issubdtype(term.logits.dtype, jnp.inexact):
        return term
    return dataclasses.replace(term, logits=term.logits.astype(jnp.float32))


def check_types(terms: Any, *, of: str = "terms are", remedy: str = "return") -> None:
    """Raises for what an alignment may have returned, or a caller given, in the place of terms.

    Args:
      terms: what was found.
      of: the beginning of the message.
      remedy: what to do with a tuple of terms instead.
    """
    example = f"{remedy} a tuple of terms, such as (static(logits),)"
    if isinstance(terms, TERMS):
        raise TypeError(f"attend: {of} a bare {type(terms).__name__}; {example}")
    if not isinstance(terms, tuple | list):
        raise TypeError(f"attend: {of} of type {type(terms).__name__}; {example}")
    for term in terms:
        if isinstance(term, type):
            raise TypeError(
                f"attend: a term is the class {term.__name__}, not an object; {example}"
            )
        if not isinstance(term, TERMS):
            raise TypeError(f"attend: a term is of type {type(term).__name__}; {example}")
    if not terms:
        raise ValueError("attend: terms are empty; give at least one")
    alone = [t for t in terms if isinstance(t, Banded | Split)]
    if alone and len(terms) > 1:
        raise ValueError(f"attend: a {type(alone[0]).__name__} term stands alone; see terms.add")


def check_mask(mask: Mask, *, batch: int, heads: int, q_length: int, k_length: int) -> Mask:
    """The mask with every array of its full shape, patterns as booleans.

    Raises:
      ValueError: an array has another shape or dtype, or parts are missing or do not go together.
    """
    _check_segments(mask)
    sizes = {"batch": batch, "heads": heads, "q": q_length, "k": k_length}
    arrays: dict[str, Any] = {
        name: _check_array(name, getattr(mask, name), axes, sizes)
        for name, axes in _AXES.items()
        if getattr(mask, name) is not None
    }
    return dataclasses.replace(mask, **arrays)


def _check_segments(mask: Mask) -> None:
    if (mask.query_segments is None) != (mask.key_segments is None):
        raise ValueError(
            "attend: Mask has only one of query_segments and key_segments; give both, or use "
            "Mask.packed"
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
            f"attend: Mask.query_offset={mask.query_offset} with segments, where positions begin anew; "
            "leave it out for packed rows"
        )


_AXES = {
    "key_lengths": ("batch",),
    "query_lengths": ("batch",),
    "prefix_lengths": ("batch",),
    "key_valid": ("batch", "k"),
    "query_valid": ("batch", "q"),
    "key_segments": ("batch", "k"),
    "query_segments": ("batch", "q"),
    "allowed": ("batch", "heads", "q", "k"),
}
"""The axes of a mask's arrays."""

_PATTERNS = ("key_valid", "query_valid", "allowed")
"""Those that say yes or no; the others are integers."""


def _check_array(name: str, x: Any, axes: tuple[str, ...], sizes: dict[str, int]) -> jax.Array:
    """An array of a mask, its batch axis of full length; see `check_mask`."""
    x = jnp.asarray(x)
    shape = tuple(sizes[axis] for axis in axes)
    shared = {"batch", "heads", "q"} if name in ("allowed", "query_valid") else {"batch"}
    fits = x.ndim == len(axes) and all(
        n == size or (n == 1 and axis in shared)
        for n, size, axis in zip(x.shape, shape, axes, strict=True)
    )
    if not fits:
        wanted = ", ".join(
            f"{axis}{' or 1' if axis in shared else ''}={size}"
            for axis, size in zip(axes, shape, strict=True)
        )
        raise ValueError(f"attend: Mask.{name} has shape {x.shape}; it must be [{wanted}]")
    if name == "allowed":
        return jnp.broadcast_to(x, (*x.shape[:2], *shape[2:])).astype(bool)
    if name not in _PATTERNS and not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"attend: Mask.{name} has dtype {x.dtype}; it must be integers")
    x = x.astype(bool) if name in _PATTERNS else x
    return jnp.broadcast_to(x, shape)


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


def _check_term(term: Term, mask: Mask, sizes: tuple[int, int, int, int]) -> None:
    """Raises a `ValueError` for a term that does not fit batch, queries, keys and heads."""
    batch, q_length, k_length, heads = sizes
    name = f"attend: a {type(term).__name__} term"
    if heads_of(term) != heads:
        raise ValueError(f"{name} is for {heads_of(term)} heads, but the values have {heads}")
    if isinstance(term, Split):
        return
    wanted = (q_length, k_length)
    shortest = segment_lengths(mask, *wanted) if mask.query_segments is not None else wanted
    pairs = zip(_term_lengths(term), wanted, shortest, by_position(term, mask), strict=True)
    for found, length, least, positional in pairs:
        packed = positional and mask.query_segments is not None
        if found is not None and found != length and not (packed and found >= least):
            q, k = _term_lengths(term)
            raise ValueError(
                f"{name} is for {q} queries and {k} keys, but there are {q_length} queries and "
                f"{k_length} values"
            )
    reach = term.a.shape[-1] * term.b.shape[-1] if isinstance(term, Outer) else k_length
    if reach < shortest[1]:
        assert isinstance(term, Outer)
        raise ValueError(
            f"{name} reaches {term.a.shape[-1]} · {term.b.shape[-1]} keys, but there are "
            f"{k_length} values; make its factors longer"
        )
    for x in jax.tree.leaves(term):
        if x.ndim == 4 and x.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} holds an array of shape {x.shape}, but the values have batch {batch}"
            )


def covering(term: Term, mask: Mask, q_length: int, k_length: int) -> Term:
    """A `Relative` of packed rows, extended by zeros to distances that no segment reaches."""
    if not isinstance(term, Relative) or mask.query_segments is None:
        return term
    q, k = segment_lengths(mask, q_length, k_length)
    last = term.first + term.logits.shape[1] - 1
    if term.first > 1 - q or last < k - 1:
        return term  # too short: `diagonals` says so
    before, after = max(0, term.first - 1 + q_length), max(0, k_length - 1 - last)
    logits = jnp.pad(term.logits, ((0, 0), (before, after)))
    return Relative(logits, term.first - before)


def _without_padding(
    terms: Terms, values: jax.Array, mask: Mask, q_length: int
) -> tuple[Terms, jax.Array]:
    """Zeros in the place of what tokens that are padding made."""
    keys, queries = mask.keys(values.shape[1]), mask.queries(q_length)

    def clear(x: jax.Array, real: jax.Array | None) -> jax.Array:
        if real is None or x.shape[:2] != real.shape:
            return x
        return zero_padding(x, real)

    def clear_term(term: Term) -> Term:
        if isinstance(term, LowRank):
            own_queries = clear(term.queries, queries) if term.token_queries else term.queries
            own_keys = clear(term.keys, keys) if term.token_keys else term.keys
            return dataclasses.replace(term, queries=own_queries, keys=own_keys)
        if isinstance(term, Outer):
            return Outer(clear(term.a, queries), clear(term.b, queries))
        return term

    return tuple(clear_term(term) for term in terms), clear(values, keys)
