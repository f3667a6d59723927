"""What decoding keeps of past tokens: values, and the keys that tokens made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import Banded, LowRank, Split, Term, Terms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Past keys and values, at their in-sequence positions.

    Parameters that act as keys (Dense, Random, Factorized Random and Factorized Dense Synthesizers)
    are never cached: these decode with the values alone. A window of weights (Gaussian,
    convolutions) keeps as many values as it reaches back, whatever the length.

    Attributes:
      keys: ``[b, m, h, r]`` for each `LowRank` term with token-made keys, in their order.
      values: ``[b, m, h, e]``; the last m past ones where `window`.
      extra: what a mixer itself makes of past tokens, ``[b, m, ...]`` each.
      length: the position of the next token, int32: how many tokens were read. A scalar where all
        examples have read equally many, otherwise ``[b]``. In cross-attention it counts queries.
      window: the arrays hold the last m positions, not the first m.
    """

    keys: tuple[jax.Array, ...]
    values: jax.Array
    extra: tuple[jax.Array, ...] = ()
    length: Any = dataclasses.field(default_factory=lambda: np.int32(0))
    window: bool = dataclasses.field(default=False, metadata={"static": True})


def init_cache(
    terms: Terms,
    values: jax.Array,
    *,
    max_length: int,
    extra: tuple[jax.Array, ...] = (),
    self_attention: bool = True,
) -> Cache:
    """An empty cache for terms and values like these, of which only shapes and dtypes are read.

    Args:
      terms: the terms of any step.
      values: ``[b, k, h, e]``, any k.
      max_length: number of positions.
      extra: ``[b, k, ...]`` arrays to keep besides.
      self_attention: new keys come with new queries, so that a window moves along.
    """
    back = _reach(terms) if self_attention else None
    length = max_length if back is None else back

    def room(x: jax.Array) -> jax.Array:
        return jnp.zeros((values.shape[0], length, *x.shape[2:]), x.dtype)

    return Cache(
        keys=tuple(room(t.keys) for t in _cached_terms(terms)),
        values=room(values),
        extra=tuple(room(x) for x in extra),
        window=back is not None,
    )


def extend(
    cache: Cache,
    terms: Terms,
    values: jax.Array,
    *,
    at: int | jax.Array | None = None,
    mask: Mask,
    extra: tuple[jax.Array, ...] = (),
) -> tuple[Terms, jax.Array, Mask, Cache]:
    """Writes new keys and values and returns what a step attends to.

    Args:
      cache: the past.
      terms: the step's terms; token-made keys are those of the new tokens only.
      values: ``[b, n, h, e]`` of the new tokens; n may be zero, then nothing is written.
      at: position of the first new token, the same for all examples; None: the cache's length, which
        must then be a scalar.
      mask: the step's mask, in positions; its `key_lengths` say which of the new tokens are real
        where the examples of a batch have different lengths.
      extra: ``[b, n, ...]`` of the new tokens.

    Returns:
      The terms over all keys, their values ``[b, k, h, e]``, the mask over those keys, and the
      extended cache, whose `extra` belongs to the same keys. Positions not written yet are zero; the
      mask must hide them.

    Raises:
      ValueError: if the tokens do not fit into the cache, `at` is not where its tokens end (before
        that is allowed unless it is a window), or it was made for other terms. Where a position is
        traced, the new values are NaN instead.
    """
    n = values.shape[1]
    at = cache.length if at is None else at
    right, length = read_tokens(
        at,
        n,
        length=cache.length,
        lengths=mask.key_lengths,
        batch=cache.values.shape[0],
        room=None if cache.window else cache.values.shape[1],
        exact=cache.window,
    )
    if cache.window:
        return _slide(cache, terms, values, at=at, mask=mask, length=length, right=right)
    values = poison(values, right)
    new = [t.keys for t in _cached_terms(terms)]
    if len(new) != len(cache.keys):
        raise ValueError(
            f"extend: the cache holds keys of {len(cache.keys)} terms but {len(new)} were given; "
            "make the cache with init_cache from terms of the same alignment"
        )
    cache = Cache(
        keys=tuple(_write(old, x, at) for old, x in zip(cache.keys, new, strict=True)),
        values=_write(cache.values, values, at),
        extra=tuple(_write(old, x, at) for old, x in zip(cache.extra, extra, strict=True)),
        length=length,
    )
    return _with_keys(terms, iter(cache.keys)), cache.values, mask, cache


