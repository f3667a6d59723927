"""The fused route on TPUs: Pallas kernels.

A program holds the logits of a block of queries and all keys in vector memory. Examples are the innermost
axis of the grid, so that a stripe of the bias is read once for all of them. Its gradient is summed over
the batch in place, like that of parameters that act as queries or keys.

The backward pass is a kernel over blocks of queries. Where one block holds all queries, it also makes the
cotangents of keys and values. Otherwise the kernel runs over blocks of keys too, its tiles transposed.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention import tpu
from synthesizer_jax.attention.fused import FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import Outer, cap_logits, map_arrays
from synthesizer_jax.attention.tpu import (
    BIAS_AXES,
    LANES,
    LOW,
    Bias,
    Blocks,
    Ref,
    call_kernel,
    matmul,
    prepare_bias,
    roll_diagonals,
    sum_diagonals,
)
from synthesizer_jax.base.typing import PyTree

TILE = 256 * 1024
"""Most logits of a program: 1 MiB in float32, of which about six live at once in 16 MiB."""


def obstacle(inputs: FusedInputs) -> str | None:
    """Returns why the kernels cannot take such inputs; None: they can."""
    mask = inputs.mask
    if mask.allowed is not None and mask.allowed.shape[1] > 1:
        return "the kernels do not read a Mask.allowed that heads do not share"
    if inputs.positions is not None or (mask.counts_in_segments and mask.has_band):
        return "positions inside packed segments are not looked up by the kernels"
    return tpu.obstacle(inputs)


def block_size(rows: int, columns: int) -> int:
    """Returns the rows of a tile: all, or a multiple of `LANES`, so that it is not much above `TILE`."""
    columns = max(columns, LANES)  # a row fills whole registers
    if rows * columns <= TILE:
        return rows
    return min(rows, max(LANES, TILE // columns // LANES * LANES))


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How the logits are cut into tiles ``[size, columns]``, and what all programs know.

    Attributes:
      mask: of which the band is read; the rest is in `_Operands`.
      offset: position of the first query.
      rows: number of queries, or of keys if `transposed`.
      columns: number of keys, or of queries if `transposed`.
      soft_cap: as in `attend`.
      transposed: the rows of a tile are keys.
    """

    mask: Mask
    offset: int
    rows: int
    columns: int
    soft_cap: float | None
    transposed: bool = False

    @property
    def size(self) -> int:
        """Rows of a tile."""
        return block_size(self.rows, self.columns)

    @property
    def blocks(self) -> Blocks:
        """Blocks of one head ``h``, one example ``b``, and a tile's queries ``q`` or keys ``k``."""
        row_axis = "k" if self.transposed else "q"
        return Blocks({"b": None, "h": None, row_axis: self.size}, ("h", row_axis, "b"))


class _Operands(NamedTuple):
    """What logits are made of, heads first; in a kernel, references to the blocks of a program.

    Attributes:
      products: terms of arrays ``[b or 1, h, n, r]``.
      values: ``[b, h, k, e]``.
      bias: what the examples share.
      real: ``[b, 1, k]`` int32, which keys are real; None: all.
      query_segments: ``[b, 1, q]`` int32, in packed rows.
      key_segments: ``[b, 1, k]`` int32.
      allowed: ``[b or 1, q, k]`` int8, `Mask.allowed`.
    """

    products: Products
    values: Ref
    bias: Bias
    real: Ref
    query_segments: Ref
    key_segments: Ref
    allowed: Ref

    def axes(self) -> _Operands:
        """Returns what the axes of the arrays are."""
        products = _product_axes(self.products)
        return _Operands(products, "bhk.", BIAS_AXES, "b.k", "b.q", "b.k", "bqk")

    def multiply_adds(self) -> int:
        """Returns the multiply-adds of a logit."""
        low_rank = sum(term.keys.shape[-1] for term in self.products.low_rank)
        return low_rank + sum(t.a.shape[-1] + t.b.shape[-1] for t in self.products.outer)

    def tile_scratch(self, tiles: _Tiles) -> list[Ref]:
        """Returns the memory of a program's bias, if there is any."""
        shape = tiles.size, tiles.columns
        return [pltpu.VMEM(shape, jnp.float32)] if jax.tree.leaves(self.bias) else []


