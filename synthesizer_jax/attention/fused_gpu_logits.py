"""The logits of a tile in the GPU kernels: products, bias, soft cap and mask.

A tile is computed when a program comes to it and is dropped afterwards, so memory has no array of
all logits. Every kernel builds its tiles here, so the backward kernels compute the logits in the
same way as the forward kernel did.

A relative bias has one number per diagonal of the logits. A tile looks its numbers up by the
difference of key and query, so the bias is never expanded to ``[q, k]``.
"""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from synthesizer_jax.attention.fused_gpu_geometry import (
    Operands,
    Program,
    Ref,
    RowTile,
    Tile,
    load,
    load_vector,
)
from synthesizer_jax.attention.terms import cap_logits


def logits_tile(
    program: Program,
    tile: Tile,
    queries: list[jax.Array],
    keys: list[jax.Array],
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits of a tile, float32, and which of them the mask allows (None for all).

    Args:
      program: the program that computes the tile.
      tile: where the tile is.
      queries: the queries of every term, ``[queries of the tile, r]``.
      keys: the keys of every term, ``[keys of the tile, r]``.
      bias: the tile of `bias_tile`, if it is known already.
    """
    # S = Σ Q Kᵀ over the terms; or its transpose, K Qᵀ.
    products = []
    for query_rows, key_rows in zip(queries, keys, strict=True):
        if tile.transposed:
            products.append(matmul_nt(key_rows, query_rows))
        else:
            products.append(matmul_nt(query_rows, key_rows))

    if bias is None:
        bias = bias_tile(program.refs, tile)
    summands = products if bias is None else [*products, bias]
    logits = cap_logits(functools.reduce(operator.add, summands), program.tiling.soft_cap)
    return logits, _allowed_tile(program, tile, logits.shape)


def bias_tile(refs: Operands, tile: Tile) -> jax.Array | None:
    """Returns what the bias adds to the logits of a tile, float32, or None if there is no bias.

    It is the same for all examples.
    """
    query, key, exists = tile.positions()
    parts = []
    if refs.diagonals is not None:
        # Diagonal 0 has the last query and the first key.
        diagonal = key - query + (tile.queries.length - 1)
        parts.append(load(refs.diagonals.at[diagonal], exists))
    if refs.table is not None:
        parts.append(load(refs.table.at[query, key], exists).astype(jnp.float32))
    return functools.reduce(operator.add, parts) if parts else None


def _allowed_tile(program: Program, tile: Tile, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns which logits of a tile the mask allows, bool of the tile's shape, or None for all.

    A rule compares positions ``[rows, columns]``, or vectors that broadcast to them.
    Padding queries are not masked here: the forward kernel sets their ``1 / Σ exp`` to zero.
    """
    tiling, refs, example = program
    query, key, exists = tile.positions()

    def load_along(ref: Ref, row_tile: RowTile, axis: int) -> jax.Array:
        """Returns one number per row or column of the tile, ``[rows, 1]`` or ``[1, columns]``."""
        return put_on_axis(load_vector(ref, example, row_tile), axis)

    # Causal masks and windows, except that all queries see the prefix.
    rules = tiling.mask.band_rules(query + tiling.mask.query_offset, key)
    if rules and refs.prefix_lengths is not None:
        rules = [functools.reduce(operator.and_, rules) | (key < refs.prefix_lengths[example])]

    # Padding, or at least what the last tile has beyond the length.
    if refs.real_keys is not None:
        rules.append(load_along(refs.real_keys, tile.keys, tile.key_axis) != 0)
    elif refs.key_ends is not None:
        rules.append(key < refs.key_ends[example])
    elif tile.keys.length % tile.keys.size:
        rules.append(key < tile.keys.length)

    # In packed rows, a query sees its own segment.
    if refs.query_segments is not None:
        query_segments = load_along(refs.query_segments, tile.queries, tile.query_axis)
        key_segments = load_along(refs.key_segments, tile.keys, tile.key_axis)
        rules.append(query_segments == key_segments)

    if refs.allowed is not None:
        # One index per logit, because the three indices of a gather must have the same shape.
        pattern = jnp.zeros_like(query) + (example if refs.allowed.shape[0] > 1 else 0)
        rules.append(load(refs.allowed.at[pattern, query, key], exists) != 0)

    if not rules:
        return None
    return jnp.broadcast_to(functools.reduce(operator.and_, rules), shape)


def forbid(logits: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Returns the logits, and -inf where the mask forbids a key."""
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def put_on_axis(x: jax.Array, axis: int) -> jax.Array:
    """Returns a vector along an axis of a tile: ``[n, 1]`` for axis 0, ``[1, n]`` for axis 1."""
    return x[:, None] if axis == 0 else x[None, :]


def exp(x: jax.Array) -> jax.Array:
    """Returns ``e ** x``, by the GPU's instruction for powers of two."""
    return jnp.exp2(x * math.log2(math.e))


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns ``x y``, in float32."""
    return plgpu.dot(x, y)


def matmul_nt(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns ``x yᵀ``, in float32."""
    return plgpu.dot(x, y, trans_b=True)
