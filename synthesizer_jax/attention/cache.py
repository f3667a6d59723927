"""Caches for decoding, which hold the keys and values of past tokens.

`init_cache` creates an empty cache. In each decoding step, `extend` writes the keys and values of
the new tokens to the cache, and returns all keys and values that the new tokens may attend to.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention.masks import Mask, is_concrete, zero_padding
from synthesizer_jax.attention.terms import (
    Banded,
    LowRank,
    Outer,
    Relative,
    Split,
    Static,
    Terms,
    map_arrays,
)
from synthesizer_jax.base.typing import PyTree

Values: TypeAlias = PyTree
"""An array ``[b, k, h, e]``, or a tuple of arrays ``[b, k, ...]`` that a mixer computes per token.
"""

_Length: TypeAlias = int | jax.Array | np.int32
"""A number of tokens, or the position of a token."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The keys and values of past tokens, at their positions in the sequence.

    The cache never contains parameters, even if a term uses parameters as keys. The Dense, Random,
    Factorized Random and Factorized Dense Synthesizers therefore cache only values. In Gaussian
    attention and in convolutions, a query reads the values in a window only, so the cache keeps
    only the past values that the window reaches. The size of such a cache does not depend on the
    sequence length. If a window limits the logits instead, the cache can also drop the keys and
    values that are out of reach; see `as_window`.

    In the cached arrays, the axis of heads comes before the axis of positions. This order lets a
    decoding step multiply by the keys and values without copying them.

    Attributes:
      keys: the keys of each term that computes keys from tokens. Each array is ``[b, h, m, r]``, or
        ``[b, m, h]`` if the keys have no width axis. The letter m stands for the capacity of the
        cache.
      values: ``[b, h, m, e]``, or a tuple of arrays with the same order of axes.
      length: the number of tokens that the cache has read, int32, which is also the position of the
        next token. It is a scalar if the number is the same for all examples, and ``[b]``
        otherwise. In cross-attention, `length` is the number of queries so far.
      empty_memory: an array without tokens, ``[b, 0, width]``, which records the width and dtype of
        the memory in cross-attention. In self-attention, `empty_memory` is None.
      window: whether the arrays hold the last m positions before the next token. If `window` is
        False, the arrays hold the positions 0 to m - 1.
      positions_first: whether the arrays are ``[b, m, h, r]``, as in Flax's caches.
      cleared: whether the keys and values of padding tokens have already been set to zero. If
        `cleared` is True, decoding steps do not set them to zero again.
      num_queries: an upper bound on the query positions in cross-attention, or None if no bound is
        known.
      is_shareable: whether the beams of an example can share a row of a self-attention cache; see
        the module `beams`.
      beams: the number of beams that share each row, n. If `beams` is greater than 1, the arrays
        have ``m · n`` positions, and index ``t · n + i`` belongs to position t and to slot i.
      sources: ``[b, n, m]`` the slots that hold the past of each beam, or None if `beams` is 1.
    """

    keys: tuple[jax.Array, ...]
    values: Values
    length: _Length = dataclasses.field(default_factory=lambda: np.int32(0))
    empty_memory: jax.Array | None = None
    window: bool = dataclasses.field(default=False, metadata={"static": True})
    positions_first: bool = dataclasses.field(default=False, metadata={"static": True})
    cleared: bool = dataclasses.field(default=False, metadata={"static": True})
    num_queries: int | None = dataclasses.field(default=None, metadata={"static": True})
    is_shareable: bool = dataclasses.field(default=False, metadata={"static": True})
    beams: int = dataclasses.field(default=1, metadata={"static": True})
    sources: jax.Array | None = None

    @property
    def batch(self) -> int:
        """The number of examples."""
        return jax.tree.leaves(self.values)[0].shape[0]

    @property
    def capacity(self) -> int:
        """The number of positions that the cache holds."""
        x: jax.Array = jax.tree.leaves(self.values)[0]
        return x.shape[self.position_axis(x)] // self.beams

    def position_axis(self, x: jax.Array) -> int:
        """Returns the axis of the positions in an array of the cache."""
        return 1 if self.positions_first or x.ndim < 4 else 2

    def swap(self, x: jax.Array) -> jax.Array:
        """Converts an array ``[b, k, ...]`` to the layout of the cache, or back to ``[b, k, ...]``.

        Both conversions swap the same two axes, so one method can do both.
        """
        # A batch axis of size 1 is removed before the swap, and added again after the swap.
        # Otherwise XLA's CPU backend would copy the array; see `multiply_examples`.
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
    """Returns an empty cache for terms and values that have the given shapes.

    The function reads only the shapes and dtypes of its arguments.

    Args:
      terms: the terms of any decoding step.
      values: ``[b, k, h, e]``, or a tuple of arrays ``[b, k, ...]``. The length k does not matter.
      max_length: the largest number of positions that the cache can hold.
      memory: the encoded tokens that the queries attend to in cross-attention, ``[b, k, width]``.
        Pass None in self-attention.
      positions_first: see `Cache`. If `positions_first` is False and `memory` is None, a `Banded`
        term gets a cache that holds only the past values that its window reaches. Each decoding
        step removes the oldest values from such a cache.
    """
    term = terms[0]
    length = max_length
    window = False
    if not positions_first and memory is None and isinstance(term, Banded) and term.starts is None:
        # The window of a query begins `-first` keys before the query, so older values are not
        # needed.
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
        is_shareable=memory is None and not positions_first and _are_shareable(terms),
    )


def extend(
    cache: Cache, terms: Terms, values: Values, *, at: _Length | None = None, mask: Mask
) -> tuple[Terms, Values, Mask, Cache]:
    """Writes the keys and values of new tokens to a cache, and returns all keys and values.

    Args:
      cache: the cache, with the past tokens.
      terms: the terms of the decoding step. If a term computes its keys from tokens, it contains
        only the keys of the new tokens.
      values: the values of the new tokens. If there are no new tokens, nothing is written.
      at: the position of the first new token. All examples have the same position. None means the
        length of the cache, which must then be a scalar.
      mask: the mask of the decoding step, which counts positions from the start of the sequence. If
        examples differ in length, `mask.key_lengths` says which of the new tokens are real. The
        keys and values of padding tokens are written as zeros, so that a NaN in padding does not
        affect later steps.

    Returns:
      A tuple of the terms with all keys, all values, the mask for all keys, and the extended cache.
      At positions that have not been written yet, keys and values are zeros, and the mask must hide
      them.

    Raises:
      ValueError: if the tokens do not fit into the cache, if they do not follow the cached tokens,
        or if the cache was made for other terms. Unless the cache is a window, `at` may also be an
        earlier position, from which decoding starts again. If the position is traced, the function
        cannot raise an error, and writes NaN as the new values instead.
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

    # The keys and values of padding tokens are set to zero. In a decoding loop with one token per
    # step, the mask has no `key_lengths`, so nothing has to be set to zero.
    if n and mask.key_lengths is not None:
        real = (jnp.arange(n) + at)[None] < jnp.reshape(mask.key_lengths, (-1, 1))  # [b or 1, n]
        keys, values = jax.tree.map(lambda x: zero_padding(x, real), (keys, values))

    # From here on, arrays have the layout of the cache, [b, h, m, ...].
    new = jax.tree.map(cache.swap, (keys, values))
    if cache.window:
        attended, kept = _move_window(cache, new, at=at, valid=valid, lengths=mask.key_lengths)
        # The first key in the window is m positions before the first new token, so the positions in
        # the mask are shifted to match.
        mask = mask.slice_keys(at - cache.capacity, cache.capacity + n)
    else:
        attended = kept = _write(cache, new, at=at, valid=valid)
    if n == 0:
        # In cross-attention, keys and values do not change in a decoding loop. Without the
        # optimization barrier, XLA would swap the axes before the loop, and then copy the swapped
        # arrays in every step.
        attended = jax.lax.optimization_barrier(attended)

    # Keys and values are swapped back to [b, k, ...]. `map_arrays` then replaces the keys of the
    # terms, in the order in which the cache stores them.
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
      lengths: the number of real tokens of each example so far, ``[b]``, or None if all new tokens
        are real.

    Returns:
      The keys and values of all m + n positions, and the keys and values of the m positions that
      are kept for the next step.
    """
    first = jax.tree.leaves(new)[0]
    n = first.shape[cache.position_axis(first)]

    def append(past: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the past keys or values followed by the new ones, ``[b, h, m + n, ...]``."""
        both = jnp.concatenate([past, x.astype(past.dtype)], axis=cache.position_axis(x))
        return fill_invalid(both, valid)

    def keep_last(x: jax.Array) -> jax.Array:
        """Returns the last m positions, which are the window for the next step."""
        if lengths is None:
            return jax.lax.slice_in_dim(x, n, None, axis=cache.position_axis(x))

        # If an example has fewer than n new real tokens, its window ends earlier.
        end = jnp.clip(lengths - at, 0, n)  # [b]
        index = end[:, None] + jnp.arange(cache.capacity)[None]  # [b, m]
        index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
        return cache.swap(jnp.take_along_axis(cache.swap(x), index, axis=1))

    attended = jax.tree.map(append, (cache.keys, cache.values), new)
    return attended, jax.tree.map(keep_last, attended)