def _operands(inputs: FusedInputs, bias: Bias) -> _Operands:
    """Returns the inputs in the kernels' layout."""
    products, _, values, mask, _ = inputs
    apart = mask.key_lengths is not None or mask.key_valid is not None
    real = mask.keys(values.shape[1]) if apart else None  # segments tell padding by themselves

    def line(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.astype(jnp.int32)[:, None]

    return _Operands(
        products=jax.tree.map(_heads_first, products),
        values=_heads_first(values),
        bias=bias,
        real=line(real),
        query_segments=line(mask.query_segments),
        key_segments=line(mask.key_segments),
        allowed=None if mask.allowed is None else mask.allowed[:, 0].astype(jnp.int8),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("interpret",))
def forward(
    q_length: int,
    query_offset: int,
    soft_cap: float | None,
    inputs: FusedInputs,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, SoftmaxStats]:
    """Returns the attention output ``[b, q, h, e]`` and what `backward` needs."""
    batch, k_length, heads, width = inputs.values.shape
    blocks = _operands(inputs.cleared(q_length), prepare_bias(inputs.biases))
    tiles = _Tiles(inputs.mask, query_offset, q_length, k_length, soft_cap)

    def kernel(
        blocks: _Operands, out: Ref, row_max: Ref, inverse_row_sum: Ref, bias_tile: Ref = None
    ) -> None:
        _fill_bias_tile(bias_tile, blocks.bias, tiles)
        logits, allowed = _logits_tile(blocks, bias_tile, tiles)
        if allowed is not None:
            logits = jnp.where(allowed, logits, LOW)
        largest = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), LOW)
        # P = exp(S - max) is not normalized; O = P V / Σ P.
        weights = _mask_weights(allowed, jnp.exp(logits - largest)).astype(blocks.values.dtype)
        row_sum = jnp.sum(weights.astype(jnp.float32), axis=1, keepdims=True)
        has_keys = row_sum > 0.0
        inverse = jnp.where(has_keys, 1.0 / jnp.where(has_keys, row_sum, 1.0), 0.0)
        out[...] = (matmul(weights, blocks.values[...], axes=(1, 0)) * inverse).astype(out.dtype)
        row_max[...] = jnp.where(has_keys, largest, 0.0).T
        inverse_row_sum[...] = inverse.T

    rows = jax.ShapeDtypeStruct((batch, heads, 1, q_length), jnp.float32)
    out_shape = jax.ShapeDtypeStruct((batch, heads, q_length, width), inputs.values.dtype)
    num_logits = batch * heads * q_length * k_length
    out, row_max, inverse_row_sum = call_kernel(
        kernel,
        (blocks,),
        (out_shape, rows, rows),
        blocks=tiles.blocks,
        axes=(blocks.axes(),),
        out_axes=("bhq.", "bh.q", "bh.q"),
        grid=(heads, pl.cdiv(q_length, tiles.size), batch),
        flops=2 * (blocks.multiply_adds() + width) * num_logits,
        exponentials=num_logits,
        scratch=blocks.tile_scratch(tiles),
        interpret=interpret,
    )
    real = inputs.mask.queries(q_length)
    if real is not None:
        out = jnp.where(real[:, None, :, None], out, 0)
        inverse_row_sum = jnp.where(real[:, None, None], inverse_row_sum, 0.0)
    return _heads_first(out), SoftmaxStats(*(x.transpose(0, 3, 1, 2) for x in (row_max, inverse_row_sum)))


class _Residuals(NamedTuple):
    """What the backward kernel reads beside the operands.

    Attributes:
      dout: the cotangent of the output, ``[b, h, q, e]``.
      row_max: of `SoftmaxStats`, ``[b, h, 1, q]`` float32.
      inverse_row_sum: likewise.
      delta: `softmax_vjp_delta` likewise.
    """

    dout: Ref
    row_max: Ref
    inverse_row_sum: Ref
    delta: Ref


