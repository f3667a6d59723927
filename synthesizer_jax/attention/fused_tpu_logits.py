"""Computes the logits of a tile in the TPU kernels of the fused route.

The logits combine products, bias, soft cap and mask. Both the forward kernel and the backward
kernels call this module. The rows of a tile are queries, or keys if the tile is transposed. All
examples share the bias, so each tile of the bias is computed for the first example, and then kept
for the other examples.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from synthesizer_jax.attention.fused_tpu_geometry import Operands, Tiling
from synthesizer_jax.attention.terms import Outer, cap_logits
from synthesizer_jax.attention.tpu import Bias, Ref, matmul, roll_diagonals


def fill_bias_tile(tile: Ref, bias: Bias, tiling: Tiling) -> None:
    """Computes a tile of the bias, ``[tile_rows, columns]``, in the program of the first example.

    The programs of the other examples read the tile from scratch memory. The function does nothing
    if `tile` is None.
    """
    if tile is None:
        return
    index = pl.program_id(1)
    example = pl.program_id(2)

    @pl.when(example == 0)
    def _() -> None:
        if bias.diagonals is not None:
            roll_diagonals(tile, bias.diagonals[...], index * tile.shape[0], rows=tiling.rows)
        if bias.table is not None:
            table = bias.table[...].astype(jnp.float32)
            table = table.T if tiling.transposed else table
            tile[...] = table if bias.diagonals is None else tile[...] + table


def logits_tile(refs: Operands, bias: Ref, tiling: Tiling) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits of a program's tile in float32, and a bool array of the allowed logits.

    The second result is None if the mask allows all logits of the tile.

    Args:
      refs: references to the tiles of the operands.
      bias: the tile that `fill_bias_tile` filled, or None if the logits have no bias.
      tiling: the tiling of the logits.
    """
    index = pl.program_id(1)

    def product(queries: jax.Array, keys: jax.Array, *, exact: bool = False) -> jax.Array:
        """Returns ``Q Kᵀ``, or the transposed product ``K Qᵀ`` if the tile is transposed."""
        pair = (keys, queries) if tiling.transposed else (queries, keys)
        return matmul(*pair, axes=(1, 1), exact=exact)

    # The logits are S = bias + Σ Q Kᵀ + Σ (a Eₐᵀ) ∘ (b Eᵦᵀ).
    # The first sum is over the `LowRank` terms, and the second sum is over the `Outer` terms.
    summands = [] if bias is None else [bias[...]]
    summands += [product(term.queries[...], term.keys[...]) for term in refs.products.low_rank]
    for term in refs.products.outer:
        # A transposed tile contains the `count` keys from `first` on, one in each row. Any other
        # tile contains all keys.
        first: int | jax.Array = 0
        count = tiling.columns
        if tiling.transposed:
            first = index * tiling.tile_rows
            count = tiling.tile_rows
        a = product(term.a[...], a_one_hot(term, first, count), exact=True)
        b = product(term.b[...], b_one_hot(term, first, count), exact=True)
        summands.append(a * b)
    if summands:
        logits = functools.reduce(operator.add, summands)
    else:
        logits = jnp.zeros(tiling.tile_shape, jnp.float32)
    logits = cap_logits(logits, tiling.soft_cap)
    return logits, _allowed_tile(refs, tiling, index)