def read_tokens(
    at: int | jax.Array,
    n: int,
    *,
    length: int | jax.Array,
    batch: int,
    lengths: jax.Array | None = None,
    room: int | None = None,
    exact: bool = False,
) -> tuple[jax.Array | None, Any]:
    """Checks where a step's tokens stand, and counts them.

    Args:
      at: position of the first of n new tokens.
      n: number of new tokens; none are always right.
      length: number of tokens that were read before, a scalar or ``[batch]``.
      batch: number of examples.
      lengths: ``[batch or 1]`` number of real tokens up to now, where the examples differ.
      room: number of positions; None: any.
      exact: `at` must be `length`; otherwise it may be smaller, which decodes from there again.

    Returns:
      Whether the position is right, a bool scalar or ``[batch]``, where that is traced; None where it
      is known to be. And the number of tokens that were read, a scalar, or ``[batch]`` with `lengths`.

    Raises:
      ValueError: everything is known and the position is wrong.
    """
    reading = None if lengths is None else lengths > at
    right = None
    if n and all(is_known(x) for x in (at, length, lengths)):
        _check(at, n, length, lengths, room, exact)
    elif n:
        gap = jnp.not_equal(at, length) if exact else jnp.greater(at, length)
        right = jnp.logical_not(gap if reading is None else gap & reading)
        right = right if room is None else right & (at + n <= room)
    if reading is None or lengths is None:
        return right, counted(at + n)
    end = jnp.where(reading, jnp.minimum(lengths, at + n), length)
    return right, jnp.broadcast_to(counted(end), (batch,))


def _check(at: Any, n: int, length: Any, lengths: Any, room: int | None, exact: bool) -> None:
    """Raises a `ValueError` for a wrong position, see `read_tokens`."""
    at, length = np.asarray(at), np.asarray(length)
    end = int(at.max()) + n
    if room is not None and end > room:
        raise ValueError(
            f"extend: the cache has max_length={room} but {end} positions are needed; make it with "
            f"max_length>={end}, that of a MultiHeadAttention by init or init_cache with longer inputs"
        )
    gap = (at != length) if exact else (at > length)
    if np.any(gap if lengths is None else gap & (np.asarray(lengths) > at)):
        raise ValueError(
            f"extend: position={at} but the cache holds {length} tokens; leave position out, then new "
            "tokens follow the cached ones"
        )


def counted(n: int | jax.Array) -> Any:
    """A length as caches hold it: int32, and known where `n` is."""
    return np.int32(n) if isinstance(n, int) else jnp.asarray(n, jnp.int32)


def poison(x: jax.Array, right: jax.Array | None) -> jax.Array:
    """``[b, ...]`` with NaN in the examples that are not right, see `read_tokens`."""
    if right is None:
        return x
    right = jnp.reshape(right, (*jnp.shape(right), *(1,) * (x.ndim - jnp.ndim(right))))
    return jnp.where(right, x, jnp.nan)


def is_known(x: Any) -> bool:
    """Whether numbers are known here and now: neither traced nor on other processes' devices."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def _slide(
    cache: Cache,
    terms: Terms,
    values: jax.Array,
    *,
    at: int | jax.Array,
    mask: Mask,
    length: Any,
    right: jax.Array | None,
) -> tuple[Terms, jax.Array, Mask, Cache]:
    """`extend` for a window: the past is what lies before `at`."""
    back, new = cache.values.shape[1], values.shape[1]
    seen = jnp.concatenate([cache.values, values.astype(cache.values.dtype)], axis=1)
    seen = poison(seen, right)
    if mask.key_lengths is None:
        past = seen[:, new:]
    else:  # the examples end at different places
        end = jnp.clip(mask.key_lengths - at, 0, new)
        index = end[:, None] + jnp.arange(back)
        past = jnp.take_along_axis(seen, index[..., None, None], axis=1)
    mask = mask.from_key(at - back, back + new)
    return terms, seen, mask, dataclasses.replace(cache, values=past, length=length)


def _reach(terms: Terms) -> int | None:
    """How many past values a window of weights needs; None: all, it is no window."""
    if len(terms) != 1 or not isinstance(terms[0], Banded) or terms[0].starts is not None:
        return None
    return max(0, -terms[0].first)


def _cached(term: Term) -> TypeGuard[LowRank]:
    return isinstance(term, LowRank) and term.token_keys


def _cached_terms(terms: Terms) -> list[LowRank]:
    found: list[LowRank] = []
    for term in terms:
        if isinstance(term, Split):
            found += [t for group in term.groups for t in _cached_terms(group)]
        elif _cached(term):
            found.append(term)
    return found


def _with_keys(terms: Terms, keys: Iterator[jax.Array]) -> Terms:
    def one(term: Any) -> Term:
        if isinstance(term, Split):
            return Split(tuple(_with_keys(group, keys) for group in term.groups))
        return dataclasses.replace(term, keys=next(keys)) if _cached(term) else term

    return tuple(one(t) for t in terms)


def _write(old: jax.Array, new: jax.Array, at: int | jax.Array) -> jax.Array:
    if new.shape[1] == 0:
        return old
    return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, axis=1)
