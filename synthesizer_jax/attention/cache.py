"""Caches for decoding: the values of past tokens, and the keys that were made from them.

`init_cache` creates an empty cache. In each step, `extend` writes the keys and values of the new
tokens, and returns what the step attends to.
"""

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
"""An array ``[b, k, h, e]``, or a tuple of arrays ``[b, k, ...]`` that a mixer makes of each token.
"""

_Length: TypeAlias = int | jax.Array | np.int32
"""A number of tokens, or the position of a token."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The keys and values of past tokens, at their positions in the sequence.

    Parameters that act as keys are never cached. The Dense, Random, Factorized Random and
    Factorized Dense Synthesizers therefore cache only values. For a window of weights (Gaussian
    attention, convolutions), the cache keeps only as many values as the window reaches back,
    however long the sequence is. A window of logits can be cached in the same way, together with
    its keys; see `as_window`.

    The axis of heads comes before the axis of positions. A step can then multiply keys and values
    without copying them.

    Attributes:
      keys: the keys of each term that computes them from tokens, ``[b, h, m, r]``, or ``[b, m, h]``
        if keys have no width. m is the capacity.
      values: ``[b, h, m, e]``, or a tuple of arrays.
      length: the position of the next token, int32. It is also the number of tokens that were read.
        It is a scalar if all examples have read the same number, and otherwise ``[b]``. In
        cross-attention it counts queries.
      empty_memory: in cross-attention, an array without tokens, ``[b, 0, width]``, which records
        the width and dtype of the memory. None in self-attention.
      window: whether the arrays hold the last m positions before the next token. Otherwise they
        hold the positions 0 to m - 1.
      positions_first: whether the arrays are ``[b, m, h, r]``, as in Flax's caches.
      cleared: whether keys and values of padding are zeros already. They do not need to be set to
        zero in every step then.
      num_queries: in cross-attention, an upper bound on the query positions. None if there is none.
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
        """The number of examples."""
        return jax.tree.leaves(self.values)[0].shape[0]

    @property
    def capacity(self) -> int:
        """The number of positions that the arrays hold."""
        x: jax.Array = jax.tree.leaves(self.values)[0]
        return x.shape[self.position_axis(x)]

    def position_axis(self, x: jax.Array) -> int:
        """Returns the axis of the positions in an array of the cache."""
        return 1 if self.positions_first or x.ndim < 4 else 2

    def swap(self, x: jax.Array) -> jax.Array:
        """Converts an array ``[b, k, ...]`` to the layout of the cache, or back.

        Both directions are the same swap of two axes.
        """
        # A batch axis of 1 is removed and added again, because XLA's CPU backend would copy the
        # array otherwise; see `multiply_examples`.
        axis = self.position_axis(x)
        return x[0].swapaxes(0, axis - 1)[None] if x.shape[0] == 1 else x.swapaxes(1, axis)

    def as_window(self, capacity: int) -> Cache:
        """Returns an empty cache that holds only the last `capacity` positions."""

        def cut(x: jax.Array) -> jax.Array:
            """Returns an array with only `capacity` positions."""
            return jax.lax.slice_in_dim(x, 0, capacity, axis=self.position_axis(x))

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
    """Returns an empty cache for terms and values like the given ones.

    Only shapes and dtypes of the arguments are read.

    Args:
      terms: the terms of any step.
      values: ``[b, k, h, e]``, or a tuple of arrays ``[b, k, ...]``, for any k.
      max_length: the largest number of positions that the cache has to hold.
      memory: in cross-attention, the tokens that are attended to, ``[b, k, width]``. None in
        self-attention.
      positions_first: as in `Cache`. If it is False, and in self-attention, a window of weights
        gets a cache that holds only the values that the window reaches. Such a cache moves along
        with the queries.
    """
    term = terms[0]
    length = max_length
    window = False
    if not positions_first and memory is None and isinstance(term, Banded) and term.starts is None:
        # The window of a query begins `-first` keys before it. Nothing older is needed.
        length = max(0, -term.first)
        window = True

    batch = jax.tree.leaves(values)[0].shape[0]
    layout = Cache((), (), window=window, positions_first=positions_first)

    def empty(x: jax.Array) -> jax.Array:
        """Returns zeros for `length` positions, in the layout of the cache."""
        return layout.swap(jnp.zeros((batch, length, *x.shape[2:]), x.dtype))

    return dataclasses.replace(
        layout,
        keys=tuple(empty(x) for x in _cached_arrays(terms)),
        values=jax.tree.map(empty, values),
        empty_memory=None if memory is None else memory[:, :0],
    )


def extend(
    cache: Cache, terms: Terms, values: Values, *, at: _Length | None = None, mask: Mask
) -> tuple[Terms, Values, Mask, Cache]:
    """Writes the keys and values of new tokens to a cache, and returns what the step attends to.

    Args:
      cache: the cache, with the past tokens.
      terms: the terms of the step. Keys that are computed from tokens are those of the new tokens
        only.
      values: the values of the new tokens. If there are no new tokens, nothing is written.
      at: the position of the first new token, the same for all examples. None stands for the length
        of the cache, which must be a scalar then.
      mask: the mask of the step, in positions of the sequence. If examples differ in length, its
        `key_lengths` says which of the new tokens are real. The others are written as zeros, so
        that nothing in them, such as a NaN, reaches later steps.

    Returns:
      The terms for all keys, all values, the mask for these keys, and the extended cache. Positions
      that were not written yet are zero. The mask has to hide them.

    Raises:
      ValueError: if the tokens do not fit into the cache, if they do not follow the cached tokens,
        or if the cache was made for other terms. A cache that is not a window also takes an earlier
        position, from which decoding starts again. If a position is traced, an error cannot be
        raised, and the new values are NaN instead.
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
            f"extend: the cache holds the keys of {len(cache.keys)} terms, but this step has the "
            f"keys of {len(keys)} terms. Create the cache with init_cache from terms of the same "
            "alignment."
        )

    # New tokens that are padding become zeros. Single tokens of decoding loops have no lengths.
    if n and mask.key_lengths is not None:
        real = (jnp.arange(n) + at)[None] < jnp.reshape(mask.key_lengths, (-1, 1))  # [b or 1, n]
        keys, values = jax.tree.map(lambda x: zero_padding(x, real), (keys, values))

    # From here on, arrays have the layout of the cache, [b, h, m, ...].
    new = jax.tree.map(cache.swap, (keys, values))
    if cache.window:
        attended, kept = _move_window(cache, new, at=at, valid=valid, lengths=mask.key_lengths)
        # The first key that is attended to is now m positions before the new tokens.
        mask = mask.slice_keys(at - cache.capacity, cache.capacity + n)
    else:
        attended = kept = _write(cache, new, at=at, valid=valid)
    if n == 0:
        # In cross-attention, nothing changes in a decoding loop. XLA would therefore swap the axes
        # before the loop, and copy the result in every step.
        attended = jax.lax.optimization_barrier(attended)

    # Back to [b, k, ...]. The keys of the terms are replaced in the order in which they were
    # cached.
    all_keys, all_values = jax.tree.map(cache.swap, attended)
    cached = iter(all_keys)
    terms = map_arrays(lambda a: next(cached) if a.is_cached else a.x, terms)
    cache = dataclasses.replace(cache, keys=kept[0], values=kept[1], length=length)
    return terms, all_values, mask, cache