class _Cotangents(NamedTuple):
    """The cotangents of operands; None for what a kernel leaves out.

    Attributes:
      products: those of `_Operands.products`.
      values: ``[b, h, k, e]``.
      bias: that of `_Operands.bias`.
    """

    products: Products
    values: Ref
    bias: Bias


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("interpret",))
def backward(
    query_offset: int,
    soft_cap: float | None,
    inputs: FusedInputs,
    stats: SoftmaxStats,
    delta: jax.Array,
    dout: jax.Array,
    *,
    interpret: bool = False,
) -> FusedInputs:
    """Returns the cotangents of the inputs of `forward`; `delta` is `softmax_vjp_delta`."""
    q_length, k_length = dout.shape[1], inputs.values.shape[1]
    bias, bias_vjp = jax.vjp(prepare_bias, inputs.biases)
    blocks = _operands(inputs.cleared(q_length), bias)
    residuals = _Residuals(_heads_first(dout), *(x.transpose(0, 2, 3, 1) for x in (*stats, delta)))
    tiles = _Tiles(inputs.mask, query_offset, q_length, k_length, soft_cap)
    primals = _Cotangents(_without(blocks.products, "keys"), None, bias)
    if tiles.size == q_length:
        primals = _Cotangents(blocks.products, blocks.values, bias)
    cotangents = _call_backward(blocks, residuals, primals, tiles, interpret=interpret)
    products, values = cotangents.products, cotangents.values
    if values is None:
        tiles = dataclasses.replace(tiles, rows=k_length, columns=q_length, transposed=True)
        blocks = blocks._replace(bias=_reverse_columns(bias, q_length + k_length - 1))
        keys = _without(blocks.products._replace(outer=()), "queries")
        of_keys = _Cotangents(keys, blocks.values, Bias())
        by_keys = _call_backward(blocks, residuals, of_keys, tiles, interpret=interpret)
        pairs = zip(products.low_rank, by_keys.products.low_rank, strict=True)
        products = products._replace(low_rank=tuple(dataclasses.replace(x, keys=y.keys) for x, y in pairs))
        values = by_keys.values
    cast = lambda d, x: _heads_first(d).astype(x.dtype)
    dproducts, dvalues = jax.tree.map(cast, (products, values), (inputs.products, inputs.values))
    (dbiases,) = bias_vjp(jax.tree.map(lambda d, x: d.astype(x.dtype), cotangents.bias, bias))
    return inputs.cotangents(dproducts, dbiases, dvalues)


def _without(products: Products, name: str) -> Products:
    """Returns products whose `LowRank` terms have None for their keys or queries."""
    changes: PyTree = {name: None}
    low_rank = tuple(dataclasses.replace(term, **changes) for term in products.low_rank)
    return products._replace(low_rank=low_rank)


def _reverse_columns(bias: Bias, length: int) -> Bias:
    """Returns the bias for tiles whose rows are keys: its `length` columns from last to first."""
    if bias.columns is None:
        return bias
    used, rest = bias.columns[..., :length], bias.columns[..., length:]
    return bias._replace(columns=jnp.concatenate([used[..., ::-1], rest], axis=-1))


def _call_backward(
    blocks: _Operands, residuals: _Residuals, primals: _Cotangents, tiles: _Tiles, *, interpret: bool
) -> _Cotangents:
    """Returns the cotangents of those operands that are given as `primals`."""
    batch, heads, _, width = blocks.values.shape
    diagonals = primals.bias.columns is not None
    tile = pltpu.VMEM((tiles.size, tiles.columns), jnp.float32)
    num_logits = batch * heads * tiles.rows * tiles.columns
    num_factors = 1 + sum(
        any(getattr(t, name) is not None for t in primals.products.low_rank) for name in ("queries", "keys")
    )
    work = num_factors * blocks.multiply_adds() + (1 + (primals.values is not None)) * width
    shared = jax.tree.map(lambda x: x.shape[0] == 1, primals)
    results: tuple[_Cotangents] = call_kernel(
        functools.partial(_backward_kernel, tiles=tiles, shared=shared, batch=batch),
        (blocks, residuals),
        (jax.tree.map(_cotangent_shape, primals),),
        blocks=tiles.blocks,
        axes=(blocks.axes(), _Residuals("bhq.", "bh.q", "bh.q", "bh.q")),
        out_axes=(_Cotangents(_product_axes(primals.products), "bhk.", BIAS_AXES),),
        grid=(heads, pl.cdiv(tiles.rows, tiles.size), batch),
        flops=2 * work * num_logits,
        exponentials=num_logits,
        scratch=blocks.tile_scratch(tiles) + [tile] * diagonals,
        interpret=interpret,
    )
    return results[0]


