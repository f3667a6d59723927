"""What mixers share in decoding: where new tokens stand, also where examples differ in that."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import DenyList

from synthesizer_jax.attention import Mask, Terms
from synthesizer_jax.attention.cache import is_known
from synthesizer_jax.mixers.base import FORCED, SITES, NewCache

READ_ONLY: Any = DenyList(("intermediates", FORCED, SITES))
"""The collections that copies of a module under `vmap` share."""


def query_position(
    module: nn.Module, mask: Mask, cache: Any, position: Any, *, cross: bool
) -> int | jax.Array:
    """The position of the first query.

    Args:
      module: for messages.
      mask: as the caller gave it.
      cache: None, `NewCache` or a cache with a length.
      position: as the caller gave it; None: where the cache ends.
      cross: the queries attend to other tokens than their own.

    Raises:
      ValueError: for a position without a cache that could tell what stands before it, and for a
        first step that is not at 0.
    """
    name = type(module).__name__
    if cache is None or isinstance(cache, NewCache):
        given = 0 if position is None else position
        begins = is_known(given) and np.ndim(given) == 0 and given == 0
        if not cross and not begins:
            without = "without a cache" if cache is None else "with a NewCache"
            raise ValueError(
                f"{name}: position={position} {without}; self-attention starts at position 0, later "
                "positions need the cache of the tokens before"
            )
        offset = mask.query_offset
        if not cross and cache is None and isinstance(offset, int) and offset != 0:
            raise ValueError(
                f"{name}: Mask.query_offset={offset} in self-attention without a cache, where queries "
                "and keys are the same tokens; leave it out, or give the cache of the tokens before"
            )
        return given
    return cache.length if position is None else position


def step_mask(mask: Mask, position: int | jax.Array, n: int) -> Mask:
    """The mask of n new tokens in self-attention with a cache: causal, whatever else it says.

    A prefix stays open as far as its tokens are there.
    """
    prefix = mask.prefix_lengths
    if prefix is not None:
        prefix = jnp.minimum(prefix, position + n)
    return dataclasses.replace(mask, causal=True, prefix_lengths=prefix, query_offset=position)


def query_lengths(mask: Mask, position: int | jax.Array) -> jax.Array | None:
    """Where the real queries end that start at `position`, ``[b]``; None: all are real."""
    return None if mask.query_lengths is None else mask.query_lengths + position


def ragged_step(
    module: nn.Module,
    x: jax.Array,
    kv: jax.Array | None,
    *,
    mask: Mask,
    bias: Terms,
    cache: Any,
    position: Any,
) -> tuple[jax.Array, Any] | None:
    """A mixer's call with a cache, where the examples of a batch stand at different positions.

    A prompt with a `Mask.key_valid` runs with its real tokens first; a step runs under `vmap`, one
    example at its own position each. Arguments are the mixer's.

    Returns:
      The mixer's output and cache; None where all examples stand at the same position.
    """
    if isinstance(cache, NewCache):
        if kv is not None or mask.key_valid is None:
            return None
        x, mask, order = real_first(x, mask)
        y, new = module(x, mask=mask, bias=bias, cache=cache, position=position)
        return take_rows(y, jnp.argsort(order, axis=1)), new
    at = cache.length if position is None else position
    if jnp.ndim(at) == 0:
        return None
    if kv is None and mask.key_valid is not None:
        raise ValueError(
            f"{type(module).__name__}: a step's mask has key_valid, but the cache holds the real tokens "
            "of every example only; leave key_valid out after the first step"
        )
    return _each_example(module, x, kv, mask=mask, bias=bias, cache=cache, position=at)


def real_first(x: jax.Array, mask: Mask) -> tuple[jax.Array, Mask, jax.Array]:
    """Rows with their padding moved to the end, so that positions count real tokens.

    Args:
      x: ``[b, n, ...]``.
      mask: with `key_valid` ``[b or 1, n or more]``.

    Returns:
      The rows, the mask with `key_lengths` in the place of `key_valid`, and the index ``[b, n]`` that
      was taken.

    Raises:
      ValueError: the mask has a pattern of pairs.
    """
    if mask.allowed is not None or mask.key_segments is not None:
        raise ValueError(
            "Mask.key_valid of a prompt does not go with Mask.allowed or segments: its tokens move; "
            "pad the prompts at the end and give key_lengths"
        )
    assert mask.key_valid is not None
    real = dataclasses.replace(mask, key_valid=mask.key_valid[:, : x.shape[1]]).keys(x.shape[1])
    real = jnp.broadcast_to(jnp.asarray(real, bool), x.shape[:2])
    order = jnp.argsort(~real, axis=1, stable=True)
    mask = dataclasses.replace(
        mask,
        key_lengths=real.sum(axis=1, dtype=jnp.int32),
        key_valid=None,
        query_lengths=None,
        query_valid=None,
    )
    return take_rows(x, order), mask, order


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """``[b, n, ...]`` at the index ``[b, m]`` of every example."""
    return jnp.take_along_axis(x, jnp.reshape(index, (*index.shape, *(1,) * (x.ndim - 2))), axis=1)


def _each_example(
    module: nn.Module,
    x: jax.Array,
    kv: jax.Array | None,
    *,
    mask: Mask,
    bias: Terms,
    cache: Any,
    position: jax.Array,
) -> tuple[jax.Array, Any]:
    """The mixer on every example by itself, at a position of its own."""
    batch = x.shape[0]
    position, length = (jnp.broadcast_to(jnp.asarray(p), batch) for p in (position, cache.length))
    mask = dataclasses.replace(mask, query_offset=0)

    def own(x: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, 0 if x.shape[0] == 1 else index, 1, axis=0)

    def step(
        module: nn.Module, index: jax.Array, at: jax.Array, length: jax.Array, rows: Any
    ) -> Any:
        x, kv, cache = jax.tree.map(lambda a: a[None], rows)
        y, new = module(
            x,
            kv,
            mask=jax.tree.map(lambda a: own(a, index), mask),
            bias=bias,
            cache=dataclasses.replace(cache, length=length),
            position=at,
        )
        length = jnp.reshape(new.length, ())
        return jax.tree.map(lambda a: a[0], (y, dataclasses.replace(new, length=None))), length

    lifted: Any = nn.vmap(step, variable_axes={READ_ONLY: None}, split_rngs={"dropout": True})
    rows = (x, kv, dataclasses.replace(cache, length=None))
    (y, new), length = lifted(module, jnp.arange(batch), position, length, rows)
    return y, dataclasses.replace(new, length=length)
