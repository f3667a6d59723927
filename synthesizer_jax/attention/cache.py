"""What decoding keeps of past tokens: values, and the keys that tokens made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

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
      window: the arrays hold the last m positions, not the first m.
    """

    keys: tuple[jax.Array, ...]
    values: jax.Array
    extra: tuple[jax.Array, ...] = ()
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
    at: int | jax.Array,
    mask: Mask,
    extra: tuple[jax.Array, ...] = (),
) -> tuple[Terms, jax.Array, Mask, Cache]:
    """Writes new keys and values and returns what a step attends to.

    Args:
      cache: the past.
      terms: the step's terms; token-made keys are those of the new tokens only.
      values: ``[b, n, h, e]`` of the new tokens; n may be zero, then nothing is written.
      at: position of the first new token.
      mask: the step's mask, in positions; its `key_lengths` say which of the new tokens are real
        where the examples of a batch have different lengths.
      extra: ``[b, n, ...]`` of the new tokens.

    Returns:
      The terms over all keys, their values ``[b, k, h, e]``, the mask over those keys, and the
      extended cache, whose `extra` belongs to the same keys. Positions not written yet are zero; the
      mask must hide them.

    Raises:
      ValueError: if the tokens do not fit into the cache, or it was made for other terms.
    """
    if cache.window:
        return _slide(cache, terms, values, at=at, mask=mask)
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
    )
    return _with_keys(terms, iter(cache.keys)), cache.values, mask, cache


def _slide(
    cache: Cache, terms: Terms, values: jax.Array, *, at: int | jax.Array, mask: Mask
) -> tuple[Terms, jax.Array, Mask, Cache]:
    """`extend` for a window: the past is what lies before `at`."""
    back, new = cache.values.shape[1], values.shape[1]
    seen = jnp.concatenate([cache.values, values.astype(cache.values.dtype)], axis=1)
    if mask.key_lengths is None:
        past = seen[:, new:]
    else:  # the examples end at different places
        end = jnp.clip(mask.key_lengths - at, 0, new)
        index = end[:, None] + jnp.arange(back)
        past = jnp.take_along_axis(seen, index[..., None, None], axis=1)
    mask = mask.from_key(at - back, back + new)
    return terms, seen, mask, dataclasses.replace(cache, values=past)


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
    room, length = old.shape[1], new.shape[1]
    end = length + (at if isinstance(at, int) else 0)
    if end > room:
        raise ValueError(
            f"extend: the cache has max_length={room} but {end} positions are needed; make it with "
            f"max_length>={end}"
        )
    if length == 0:
        return old
    return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, axis=1)