def _backward_kernel(
    blocks: _Operands,
    residuals: _Residuals,
    results: _Cotangents,
    bias_tile: Ref = None,
    dlogits_sum: Ref = None,
    *,
    tiles: _Tiles,
    shared: PyTree,
    batch: int,
) -> None:
    """Computes the cotangents of a tile of one head and example."""
    _fill_bias_tile(bias_tile, blocks.bias, tiles)
    logits, allowed = _logits_tile(blocks, bias_tile, tiles)
    row_max, inverse_row_sum, delta = (
        x[...] if tiles.transposed else x[...].T
        for x in (residuals.row_max, residuals.inverse_row_sum, residuals.delta)
    )
    weights = _mask_weights(allowed, jnp.exp(logits - row_max)) * inverse_row_sum
    dout, values = residuals.dout[...], blocks.values[...]
    pair = (values, dout) if tiles.transposed else (dout, values)
    dlogits = weights * (matmul(*pair, axes=(1, 1)) - delta)
    if tiles.soft_cap is not None:
        dlogits *= 1.0 - (logits / tiles.soft_cap) ** 2
    query_axis, key_axis = (1, 0) if tiles.transposed else (0, 1)
    terms = blocks.products.low_rank, results.products.low_rank, shared.products.low_rank
    for term, out, is_shared in zip(*terms, strict=True):
        for name, other, axis in (("queries", "keys", key_axis), ("keys", "queries", query_axis)):
            if getattr(out, name) is not None:  # dQ = dS K,  dK = dSᵀ Q
                factor = getattr(term, other)[...]
                d = matmul(dlogits.astype(factor.dtype), factor, axes=(axis, 0))
                _write_result(getattr(out, name), d, shared=getattr(is_shared, name))
    if results.products.outer:
        factors = blocks.products.outer, results.products.outer, shared.products.outer
        for outer, douter, is_shared_outer in zip(*factors, strict=True):
            da, db = _outer_vjp(outer, dlogits)
            _write_result(douter.a, da, shared=is_shared_outer.a)
            _write_result(douter.b, db, shared=is_shared_outer.b)
    if results.values is not None:
        dvalues = matmul(weights.astype(dout.dtype), dout, axes=(query_axis, 0))  # dV = Pᵀ dO
        _write_result(results.values, dvalues, shared=shared.values)
    if results.bias.table is not None:
        _write_result(results.bias.table, dlogits, shared=True)
    if results.bias.columns is not None:
        _add_diagonals(results.bias.columns, dlogits_sum, dlogits, tiles, batch=batch)


def _add_diagonals(total: Ref, dlogits_sum: Ref, dlogits: jax.Array, tiles: _Tiles, *, batch: int) -> None:
    """Adds the sums along a tile's diagonals, with the last example those of all examples together."""
    block, example = pl.program_id(1), pl.program_id(2)
    _write_result(dlogits_sum, dlogits, shared=True)

    @pl.when(example == batch - 1)
    def _() -> None:
        first = block * tiles.size
        sums = sum_diagonals(dlogits_sum, first, rows=tiles.rows, count=total.shape[-1])

        @pl.when(block == 0)
        def _() -> None:
            total[...] = sums

        @pl.when(block > 0)
        def _() -> None:
            total[...] += sums


