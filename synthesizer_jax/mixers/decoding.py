"""Decoding steps of mixers: masks and positions of new tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention import Mask
from synthesizer_jax.attention.masks import is_concrete


def decoding_mask(mask: Mask, position: int | jax.Array, n: int) -> Mask:
    """Returns the mask of n new tokens in self-attention: causal, whatever else it says.

    A prefix stays open as far as its tokens are there.
    """
    prefix = mask.prefix_lengths
    if prefix is not None:
        prefix = jnp.minimum(prefix, position + n)
    return dataclasses.replace(mask, causal=True, prefix_lengths=prefix, query_offset=position)


def resolve_position(position: int | jax.Array | None, length: int | jax.Array) -> int | jax.Array:
    """Returns a step's position: where the cache ends if it is None, and 0 if it is known to be 0."""
    position = length if position is None else position
    is_start = is_concrete(position) and np.ndim(position) == 0 and int(position) == 0
    return 0 if is_start else position


def query_ends(mask: Mask, position: int | jax.Array) -> jax.Array | None:
    """Returns where the real queries that start at `position` end, ``[b]``; None: all are real."""
    return None if mask.query_lengths is None else mask.query_lengths + position


def move_padding_last(
    x: jax.Array, mask: Mask, *, position: int | jax.Array = 0
) -> tuple[jax.Array, Mask, jax.Array]:
    """Moves the padding of new tokens ``[b, n, ...]`` to the end, so that positions count real tokens.

    The mask's `key_valid` ``[b or 1, n]`` tells which are real. Returns the tokens, the mask with
    `key_lengths` in its place, and the index ``[b, n]`` of the tokens that were taken.
    """
    if mask.allowed is not None or mask.key_segments is not None:
        raise ValueError(
            "Mask.key_valid of new tokens does not go with Mask.allowed or segments: the tokens move; "
            "pad at the end and give key_lengths"
        )
    n = x.shape[1]
    assert mask.key_valid is not None
    if mask.key_valid.shape[-1] != n:
        raise ValueError(
            f"Mask.key_valid tells which of the new tokens are real; it has {mask.key_valid.shape[-1]} "
            f"entries for {n} tokens: leave it out where all are real"
        )
    real = jnp.broadcast_to(jnp.asarray(mask.keys(n), bool), x.shape[:2])
    order = jnp.argsort(~real, axis=1, stable=True)
    mask = dataclasses.replace(
        mask,
        key_lengths=real.sum(axis=1, dtype=jnp.int32) + position,
        key_valid=None,
        query_lengths=None,
        query_valid=None,
    )
    return take_positions(x, order), mask, order


def take_positions(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns ``[b, n, ...]`` at the index ``[b, m]`` of every example."""
    return jnp.take_along_axis(x, jnp.reshape(index, (*index.shape, *(1,) * (x.ndim - 2))), axis=1)
