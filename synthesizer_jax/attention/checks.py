"""What `attend` is given, checked in one place."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.attention.masks import Mask, as_bool
from synthesizer_jax.attention.packed import segment_lengths
from synthesizer_jax.attention.parts import Call, zero_padding_tokens
from synthesizer_jax.attention.terms import Relative, Static, Term, Terms


def check_arguments(
    terms: Terms, values: jax.Array, mask: Mask | jax.Array | None, *, q_length: int | None
) -> Call:
    """Checks the arguments of `attend`, and returns them as the routes take them.

    Padding is zero in tokens' queries, keys and values, so that a NaN there stays without effect. The
    mask's arrays have their full shapes.

    Raises:
      TypeError: `terms` are not terms, or `mask` is not a mask.
      ValueError: for shapes that do not go together.
    """
    if jnp.ndim(values) != 4:
        raise ValueError(
            f"attend: values have shape {jnp.shape(values)}; it must be [batch, k, heads, e]"
        )
    batch, k_length, heads, _ = values.shape
    terms, mask, q_length, _ = check_weights(
        terms, mask, q_length, k_length=k_length, batch=batch, heads=heads
    )
    terms, values = _zero_padding_tokens(terms, values, mask, q_length=q_length)
    return Call(terms, values, mask, q_length)


def check_weights(
    terms: Terms,
    mask: Mask | jax.Array | None,
    q_length: int | None,
    *,
    k_length: int | None,
    batch: int | None = None,
    heads: int | None = None,
) -> tuple[Terms, Mask, int, int]:
    """Checks the arguments of `attention_weights`, which come without values.

    Returns:
      Terms, the mask with arrays of their full shapes, and the numbers of queries and keys.

    Raises:
      TypeError: `terms` are not terms, or `mask` is not a mask.
      ValueError: for shapes that do not go together.
    """
    check_types(terms)
    terms = tuple(map(_as_float, terms))
    mask = Mask.of(mask)
    q_length, k_length = _lengths(terms, q_length, k_length)
    heads = terms[0].num_heads if heads is None else heads
    if batch is None:
        of_mask = [x.shape[0] for x in jax.tree.leaves(mask) if jnp.ndim(x)]
        batch = max([1, *of_mask, *(term.batch for term in terms)])
    mask = check_mask(mask, batch=batch, heads=heads, q_length=q_length, k_length=k_length)
    for term in terms:
        _check_term(term, mask, (batch, q_length, k_length, heads))
    return (
        cover_distances(terms, mask, q_length=q_length, k_length=k_length),
        mask,
        q_length,
        k_length,
    )


def check_types(terms: object, *, of: str = "terms are", remedy: str = "return") -> None:
    """Raises a `TypeError` or a `ValueError` unless an object is a tuple of terms.

    Args:
      terms: what was found.
      of: the beginning of the message.
      remedy: what to do with a tuple of terms instead.
    """
    example = f"{remedy} a tuple of terms, such as (static(logits),)"
    if isinstance(terms, Term):
        raise TypeError(f"attend: {of} a bare {type(terms).__name__}; {example}")
    if not isinstance(terms, tuple | list):
        raise TypeError(f"attend: {of} of type {type(terms).__name__}; {example}")
    for term in terms:
        if isinstance(term, type):
            raise TypeError(
                f"attend: a term is the class {term.__name__}, not an object; {example}"
            )
        if not isinstance(term, Term):
            raise TypeError(f"attend: a term is of type {type(term).__name__}; {example}")
    if not terms:
        raise ValueError("attend: terms are empty; give at least one")
    alone = [term for term in terms if term.stands_alone]
    if alone and len(terms) > 1:
        raise ValueError(f"attend: a {type(alone[0]).__name__} term stands alone; see terms.add")


def check_mask(mask: Mask, *, batch: int, heads: int, q_length: int, k_length: int) -> Mask:
    """Returns the mask with every array broadcast to its full shape, patterns as booleans.

    Raises:
      ValueError: an array has another shape or dtype, or parts are missing or do not go together.
    """
    _check_segments(mask)
    sizes = {"batch": batch, "heads": heads, "q": q_length, "k": k_length}
    return mask.map_arrays(lambda name, x: _check_array(name, x, _AXES[name], sizes=sizes))


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


def _check_array(
    name: str, x: ArrayLike, axes: tuple[str, ...], *, sizes: dict[str, int]
) -> jax.Array:
    """Returns an array of a mask broadcast to its full shape, see `check_mask`."""
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
    if name in _PATTERNS:
        x = as_bool(x)
    if name == "allowed":
        return jnp.broadcast_to(x, (*x.shape[:2], *shape[2:]))
    if name not in _PATTERNS and not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"attend: Mask.{name} has dtype {x.dtype}; it must be integers")
    return jnp.broadcast_to(x, shape)


def _lengths(terms: Terms, q_length: int | None, k_length: int | None) -> tuple[int, int]:
    """Returns the numbers of queries and keys: as given, or as the terms have them."""
    for term in terms:
        q, k = term.lengths
        q_length = q if q_length is None else q_length
        k_length = k if k_length is None else k_length
    if q_length is None or k_length is None:
        name = "q_length" if q_length is None else "k_length"
        raise ValueError(f"attention: no term tells how long the rows are; give {name}")
    return q_length, k_length


def _check_term(term: Term, mask: Mask, sizes: tuple[int, int, int, int]) -> None:
    """Raises a `ValueError` for a term that does not fit batch, queries, keys and heads."""
    batch, q_length, k_length, heads = sizes
    name = f"attend: a {type(term).__name__} term"
    if term.num_heads != heads:
        raise ValueError(f"{name} is for {term.num_heads} heads, but the values have {heads}")
    if not list(term.arrays()):
        return  # its groups are checked one by one
    expected, packed = (q_length, k_length), mask.query_segments is not None
    shortest = segment_lengths(mask, *expected) if packed else expected
    by_position = term.has_absolute_positions(mask)
    for own, length, least, positional in zip(
        term.lengths, expected, shortest, by_position, strict=True
    ):
        if own is not None and own != length and not (packed and positional and own >= least):
            q, k = term.lengths
            raise ValueError(
                f"{name} is for {q} queries and {k} keys, but there are {q_length} queries and "
                f"{k_length} values"
            )
    reached = term.num_keys_reached
    if reached is not None and reached < shortest[1]:
        factors = " · ".join(str(x.shape[-1]) for _, x, _ in term.arrays())
        raise ValueError(
            f"{name} reaches {factors} keys, but there are {k_length} values; make its factors longer"
        )
    for _, x, axes in term.arrays():
        if axes[0] == "b" and x.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} holds an array of shape {x.shape}, but the values have batch {batch}"
            )


def cover_distances(terms: Terms, mask: Mask, *, q_length: int, k_length: int) -> Terms:
    """Returns the terms of packed rows, extended to distances that no segment reaches."""
    if mask.query_segments is None:
        return terms
    q, k = segment_lengths(mask, q_length, k_length)

    def cover(term: Term) -> Term:
        if not isinstance(term, Relative):
            return term
        last = term.first + term.logits.shape[1] - 1
        if term.first > 1 - q or last < k - 1:
            return term  # too short: `diagonals` raises the error
        before, after = max(0, term.first - 1 + q_length), max(0, k_length - 1 - last)
        logits = jnp.pad(term.logits, ((0, 0), (before, after)))
        return Relative(logits, term.first - before)

    return tuple(map(cover, terms))


def _as_float(term: Term) -> Term:
    """Returns the term with integer logits as float32."""
    if not isinstance(term, Static | Relative) or jnp.issubdtype(term.logits.dtype, jnp.inexact):
        return term
    return dataclasses.replace(term, logits=term.logits.astype(jnp.float32))


def _zero_padding_tokens(
    terms: Terms, values: jax.Array, mask: Mask, *, q_length: int
) -> tuple[Terms, jax.Array]:
    """Returns zeros in the place of what tokens that are padding made."""
    keys, queries = mask.keys(values.shape[1]), mask.queries(q_length)

    def clear(x: jax.Array, axis: str) -> jax.Array:
        real = queries if axis == "q" else keys
        if real is None or x.shape[:2] != real.shape:
            return x
        return zero_padding_tokens(x, real)

    return tuple(term.zero_padding(clear) for term in terms), clear(values, "k")