def _move_window(
    cache: Cache,
    new: PyTree,
    *,
    at: _Length,
    valid: jax.Array | None,
    lengths: jax.Array | None,
) -> tuple[PyTree, PyTree]:
    """Appends new tokens to a window of past tokens.

    Args:
      cache: a cache that holds the last m positions before `at`.
      new: the keys and values of n new tokens, in the layout of the cache.
      at: the position of the first new token.
      valid: the first result of `advance_length`.
      lengths: the numbers of real tokens up to now, ``[b]``. None if all new tokens are real.

    Returns:
      The keys and values of all m + n positions, and those of the m positions that are kept for the
      next step.
    """
    first = jax.tree.leaves(new)[0]
    n = first.shape[cache.position_axis(first)]

    def append(past: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the window of the past, followed by the new tokens, ``[b, h, m + n, ...]``."""
        both = jnp.concatenate([past, x.astype(past.dtype)], axis=cache.position_axis(x))
        return fill_invalid(both, valid)

    def keep_last(x: jax.Array) -> jax.Array:
        """Returns the last m positions, which are the window for the next step."""
        if lengths is None:
            return jax.lax.slice_in_dim(x, n, None, axis=cache.position_axis(x))

        # In examples that have fewer real tokens, the window ends earlier.
        end = jnp.clip(lengths - at, 0, n)  # [b]
        index = end[:, None] + jnp.arange(cache.capacity)[None]  # [b, m]
        index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
        return cache.swap(jnp.take_along_axis(cache.swap(x), index, axis=1))

    attended = jax.tree.map(append, (cache.keys, cache.values), new)
    return attended, jax.tree.map(keep_last, attended)


def _write(cache: Cache, new: PyTree, *, at: _Length, valid: jax.Array | None) -> PyTree:
    """Returns the keys and values of a cache with new tokens at their positions.

    Args:
      cache: a cache that holds the positions from 0 on.
      new: the keys and values of the new tokens, in the layout of the cache.
      at: the position of the first new token.
      valid: the first result of `advance_length`.
    """

    def write(past: jax.Array, x: jax.Array) -> jax.Array:
        """Returns an array of the cache with new tokens. Without any, it stays as it is."""
        axis = cache.position_axis(x)
        x = fill_invalid(x.astype(past.dtype), valid)
        if x.shape[axis] == 0:
            return past
        return jax.lax.dynamic_update_slice_in_dim(past, x, at, axis=axis)

    return jax.tree.map(write, (cache.keys, cache.values), new)


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
    """Checks that n new tokens may be at position `at`, and counts the tokens that were read.

    Args:
      at: the position of the first new token.
      n: the number of new tokens.
      length: the number of tokens that were read before, a scalar or ``[batch]``.
      batch: the number of examples.
      lengths: the numbers of real tokens up to now, ``[batch or 1]``, if examples differ. None if
        all new tokens are real.
      capacity: an upper bound on the positions. None if there is none.
      exact: whether `at` must be equal to `length`. Otherwise it may be smaller, which decodes
        again from there.

    Returns:
      Whether the position is valid, and the number of tokens that were read. The first is a bool
      scalar or ``[batch]`` if it is traced, and None if it is known to be valid. The second is a
      scalar, or ``[batch]`` if `lengths` is given.

    Raises:
      ValueError: if the position is invalid and nothing is traced.
    """
    has_new_tokens = None if lengths is None else lengths > at  # [batch or 1]
    valid = None
    if n and all(is_concrete(x) for x in (at, length, lengths)):
        _check_position(at, n, length=length, lengths=lengths, capacity=capacity, exact=exact)
    elif n:
        # An error cannot depend on traced numbers. The caller writes NaN where `valid` is False.
        gap = jnp.not_equal(at, length) if exact else jnp.greater(at, length)
        valid = jnp.logical_not(gap if has_new_tokens is None else gap & has_new_tokens)
        if capacity is not None:
            valid = valid & (at + n <= capacity)

    if has_new_tokens is None or lengths is None:
        return valid, _as_length(at + n)

    # Examples that have no new tokens keep their length.
    end = jnp.where(has_new_tokens, jnp.minimum(lengths, at + n), length)
    return valid, jnp.broadcast_to(_as_length(end), (batch,))


def _check_position(
    at: _Length,
    n: int,
    *,
    length: _Length,
    lengths: jax.Array | None,
    capacity: int | None,
    exact: bool,
) -> None:
    """Raises a `ValueError` if n new tokens may not be at a known position.

    The arguments are those of `advance_length`.
    """
    needed = int(np.max(np.asarray(at))) + n
    if capacity is not None and needed > capacity:
        raise ValueError(
            f"extend: the cache has max_length={capacity}, but {needed} positions are needed. "
            f"Create it with max_length={needed} or more. For a MultiHeadAttention, call init or "
            "init_cache with longer inputs."
        )

    # This is computed in NumPy, which `jax.jit` does not trace.
    first = np.asarray(at)
    read = np.asarray(length)
    missing = first != read if exact else first > read
    if lengths is not None:
        missing = missing & (np.asarray(lengths) > first)
    if np.any(missing):
        raise ValueError(
            f"extend: position is {at}, but the cache holds {length} tokens. Leave position out to "
            "continue after the cached tokens."
        )


def _as_length(n: _Length) -> _Length:
    """Returns a length in the form of caches: int32, and not traced if `n` is an int."""
    return np.int32(n) if isinstance(n, int) else jnp.asarray(n, jnp.int32)


def fill_invalid(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Returns an array ``[b, ...]`` with NaN in the examples that are not valid.

    Args:
      x: the array.
      valid: the first result of `advance_length`. None if all are valid.
    """
    if valid is None:
        return x
    valid = jnp.reshape(valid, (*jnp.shape(valid), *(1,) * (x.ndim - jnp.ndim(valid))))
    return jnp.where(valid, x, jnp.nan)


def _cached_arrays(terms: Terms) -> list[jax.Array]:
    """Returns the arrays ``[b, k, ...]`` of the terms that have to be cached."""
    arrays: list[jax.Array] = []
    map_arrays(lambda a: arrays.append(a.x) if a.is_cached else None, terms)
    return arrays