def _outer_vjp(term: Outer, dlogits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of an `Outer` term's factors, ``da = (dS ∘ b Eᵦᵀ) Eₐ`` and the twin.

    The logits are ``a Eₐᵀ ∘ b Eᵦᵀ``; E tell by ones which number a key has.
    """
    k_length = dlogits.shape[1]
    a_keys, b_keys = (_factor_one_hot(term, name, 0, count=k_length) for name in ("a", "b"))
    a = matmul(term.a[...], a_keys, axes=(1, 1), exact=True)
    b = matmul(term.b[...], b_keys, axes=(1, 1), exact=True)
    da = matmul((dlogits * b).astype(a_keys.dtype), a_keys, axes=(1, 0), exact=True)
    return da, matmul((dlogits * a).astype(b_keys.dtype), b_keys, axes=(1, 0), exact=True)


def _write_result(ref: Ref, value: jax.Array, *, shared: bool) -> None:
    """Writes a result; one that all examples share stays in place while they go by, and grows."""
    value = value.astype(ref.dtype)
    if not shared:
        ref[...] = value
        return

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        ref[...] = value

    @pl.when(pl.program_id(2) > 0)
    def _() -> None:
        ref[...] += value


def _fill_bias_tile(tile: Ref, bias: Bias, tiles: _Tiles) -> None:
    """Makes a program's bias ``[size, columns]``, once for all examples."""
    if tile is None:
        return
    block, example = pl.program_id(1), pl.program_id(2)

    @pl.when(example == 0)
    def _() -> None:
        if bias.columns is not None:
            roll_diagonals(tile, bias.columns[...], block * tile.shape[0], rows=tiles.rows)
        if bias.table is not None:
            table = bias.table[...].astype(jnp.float32)
            table = table.T if tiles.transposed else table
            tile[...] = table if bias.columns is None else tile[...] + table


def _mask_weights(allowed: jax.Array | None, weights: jax.Array) -> jax.Array:
    """Returns the weights, zero where the mask forbids."""
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def _logits_tile(blocks: _Operands, bias: Ref, tiles: _Tiles) -> tuple[jax.Array, jax.Array | None]:
    """Returns a program's logits, and which of them the mask allows (None: all)."""
    shape, transposed, block = (tiles.size, tiles.columns), tiles.transposed, pl.program_id(1)

    def product(queries: jax.Array, keys: jax.Array, *, exact: bool = False) -> jax.Array:
        pair = (keys, queries) if transposed else (queries, keys)
        return matmul(*pair, axes=(1, 1), exact=exact)

    parts = [] if bias is None else [bias[...]]
    parts += [product(t.queries[...], t.keys[...]) for t in blocks.products.low_rank]
    for outer in blocks.products.outer:
        first, count = (block * tiles.size, tiles.size) if transposed else (0, tiles.columns)
        one_hot = functools.partial(_factor_one_hot, outer, first=first, count=count)
        a, b = (product(x[...], one_hot(name), exact=True) for name, x in (("a", outer.a), ("b", outer.b)))
        parts.append(a * b)
    logits = functools.reduce(operator.add, parts) if parts else jnp.zeros(shape, jnp.float32)
    logits = cap_logits(logits, tiles.soft_cap)

    row = lax.broadcasted_iota(jnp.int32, shape, 0) + block * tiles.size
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    query, key = (column, row) if transposed else (row, column)
    rules = tiles.mask.band_rules(query + tiles.offset, key)
    if blocks.real is not None:
        rules.append((blocks.real[...].T if transposed else blocks.real[...]) != 0)
    if blocks.query_segments is not None:
        ids = blocks.query_segments[...], blocks.key_segments[...]
        rules.append((ids[0] == ids[1].T) if transposed else (ids[1] == ids[0].T))
    if blocks.allowed is not None:
        pairs = blocks.allowed[...].astype(jnp.int32)
        rules.append((pairs.T if transposed else pairs) != 0)
    if not rules:
        return logits, None
    return logits, jnp.broadcast_to(functools.reduce(operator.and_, rules), shape)


def _factor_one_hot(term: Outer, name: str, first: int | jax.Array, *, count: int) -> jax.Array:
    """Returns which number of a factor each key has, as ones and zeros ``[count, A or B]``."""
    x, size = getattr(term, name), term.b.shape[-1]
    shape = (count, x.shape[-1])
    key = lax.broadcasted_iota(jnp.int32, shape, 0) + first
    divide = lax.div if name == "a" else lax.rem
    index = divide(key, jnp.int32(size))
    return (index == lax.broadcasted_iota(jnp.int32, shape, 1)).astype(x.dtype)


def _product_axes(products: Products) -> Products:
    """Returns the axes of every array that is not None."""
    axes: Products = map_arrays(lambda a: f"bh{a.axes[1]}.", products)
    return axes


def _cotangent_shape(x: Ref) -> jax.ShapeDtypeStruct:
    """What a kernel returns for an operand: float32 where it is a sum over the batch."""
    is_sum = x.shape[0] == 1 or x.ndim < 4
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if is_sum else x.dtype)


def _heads_first(x: jax.Array) -> jax.Array:
    """Transposes ``[b, n, h, r]`` to ``[b, h, n, r]``, and back."""
    return x.swapaxes(1, 2)
