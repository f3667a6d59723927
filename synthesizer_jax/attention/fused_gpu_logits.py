"""Computes the logits of a tile in the GPU kernels, from products, bias, soft cap and mask.

A program computes a tile of logits when it needs the tile, and discards the tile after use. An
array of all logits therefore never exists in the GPU's memory. All kernels call this module, so the
backward kernels compute the same logits as the forward kernel.

A relative bias has one number for each diagonal of the logits. For each tile, a program looks up
these numbers by the distance ``key - query``, so the bias is never expanded to ``[q, k]``.
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
    """Returns the logits of a tile in float32, and a bool array of the logits that the mask allows.

    The second result is None if the mask allows all logits of the tile.

    Args:
      program: the program that computes the tile.
      tile: the position of the tile.
      queries: the queries of every term, ``[queries of the tile, r]``.
      keys: the keys of every term, ``[keys of the tile, r]``.
      bias: the result of `bias_tile`, or None if it has not been computed yet.
    """
    # S = Σ Q Kᵀ is a sum over the terms. If the tile is transposed, Sᵀ = Σ K Qᵀ is computed
    # instead of S.
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
    """Returns the bias of one tile of logits in float32, or None if there is no bias.

    The bias is the same for all examples.
    """
    query, key, exists = tile.positions()
    parts = []
    if refs.diagonals is not None:
        # Diagonal 0 contains the pair of the last query and the first key.
        diagonal = key - query + (tile.queries.length - 1)
        parts.append(load(refs.diagonals.at[diagonal], exists))
    if refs.table is not None:
        parts.append(load(refs.table.at[query, key], exists).astype(jnp.float32))
    return functools.reduce(operator.add, parts) if parts else None


def _allowed_tile(program: Program, tile: Tile, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns a bool array of the logits of a tile that the mask allows, or None to allow all.

    The array has the shape of the tile. Each rule of the mask is a bool array ``[rows, columns]``,
    or an array that broadcasts to this shape. This function does not mask padding queries, because
    the forward kernel sets the inverse row sums of padding queries to zero.
    """
    tiling, refs, example = program
    query, key, exists = tile.positions()

    def load_along(ref: Ref, row_tile: RowTile, axis: int) -> jax.Array:
        """Returns one number per row or column of the tile, ``[rows, 1]`` or ``[1, columns]``."""
        return put_on_axis(load_vector(ref, example, row_tile), axis)

    # The rules of the band implement causal masks and windows. If there is a prefix, all queries
    # may also attend to the keys of the prefix.
    rules = tiling.mask.band_rules(query + tiling.mask.query_offset, key)
    if rules and refs.prefix_lengths is not None:
        rules = [functools.reduce(operator.and_, rules) | (key < refs.prefix_lengths[example])]

    # The next rule forbids padding keys. If there are no padding keys, it forbids the positions of
    # the last tile that lie beyond the last key.
    if refs.real_keys is not None:
        rules.append(load_along(refs.real_keys, tile.keys, tile.key_axis) != 0)
    elif refs.key_ends is not None:
        rules.append(key < refs.key_ends[example])
    elif tile.keys.length % tile.keys.size:
        rules.append(key < tile.keys.length)

    # In packed rows, a query may attend only to the keys of its own segment.
    if refs.query_segments is not None:
        query_segments = load_along(refs.query_segments, tile.queries, tile.query_axis)
        key_segments = load_along(refs.key_segments, tile.keys, tile.key_axis)
        rules.append(query_segments == key_segments)

    if refs.allowed is not None:
        # `pattern` has one index per logit, because all indices of a gather need the same shape.
        pattern = jnp.zeros_like(query) + (example if refs.allowed.shape[0] > 1 else 0)
        rules.append(load(refs.allowed.at[pattern, query, key], exists) != 0)

    if not rules:
        return None
    return jnp.broadcast_to(functools.reduce(operator.and_, rules), shape)


def forbid(logits: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Returns the logits, with -inf wherever the mask forbids a key."""
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def put_on_axis(x: jax.Array, axis: int) -> jax.Array:
    """Returns a vector reshaped to ``[n, 1]`` for axis 0 of a tile, or ``[1, n]`` for axis 1."""
    return x[:, None] if axis == 0 else x[None, :]


def exp(x: jax.Array) -> jax.Array:
    """Computes ``e ** x`` with the GPU's instruction for powers of two."""
    return jnp.exp2(x * math.log2(math.e))


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the matrix product ``x y`` in float32."""
    return plgpu.dot(x, y)


def matmul_nt(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the matrix product ``x yᵀ`` in float32."""
    return plgpu.dot(x, y, trans_b=True)