def _write(cache: Cache, new: PyTree, *, at: _Length, valid: jax.Array | None) -> PyTree:
    """Returns the cached keys and values after writing the new tokens at their positions.

    Args:
      cache: a cache whose arrays begin at position 0.
      new: the keys and values of the new tokens, in the layout of the cache.
      at: the position of the first new token.
      valid: the first result of `advance_length`.
    """

    def write(past: jax.Array, x: jax.Array) -> jax.Array:
        """Writes new tokens, if there are any, to an array of the cache."""
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
    """Checks that n new tokens may begin at position `at`, and returns the new length of the cache.

    Args:
      at: the position of the first new token.
      n: the number of new tokens.
      length: the number of tokens that the cache has read before this step, a scalar or
        ``[batch]``.
      batch: the number of examples.
      lengths: the number of real tokens of each example so far, ``[batch or 1]``, if examples
        differ in length. Pass None if all new tokens are real.
      capacity: an upper bound on the number of positions, or None if there is no limit.
      exact: whether `at` must be equal to `length`. If `exact` is False, `at` may also be smaller
        than `length`, and decoding then starts again from position `at`.

    Returns:
      A pair ``(valid, length)``. `valid` says whether the position is valid. If the position is
      traced, `valid` is a bool scalar or ``[batch]``. If the position is known to be valid, `valid`
      is None. `length` is the number of tokens that the cache has read after this step. It is a
      scalar, or ``[batch]`` if `lengths` is given.

    Raises:
      ValueError: if the position is invalid and no argument is traced.
    """
    has_new_tokens = None if lengths is None else lengths > at  # [batch or 1]
    valid = None
    if n and all(is_concrete(x) for x in (at, length, lengths)):
        _check_position(at, n, length=length, lengths=lengths, capacity=capacity, exact=exact)
    elif n:
        # The values of traced arrays are unknown, so an invalid position cannot raise an error
        # here. Instead, the caller writes NaN for the examples whose `valid` is False.
        gap = jnp.not_equal(at, length) if exact else jnp.greater(at, length)
        valid = jnp.logical_not(gap if has_new_tokens is None else gap & has_new_tokens)
        if capacity is not None:
            valid = valid & (at + n <= capacity)

    if has_new_tokens is None or lengths is None:
        return valid, _as_length(at + n)

    # An example without new tokens keeps its length.
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
    """Raises a `ValueError` if n new tokens may not begin at a position that is not traced.

    The arguments are the same as in `advance_length`.
    """
    needed = int(np.max(np.asarray(at))) + n
    if capacity is not None and needed > capacity:
        raise ValueError(
            f"extend: the cache has max_length={capacity}, but {needed} positions are needed. "
            f"Create it with max_length={needed} or more. For a MultiHeadAttention, call init or "
            "init_cache with longer inputs."
        )

    # The comparison below uses NumPy, because `jax.jit` does not trace NumPy operations.
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
    """Converts a length to int32, the dtype of `Cache.length`, without tracing a Python int."""
    return np.int32(n) if isinstance(n, int) else jnp.asarray(n, jnp.int32)


def fill_invalid(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Returns an array ``[b, ...]`` in which the entries of invalid examples are NaN.

    Args:
      x: the array.
      valid: the first result of `advance_length`, which is None if all examples are valid.
    """
    if valid is None:
        return x
    valid = jnp.reshape(valid, (*jnp.shape(valid), *(1,) * (x.ndim - jnp.ndim(valid))))
    return jnp.where(valid, x, jnp.nan)


def _are_shareable(terms: Terms) -> bool:
    """Returns whether `beams.extend_for_beams` supports all terms of a self-attention layer."""
    for term in terms:
        if isinstance(term, Split):
            if not all(map(_are_shareable, term.groups)):
                return False
        elif type(term) not in (LowRank, Outer, Relative, Static):
            return False
    return True


def _cached_arrays(terms: Terms) -> list[jax.Array]:
    """Returns the arrays ``[b, k, ...]`` of the terms that the cache stores."""
    arrays: list[jax.Array] = []
    map_arrays(lambda a: arrays.append(a.x) if a.is_cached else None, terms)
    return arrays
