"""Caches for decoding: the values of past tokens, and the keys that tokens make."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention.masks import Mask, is_concrete, zero_padding
from synthesizer_jax.attention.terms import Banded, Terms, map_arrays
from synthesizer_jax.base.typing import PyTree

Values: TypeAlias = PyTree
"""An array ``[b, k, h, e]``, or a tuple of arrays ``[b, k, ...]`` that a mixer makes of each token."""

_Length: TypeAlias = int | jax.Array | np.int32
"""A number of tokens, or the position of one."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Past keys and values, at their in-sequence positions.

    Parameters that act as keys (Dense, Random, Factorized Random and Factorized Dense Synthesizers)
    are never cached: these decode with the values alone. A window of weights (Gaussian,
    convolutions) keeps as many values as it reaches back, whatever the length; so may a window of
    logits, with its keys.

    Heads come before positions, so that a step multiplies keys and values without copying them.

    Attributes:
      keys: ``[b, h, m, r]`` token-made keys of the terms, in their order; ``[b, m, h]`` without a width.
      values: ``[b, h, m, e]``, or a tuple of arrays; the last m past ones if `window`.
      length: the position of the next token, int32: how many tokens were read. A scalar if all
        examples have read equally many, otherwise ``[b]``. In cross-attention it counts queries.
      empty_memory: in cross-attention no tokens, ``[b, 0, width]``, of the memory's width and dtype;
        None in self-attention.
      window: the arrays hold the last m positions, not the first m.
      positions_first: the arrays are ``[b, m, h, r]``, as in Flax's caches.
      cleared: keys and values of padding are zeros, which need not be cleared in every step.
      num_queries: in cross-attention the number of query positions that a step may reach.
    """

    keys: tuple[jax.Array, ...]
    values: Values
    length: _Length = dataclasses.field(default_factory=lambda: np.int32(0))
    empty_memory: jax.Array | None = None
    window: bool = dataclasses.field(default=False, metadata={"static": True})
    positions_first: bool = dataclasses.field(default=False, metadata={"static": True})
    cleared: bool = dataclasses.field(default=False, metadata={"static": True})
    num_queries: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def batch(self) -> int:
        """Number of examples."""
        return jax.tree.leaves(self.values)[0].shape[0]

    @property
    def capacity(self) -> int:
        """Number of positions that the arrays hold."""
        x: jax.Array = jax.tree.leaves(self.values)[0]
        return x.shape[self.position_axis(x)]

    def position_axis(self, x: jax.Array) -> int:
        """Returns the axis of the positions in an array of the cache."""
        return 1 if self.positions_first or x.ndim < 4 else 2

    def swap(self, x: jax.Array) -> jax.Array:
        """Returns ``[b, k, ...]`` as the cache holds it, or what it holds as ``[b, k, ...]``."""
        axis = self.position_axis(x)  # without the axis of a single example, see `multiply_examples`
        return x[0].swapaxes(0, axis - 1)[None] if x.shape[0] == 1 else x.swapaxes(1, axis)

    def as_window(self, capacity: int) -> Cache:
        """Returns an empty cache for the last positions."""
        cut = lambda x: jax.lax.slice_in_dim(x, 0, capacity, axis=self.position_axis(x))
        keys, values = jax.tree.map(cut, (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values, window=True)


def init_cache(
    terms: Terms,
    values: Values,
    *,
    max_length: int,
    memory: jax.Array | None = None,
    positions_first: bool = False,
) -> Cache:
    """Returns an empty cache for terms and values like these; only shapes and dtypes are read.

    Args:
      terms: the terms of any step.
      values: ``[b, k, h, e]``, or a tuple of arrays ``[b, k, ...]``; any k.
      max_length: number of positions.
      memory: ``[b, k, width]`` the tokens attended to in cross-attention; None in self-attention.
      positions_first: as in `Cache`. Otherwise, in self-attention, it keeps only the values that a window
        of weights still needs, which moves along with the new queries.
    """
    term, length, window = terms[0], max_length, False
    if not positions_first and memory is None and isinstance(term, Banded) and term.starts is None:
        length, window = max(0, -term.first), True
    batch = jax.tree.leaves(values)[0].shape[0]

    layout = Cache((), (), window=window, positions_first=positions_first)
    empty = lambda x: layout.swap(jnp.zeros((batch, length, *x.shape[2:]), x.dtype))
    return dataclasses.replace(
        layout,
        keys=tuple(empty(x) for x in _cached_arrays(terms)),
        values=jax.tree.map(empty, values),
        empty_memory=None if memory is None else memory[:, :0],
    )


def extend(
    cache: Cache, terms: Terms, values: Values, *, at: _Length | None = None, mask: Mask
) -> tuple[Terms, Values, Mask, Cache]:
    """Writes new keys and values, and returns what a step attends to.

    Args:
      cache: the past.
      terms: the step's terms; token-made keys are those of the new tokens only.
      values: those of the new tokens, like those of the cache; there may be none, then nothing is
        written.
      at: position of the first new token, the same for all examples; None: the cache's length, which
        must then be a scalar.
      mask: the step's mask, in positions; its `key_lengths` tell which of the new tokens are real
        if the examples of a batch have different lengths. The others are written as zeros, so that
        nothing that they hold, such as a NaN, reaches later steps.

    Returns:
      The terms over all keys, their values, the mask over those keys, and the extended cache.
      Positions not written yet are zero; the mask must hide them.

    Raises:
      ValueError: if the tokens do not fit into the cache, `at` is not where its tokens end (before
        that is allowed unless it is a window), or it was made for other terms. If a position is
        traced, the new values are NaN instead.
    """
    n = jax.tree.leaves(values)[0].shape[1]
    at = cache.length if at is None else at
    valid, length = advance_length(
        at,
        n,
        length=cache.length,
        lengths=mask.key_lengths,
        batch=cache.batch,
        capacity=None if cache.window else cache.capacity,
        exact=cache.window,
    )
    keys = tuple(_cached_arrays(terms))
    if len(keys) != len(cache.keys):
        raise ValueError(
            f"extend: the cache holds keys of {len(cache.keys)} terms but {len(keys)} were given; "
            "make the cache with init_cache from terms of the same alignment"
        )

    def append(past: jax.Array, x: jax.Array) -> jax.Array:
        both = jnp.concatenate([past, x.astype(past.dtype)], axis=cache.position_axis(x))
        return fill_invalid(both, valid)

    def last(x: jax.Array) -> jax.Array:
        if mask.key_lengths is None:
            return jax.lax.slice_in_dim(x, n, None, axis=cache.position_axis(x))
        end = jnp.clip(mask.key_lengths - at, 0, n)  # the examples have different lengths
        index = end[:, None] + jnp.arange(cache.capacity)[None]
        index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
        return cache.swap(jnp.take_along_axis(cache.swap(x), index, axis=1))

    def write(past: jax.Array, x: jax.Array) -> jax.Array:
        x = fill_invalid(x.astype(past.dtype), valid)
        return jax.lax.dynamic_update_slice_in_dim(past, x, at, axis=cache.position_axis(x)) if n else past

    if n and mask.key_lengths is not None:  # single tokens of decoding loops have no lengths
        real = (jnp.arange(n) + at)[None] < jnp.reshape(mask.key_lengths, (-1, 1))  # [b or 1, n]
        keys, values = jax.tree.map(lambda x: zero_padding(x, real), (keys, values))
    past, new = (cache.keys, cache.values), jax.tree.map(cache.swap, (keys, values))
    if cache.window:  # the past is what lies before `at`
        attended = jax.tree.map(append, past, new)
        kept = jax.tree.map(last, attended)
        mask = mask.slice_keys(at - cache.capacity, cache.capacity + n)
    else:
        attended = kept = jax.tree.map(write, past, new)
    if n == 0:  # XLA would swap before a decoding loop, and copy in every step
        attended = jax.lax.optimization_barrier(attended)
    all_keys, all_values = jax.tree.map(cache.swap, attended)
    cached = iter(all_keys)
    terms = map_arrays(lambda a: next(cached) if a.is_cached else a.x, terms)
    cache = dataclasses.replace(cache, keys=kept[0], values=kept[1], length=length)
    return terms, all_values, mask, cache


def advance_length(
    at: _Length,
    n: int,
    *,
    length: _Length,
    batch: int,
    lengths: jax.Array | None = None,
    capacity: int | None = None,
    exact: bool = False,
) -> tuple[jax.Array | None, _Length]:
    """Checks that n new tokens may be at position `at`, and counts tokens.

    Before them `length` tokens were read, a scalar or ``[batch]``. `lengths` ``[batch or 1]`` counts the
    real tokens up to now, if the examples differ; `capacity` bounds the positions. With `exact` the tokens
    must follow those before; otherwise `at` may be smaller, which decodes from there again.

    Returns:
      Whether the position is valid, a bool scalar or ``[batch]``, if that is traced; None if it is
      known to be. And the number of tokens that were read, a scalar, or ``[batch]`` with `lengths`.

    Raises:
      ValueError: everything is known and the position is invalid.
    """
    reading = None if lengths is None else lengths > at
    valid = None
    if n and all(is_concrete(x) for x in (at, length, lengths)):
        needed = int(np.max(np.asarray(at))) + n
        if capacity is not None and needed > capacity:
            raise ValueError(
                f"extend: the cache has max_length={capacity} but {needed} positions are needed; make it "
                f"with max_length>={needed}, that of a MultiHeadAttention by init or init_cache with "
                "longer inputs"
            )
        first, read = np.asarray(at), np.asarray(length)  # in NumPy, which `jax.jit` does not trace
        missing = first != read if exact else first > read
        if np.any(missing if lengths is None else missing & (np.asarray(lengths) > first)):
            raise ValueError(
                f"extend: position={at} but the cache holds {length} tokens; leave position out, then new "
                "tokens follow the cached ones"
            )
    elif n:
        gap = jnp.not_equal(at, length) if exact else jnp.greater(at, length)
        valid = jnp.logical_not(gap if reading is None else gap & reading)
        valid = valid if capacity is None else valid & (at + n <= capacity)
    if reading is None or lengths is None:
        return valid, _as_length(at + n)
    end = jnp.where(reading, jnp.minimum(lengths, at + n), length)
    return valid, jnp.broadcast_to(_as_length(end), (batch,))


def _as_length(n: _Length) -> _Length:
    """Returns a length as caches hold it: int32, and concrete if `n` is."""
    return np.int32(n) if isinstance(n, int) else jnp.asarray(n, jnp.int32)


def fill_invalid(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Returns ``[b, ...]`` with NaN in the examples that are not valid, see `advance_length`."""
    if valid is None:
        return x
    valid = jnp.reshape(valid, (*jnp.shape(valid), *(1,) * (x.ndim - jnp.ndim(valid))))
    return jnp.where(valid, x, jnp.nan)


def _cached_arrays(terms: Terms) -> list[jax.Array]:
    """Returns the arrays ``[b, k, ...]`` that tokens attended to make."""
    arrays: list[jax.Array] = []
    map_arrays(lambda a: arrays.append(a.x) if a.is_cached else None, terms)
    return arrays