def _allowed_tile(refs: Operands, tiling: Tiling, index: jax.Array) -> jax.Array | None:
    """Returns a bool array of the logits of a tile that the mask allows, or None to allow all.

    The array has the shape of the tile. This function does not mask padding queries, because the
    caller of the forward kernel sets the inverse row sums of padding queries to zero.
    """
    row = lax.broadcasted_iota(jnp.int32, tiling.tile_shape, 0) + index * tiling.tile_rows
    column = lax.broadcasted_iota(jnp.int32, tiling.tile_shape, 1)
    query, key = (column, row) if tiling.transposed else (row, column)

    # The rules of the band implement causal masks and windows.
    rules = tiling.mask.band_rules(query + tiling.offset, key)

    if refs.real_keys is not None:
        real_keys = refs.real_keys[...]  # [1, k]
        rules.append((real_keys.T if tiling.transposed else real_keys) != 0)

    # In packed rows, a query may attend only to the keys of its own segment. The segment numbers
    # have the shape [1, n]. The segment numbers of the tile's rows are transposed to [n, 1].
    if refs.query_segments is not None:
        query_segments = refs.query_segments[...]
        key_segments = refs.key_segments[...]
        if tiling.transposed:
            rules.append(query_segments == key_segments.T)
        else:
            rules.append(key_segments == query_segments.T)

    if refs.allowed is not None:
        allowed = refs.allowed[...].astype(jnp.int32)
        rules.append((allowed.T if tiling.transposed else allowed) != 0)

    if not rules:
        return None
    return jnp.broadcast_to(functools.reduce(operator.and_, rules), tiling.tile_shape)


def clear_forbidden(allowed: jax.Array | None, weights: jax.Array) -> jax.Array:
    """Returns the weights, with zeros wherever the mask forbids a key.

    In a row without an allowed key, the forward kernel sets all logits to `LOW`, which is then also
    the maximum of the row. The exponentials are 1 instead of 0, so the weights of forbidden keys
    must be set to zero.
    """
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def a_one_hot(term: Outer, first: int | jax.Array, count: int) -> jax.Array:
    """Returns the one-hot matrix Eₐ, ``[count, A]``, which selects an entry of ``a`` for each key.

    In an `Outer` term, the logit of key j is ``a[j // B] · b[j % B]``. A product with a one-hot
    matrix replaces a gather, because gathers are slow on TPUs.
    """
    return _one_hot(term.a, lax.div, term.b.shape[-1], first, count)


def b_one_hot(term: Outer, first: int | jax.Array, count: int) -> jax.Array:
    """Returns the one-hot matrix Eᵦ, ``[count, B]``, which selects an entry of ``b`` for each key.

    See `a_one_hot`.
    """
    return _one_hot(term.b, lax.rem, term.b.shape[-1], first, count)


def _one_hot(
    factor: Ref,
    number_of: Callable[[jax.Array, jax.Array], jax.Array],
    size: int,
    first: int | jax.Array,
    count: int,
) -> jax.Array:
    """Returns the one-hot matrix of ``number_of(key, size)`` for the `count` keys from `first` on.

    The last axis of the matrix is as long as the last axis of `factor`.
    """
    shape = (count, factor.shape[-1])
    key = lax.broadcasted_iota(jnp.int32, shape, 0) + first
    number = number_of(key, jnp.int32(size))
    return (number == lax.broadcasted_iota(jnp.int32, shape, 1)).astype(factor.dtype)


def outer_vjp(term: Outer, dlogits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of an `Outer` term's factors, ``[q, A]`` and ``[q, B]``.

    The logits of the term are ``(a Eₐᵀ) ∘ (b Eᵦᵀ)``. The cotangents of its factors are therefore
    ``da = (dS ∘ b Eᵦᵀ) Eₐ`` and ``db = (dS ∘ a Eₐᵀ) Eᵦ``.
    """
    k_length = dlogits.shape[1]
    a_keys = a_one_hot(term, 0, k_length)  # [k, A]
    b_keys = b_one_hot(term, 0, k_length)  # [k, B]
    a = matmul(term.a[...], a_keys, axes=(1, 1), exact=True)  # [q, k]
    b = matmul(term.b[...], b_keys, axes=(1, 1), exact=True)  # [q, k]
    da = matmul((dlogits * b).astype(a_keys.dtype), a_keys, axes=(1, 0), exact=True)
    db = matmul((dlogits * a).astype(b_keys.dtype), b_keys, axes=(1, 0), exact=True)
    return da, db
