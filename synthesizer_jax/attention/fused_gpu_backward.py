"""The backward kernels of the fused route for NVIDIA's GPUs.

The kernels recompute the weights ``P = exp(S - max) / Σ exp(S - max)`` from the statistics of the
forward kernel. With ``delta = Σ_e dO ∘ O``, the cotangents are::

    dP = dO Vᵀ
    dS = P ∘ (dP - delta)
    dQ = dS K
    dK = dSᵀ Q
    dV = Pᵀ dO

dQ is a sum over keys, dK and dV are sums over queries, and the cotangent of the bias is a sum of dS
over examples. If one kernel computed all cotangents, several programs would add to the same rows.
The additions would have to be atomic operations, and the order of atomic operations changes from
run to run. The backward pass therefore runs three kernels. Each kernel recomputes the tiles of
logits that it needs, and each program writes a separate part of a result. Repeated runs therefore
add numbers in the same order, and give identical results.

A relative bias adds the same number to all logits on a diagonal. A program of the bias kernel
therefore adds up all square tiles along one diagonal *of tiles*, for several examples, before it
writes the sum. The memory for these sums grows linearly with the sequence length, not
quadratically.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from synthesizer_jax.attention.fused_gpu_geometry import (
    Operands,
    Program,
    Ref,
    RowTile,
    Scalar,
    Tile,
    TileRows,
    Tiling,
    load_rows,
    load_vector,
    store_rows,
)
from synthesizer_jax.attention.fused_gpu_logits import (
    bias_tile,
    exp,
    forbid,
    logits_tile,
    matmul,
    matmul_nt,
    put_on_axis,
)
from synthesizer_jax.attention.kernel_arrays import LabeledArrays
from synthesizer_jax.attention.mesh_axes import match_varying_axes
from synthesizer_jax.attention.terms import expand_diagonals

BIAS_PROGRAMS = 1024
"""The approximate number of programs that the bias kernel needs to keep a GPU busy."""

MIN_BIAS_EXAMPLES = 4
"""The smallest number of examples that a program of the bias kernel adds up.

With fewer examples, programs would write about as many bytes as they read.
"""


class Residuals(NamedTuple):
    """The arrays that the backward kernels read in addition to the operands.

    In a kernel, the attributes are references to the arrays of one head, so axis h is absent.

    Attributes:
      dout: the cotangent of the output, ``[b, q, h, e]``.
      row_max: `SoftmaxStats.row_max`, ``[b, h, q]`` float32.
      inverse_row_sum: `SoftmaxStats.inverse_row_sum`, ``[b, h, q]`` float32.
      delta: `softmax_vjp_delta`, ``[b, h, q]`` float32.
    """

    dout: Ref
    row_max: Ref
    inverse_row_sum: Ref
    delta: Ref


_RESIDUAL_AXES = Residuals(dout="bqh.", row_max="bhq", inverse_row_sum="bhq", delta="bhq")


def _inputs(operands: Operands, residuals: Residuals) -> LabeledArrays:
    """Returns the inputs of a backward kernel, with the letters of their axes."""
    return LabeledArrays((operands, residuals), (operands.axes(), _RESIDUAL_AXES))


def _cotangent_shape(x: jax.Array, batch: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the cotangents of an operand, with one cotangent per example.

    The dtype is float32 if the examples share the operand, because the cotangents of a shared
    operand are summed over the examples afterwards.
    """
    dtype = x.dtype if x.shape[0] == batch else jnp.float32
    return jax.ShapeDtypeStruct((batch, *x.shape[1:]), dtype)


