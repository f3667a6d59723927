"""What decoding keeps of past tokens: values, and the keys that tokens made."""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.terms import LowRank, Term, Terms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Past keys and values, at their in-sequence positions.

    Parameters that act as keys (Dense, Random, Factorized Random and Factorized Dense Synthesizers)
    are never cached: these decode with the values alone.

    Attributes:
      keys: ``[b, m, h, r]`` for each `LowRank` term with token-made keys, in their order.
      values: ``[b, m, h, e]``.
    """

    keys: tuple[jax.Array, ...]
    values: jax.Array


def init_cache(terms: Terms, values: jax.Array, *, max_length: int) -> Cache:
    """An empty cache for terms and values like these, of which only shapes and dtypes are read.

    Args:
      terms: the terms of any step.
      values: ``[b, k, h, e]``, any k.
      max_length: number of positions.
    """

    def room(x: jax.Array) -> jax.Array:
        return jnp.zeros((values.shape[0], max_length, *x.shape[2:]), x.dtype)

    return Cache(tuple(room(t.keys) for t in terms if _cached(t)), room(values))


def extend(
    cache: Cache, terms: Terms, values: jax.Array, *, at: int | jax.Array
) -> tuple[Terms, jax.Array, Cache]:
    """Writes new keys and values and returns what a step attends to.

    Args:
      cache: the past.
      terms: the step's terms; token-made keys are those of the new tokens only.
      values: ``[b, n, h, e]`` of the new tokens; n may be zero, then nothing is written.
      at: position of the first new token.

    Returns:
      The terms over all m positions, all values ``[b, m, h, e]``, and the extended cache. Positions
      not written yet are zero; the mask must hide them.

    Raises:
      ValueError: if the tokens do not fit into the cache, or it was made for other terms.
    """
    new = [t.keys for t in terms if _cached(t)]
    if len(new) != len(cache.keys):
        raise ValueError(
            f"extend: the cache holds keys of {len(cache.keys)} terms but {len(new)} were given; "
            "make the cache with init_cache from terms of the same alignment"
        )
    keys = tuple(_write(old, x, at) for old, x in zip(cache.keys, new, strict=True))
    cache = Cache(keys, _write(cache.values, values, at))
    rest = iter(keys)
    terms = tuple(dataclasses.replace(t, keys=next(rest)) if _cached(t) else t for t in terms)
    return terms, cache.values, cache


def _cached(term: Term) -> TypeGuard[LowRank]:
    return isinstance(term, LowRank) and term.token_keys


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