def call_by_queries(
    tiling: Tiling, operands: Operands, residuals: Residuals, *, interpret: bool
) -> tuple[jax.Array, ...]:
    """Runs the kernel that computes the cotangents of the queries of every term.

    Each cotangent has the shape ``[b, q, h, r]``.
    """
    if not operands.queries:
        return ()
    batch, _, heads, width = operands.values.shape
    shapes = tuple(_cotangent_shape(x, batch) for x in operands.queries)
    results: tuple[tuple[jax.Array, ...]] = tiling.call(
        functools.partial(_queries_kernel, tiling),
        _inputs(operands, residuals),
        LabeledArrays((shapes,), (("bqh.",) * len(shapes),)),
        grid=(tiling.counts[0], heads, batch),
        multiply_adds=2 * operands.rank + width,
        interpret=interpret,
    )
    return results[0]


def _queries_kernel(
    tiling: Tiling, refs: Operands, residual_refs: Residuals, dqueries: tuple[Ref, ...]
) -> None:
    """Computes the cotangents of one tile of queries.

    In this kernel, the rows of a tile of logits belong to queries.
    """
    i = pl.program_id(0)
    example = pl.program_id(2)
    program = Program(tiling, refs, example)
    query_tile = tiling.query_tile(i)
    queries = program.load_queries(query_tile)  # [bq, r] for every term
    residuals = _load_residuals(residual_refs, example, query_tile)

    def add_keys(j: Scalar, totals: list[jax.Array]) -> list[jax.Array]:
        """Adds the contribution of key tile j to the cotangents of the queries."""
        tile = tiling.tile(i, j)
        keys, values = program.load_keys(tile.keys)
        rows = TileRows(queries, keys, values)
        _, dlogits = _backward_tile(program, tile, rows, residuals)  # [bq, bk]
        # dQ = dS K for every term.
        # The shape of dQ is [bq, r].
        return [
            total + matmul(dlogits.astype(key_rows.dtype), key_rows)
            for total, key_rows in zip(totals, keys, strict=True)
        ]

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in queries]
    first, last = program.visible_keys(i)
    totals = lax.fori_loop(first, last, add_keys, zeros)
    for result, total in zip(dqueries, totals, strict=True):
        store_rows(result, example, query_tile, total)


def call_by_keys(
    tiling: Tiling, operands: Operands, residuals: Residuals, *, interpret: bool
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Runs the kernel that computes the cotangents of keys and values.

    The first result contains the cotangents of the keys of every term, ``[b, k, h, r]``. The second
    result is the cotangent of the values.
    """
    batch, _, heads, width = operands.values.shape
    shapes = tuple(_cotangent_shape(x, batch) for x in operands.keys)
    results: tuple[tuple[jax.Array, ...], jax.Array] = tiling.call(
        functools.partial(_keys_kernel, tiling),
        _inputs(operands, residuals),
        LabeledArrays(
            (shapes, _cotangent_shape(operands.values, batch)), (("bkh.",) * len(shapes), "bkh.")
        ),
        grid=(tiling.counts[1], heads, batch),
        multiply_adds=2 * (operands.rank + width),
        interpret=interpret,
    )
    return results


def _keys_kernel(
    tiling: Tiling,
    refs: Operands,
    residual_refs: Residuals,
    dkeys: tuple[Ref, ...],
    dvalues: Ref,
) -> None:
    """Computes the cotangents of one tile of keys and values.

    In this kernel, the rows of a tile of logits belong to keys. The kernel computes dSᵀ and Pᵀ
    directly, so the products dSᵀ Q and Pᵀ dO need no transposition.
    """
    j = pl.program_id(0)
    example = pl.program_id(2)
    program = Program(tiling, refs, example)
    key_tile = tiling.key_tile(j)
    # `keys` contains an array [bk, r] for every term. The shape of `values` is [bk, e].
    keys, values = program.load_keys(key_tile)

    def add_queries(
        i: Scalar, totals: tuple[list[jax.Array], jax.Array]
    ) -> tuple[list[jax.Array], jax.Array]:
        """Adds the contribution of query tile i to the cotangents of the keys and values."""
        key_totals, value_total = totals
        tile = tiling.tile(i, j, transposed=True)
        queries = program.load_queries(tile.queries)
        residuals = _load_residuals(residual_refs, example, tile.queries)
        rows = TileRows(queries, keys, values)
        weights, dlogits = _backward_tile(program, tile, rows, residuals)  # [bk, bq]
        # dK = dSᵀ Q for every term.
        # The shape of dK is [bk, r].
        key_totals = [
            total + matmul(dlogits.astype(query_rows.dtype), query_rows)
            for total, query_rows in zip(key_totals, queries, strict=True)
        ]
        # dV = Pᵀ dO.
        # The shape of dV is [bk, e].
        dout = residuals.dout
        return key_totals, value_total + matmul(weights.astype(dout.dtype), dout)

    zeros = (
        [jnp.zeros(x.shape, jnp.float32) for x in keys],
        jnp.zeros(values.shape, jnp.float32),
    )
    first, last = tiling.seeing_queries(j)
    if refs.key_ends is not None:
        # If all keys of the tile are padding, `last` becomes 0, so the loop adds nothing.
        last *= jnp.clip(refs.key_ends[example] - j * key_tile.size, 0, 1)
    key_totals, value_total = lax.fori_loop(first, last, add_queries, zeros)

    for result, total in zip((*dkeys, dvalues), (*key_totals, value_total), strict=True):
        store_rows(result, example, key_tile, total)


def call_by_bias(
    tiling: Tiling, operands: Operands, residuals: Residuals, *, interpret: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Runs the kernel of the bias, and returns the cotangents of the table and the diagonals.

    The cotangent of the table has the shape ``[h, q, k]``, and the cotangent of the diagonals has
    the shape ``[h, q + k - 1]``. The cotangent of the table is None if there is no table. The
    cotangent of the diagonals is None if there are no diagonals.
    """
    if not operands.has_bias:
        return None, None

    # The tiles must be square, so that the diagonals of logits run along diagonals of tiles.
    side = min(tiling.sizes.queries, tiling.sizes.keys)
    sizes = dataclasses.replace(tiling.sizes, queries=side, keys=side)
    tiling = dataclasses.replace(tiling, sizes=sizes)

    batch, _, heads, width = operands.values.shape
    work = _BiasWork(tiling.counts, by_diagonal=operands.table is None)

    # The examples are divided into parts, and each program adds up the examples of one part. With
    # more parts, more programs run in parallel, but more sums must be written and added up
    # afterwards.
    programs = BIAS_PROGRAMS * (4 if work.by_diagonal else 1)  # long diagonals take more time
    wanted = min(programs // (work.num_sums * heads), batch // MIN_BIAS_EXAMPLES)
    parts = _largest_divisor(batch, wanted)

    shape = jax.ShapeDtypeStruct((parts, work.num_sums, heads, side, side), jnp.float32)
    (sums,) = tiling.call(
        functools.partial(_bias_kernel, tiling, work, batch // parts),
        _inputs(operands, residuals),
        LabeledArrays((shape,), ("..h..",)),
        grid=(work.num_sums, heads, parts),
        multiply_adds=operands.rank + width,
        interpret=interpret,
    )
    sums = sums.sum(axis=0)  # [n, h, side, side]

    q_length, k_length = tiling.lengths
    q_count, k_count = tiling.counts
    if work.by_diagonal:
        return None, _sum_diagonals(sums, q_count * side, q_length, k_length)

    # `sums` contains one square tile of the table for each pair (i, j). The tiles are joined, which
    # turns [i · j, h, side, side] into [h, q, k].
    table = sums.reshape(q_count, k_count, heads, side, side).transpose(2, 0, 3, 1, 4)
    table = table.reshape(heads, q_count * side, k_count * side)[:, :q_length, :k_length]
    if operands.diagonals is None:
        return table, None
    transpose = jax.linear_transpose(lambda x: expand_diagonals(x, q_length), operands.diagonals)
    return table, transpose(table)[0]


@dataclasses.dataclass(frozen=True)
class _BiasWork:
    """Assigns tiles of logits to the programs of the bias kernel.

    Attributes:
      counts: the number of tiles of queries and the number of tiles of keys.
      by_diagonal: whether a program adds up all tiles on a diagonal of tiles, for several examples.
        `by_diagonal` can be true only if the bias has no table. If `by_diagonal` is false, a
        program adds up a single tile for several examples.
    """

    counts: tuple[int, int]
    by_diagonal: bool

    @property
    def num_sums(self) -> int:
        """The number of sums.

        There is one sum for each diagonal of tiles if `by_diagonal` is true, and otherwise one sum
        for each tile.
        """
        q_count, k_count = self.counts
        return q_count + k_count - 1 if self.by_diagonal else q_count * k_count

    def first_tile(self, number: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Returns the indices i and j of a sum's first tile, and the number of tiles per example.

        A sum along a diagonal adds up several tiles of each example. Diagonal 0 contains only the
        tile of the last queries and the first keys. From one tile of a diagonal to the next, both i
        and j increase by 1.
        """
        q_count, k_count = self.counts
        if not self.by_diagonal:
            return lax.div(number, jnp.int32(k_count)), lax.rem(number, jnp.int32(k_count)), 1
        # Diagonals below the main diagonal begin at the left edge of the logits. Other diagonals
        # begin at the top edge.
        below_corner = q_count - 1 - number
        right_of_corner = number - (q_count - 1)
        i = jnp.maximum(below_corner, 0)
        j = jnp.maximum(right_of_corner, 0)
        return i, j, jnp.minimum(q_count - i, k_count - j)


def _bias_kernel(
    tiling: Tiling,
    work: _BiasWork,
    num_examples: int,
    refs: Operands,
    residual_refs: Residuals,
    result: Ref,
) -> None:
    """Adds up dS over the tiles of one sum, for one part of the examples.

    The axes of `result` are ``[part, number of the sum, side, side]``.
    """
    number = pl.program_id(0)
    part = pl.program_id(2)
    first_i, first_j, num_tiles = work.first_tile(number)
    # All tiles on a diagonal have the same distances ``key - query``, so they have the same bias.
    bias = bias_tile(refs, tiling.tile(first_i, first_j))

    def add_tile(t: Scalar, total: jax.Array) -> jax.Array:
        """Adds dS of tile number t to the total.

        Tiles are numbered along the diagonal, first for the first example, and then for the next.
        """
        example: Scalar = t
        step: Scalar = 0
        if work.by_diagonal:
            example = lax.div(t, num_tiles)
            step = lax.rem(t, num_tiles)
        example = part * num_examples + example
        program = Program(tiling, refs, example)
        tile = tiling.tile(first_i + step, first_j + step)
        queries = program.load_queries(tile.queries)
        keys, values = program.load_keys(tile.keys)
        residuals = _load_residuals(residual_refs, example, tile.queries)
        rows = TileRows(queries, keys, values)
        _, dlogits = _backward_tile(program, tile, rows, residuals, bias)
        return total + dlogits

    zeros = jnp.zeros((tiling.sizes.queries, tiling.sizes.keys), jnp.float32)
    result[part, number] = lax.fori_loop(0, num_examples * num_tiles, add_tile, zeros)


def _sum_diagonals(sums: jax.Array, rows: int, q_length: int, k_length: int) -> jax.Array:
    """Returns the sum along each diagonal of the logits, ``[h, q + k - 1]``.

    Args:
      sums: the sum of the square tiles on each diagonal of tiles, ``[n, h, s, s]``.
      rows: the number of queries, rounded up to whole tiles.
      q_length: the number of queries.
      k_length: the number of keys.
    """
    count, heads, side, _ = sums.shape

    # The transpose of `expand_diagonals` sums along the diagonals of each square, from shape
    # [n, h, s, s] to shape [n, h, 2 s - 1].
    like, _ = match_varying_axes(jnp.zeros((count, heads, 2 * side - 1), sums.dtype), sums)
    (diagonals,) = jax.linear_transpose(lambda x: expand_diagonals(x, side), like)(sums)

    # Neighboring squares lie s diagonals apart, and each square covers 2 s - 1 diagonals. The first
    # s - 1 diagonals of a square are therefore also the last s - 1 diagonals of the previous
    # square.
    total = jnp.zeros((heads, (count + 1) * side), sums.dtype)
    low = diagonals[..., :side]
    high = jnp.pad(diagonals[..., side:], ((0, 0), (0, 0), (0, 1)))
    low = low.transpose(1, 0, 2).reshape(heads, -1)  # [h, n s]
    high = high.transpose(1, 0, 2).reshape(heads, -1)
    total = total.at[:, : count * side].add(low).at[:, side:].add(high)

    # Entry 0 of the total belongs to the distance key - query = 1 - rows.
    return total[:, rows - q_length : rows + k_length - 1]


def _largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of `number` that is at most `limit`, and at least 1."""
    return max(n for n in range(1, max(limit, 1) + 1) if number % n == 0)


def _load_residuals(refs: Residuals, example: Scalar, tile: RowTile) -> Residuals:
    """Returns the residuals of a tile of queries.

    The cotangent of the output has the shape ``[bq, e]``, and the other residuals are vectors
    ``[bq]``.
    """
    loaded = Residuals(
        dout=load_rows(refs.dout, example, tile),
        row_max=load_vector(refs.row_max, example, tile),
        inverse_row_sum=load_vector(refs.inverse_row_sum, example, tile),
        delta=load_vector(refs.delta, example, tile),
    )
    # The maximum is set to ∞ in the rows of padding queries, and in rows beyond the last query. The
    # weights of such a row are then exp(-∞) = 0, even if the bias is large. With a maximum of 0,
    # the exponential of a large bias would overflow to ∞, and ∞ times an inverse sum of 0 would be
    # NaN.
    row_max = jnp.where(loaded.inverse_row_sum > 0.0, loaded.row_max, jnp.inf)
    return loaded._replace(row_max=row_max)


def _backward_tile(
    program: Program,
    tile: Tile,
    rows: TileRows,
    residuals: Residuals,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights P and the cotangents dS of a tile's logits, in the tile's shape.

    Args:
      program: the program that computes the tile.
      tile: the position of the tile, and whether its rows are keys.
      rows: the queries, keys and values of the tile.
      residuals: the residuals of the tile's queries, from `_load_residuals`.
      bias: the result of `bias_tile`, or None if it has not been computed yet.
    """

    def per_query(x: jax.Array) -> jax.Array:
        """Reshapes a vector ``[bq]`` to lie along the tile's axis of queries."""
        return put_on_axis(x, tile.query_axis)

    logits, allowed = logits_tile(program, tile, rows.queries, rows.keys, bias)
    # The weights are P = exp(S - max) / Σ exp(S - max).
    weights = exp(forbid(logits, allowed) - per_query(residuals.row_max))
    weights *= per_query(residuals.inverse_row_sum)

    # dP = dO Vᵀ. If the tile is transposed, dPᵀ = V dOᵀ is computed instead.
    if tile.transposed:
        dweights = matmul_nt(rows.values, residuals.dout)
    else:
        dweights = matmul_nt(residuals.dout, rows.values)
    # The cotangent of the logits is dS = P ∘ (dP - delta).
    dlogits = weights * (dweights - per_query(residuals.delta))

    soft_cap = program.tiling.soft_cap
    if soft_cap is not None:
        # With a soft cap c, the logits are c · tanh(x / c), whose derivative is 1 - tanh²(x / c).
        dlogits *= 1.0 - (logits / soft_cap) ** 2
    return weights, dlogits
