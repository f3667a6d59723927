"""The fused route on TPUs: Pallas kernels.

A program holds the logits of a block of queries and all keys in vector memory. Examples are the
innermost axis of the grid, so that a stripe of the bias is read once for all of them, and its gradient,
like that of parameters that act as queries or keys, is summed over the batch in the place where it
stays.

The backward pass is a kernel over blocks of queries, which also makes the keys' and values' cotangents
where one block holds all queries; otherwise a second kernel goes over blocks of keys, its tiles transposed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.terms import Outer, logits_dtype
from synthesizer_jax.attention.tiles_tpu import (
    LOW,
    SUBLANES,
    Bias,
    Operands,
    Ref,
    bias_spec,
    block_size,
    call_kernel,
    factor_one_hot,
    fill_bias_tile,
    heads_first,
    logits_tile,
    mask_weights,
    matmul,
    multiply_adds_per_logit,
    operand_specs,
    operands,
    prepare_bias,
    product_specs,
    row_spec,
    spec,
    transpose_bias,
)
from synthesizer_jax.typing import PyTree


def obstacle(inputs: FusedInputs) -> str | None:
    """Returns why the kernels cannot take such inputs; None: they can."""
    products, biases, values, mask, positions = inputs
    if not isinstance(mask.query_offset, int):
        return "Mask.query_offset is not known when the function is traced"
    if mask.allowed is not None or mask.prefix_lengths is not None:
        return "Mask.allowed and Mask.prefix_lengths are not read by the kernels"
    if positions is not None or (mask.counts_in_segments and mask.has_band):
        return "positions inside packed segments are not looked up by the kernels"
    if logits_dtype(values, *jax.tree.leaves((products, biases))) != jnp.float32:
        return "the kernels have no 64-bit numbers"
    return None


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("interpret",))
def forward(
    q_length: int, query_offset: int, inputs: FusedInputs, *, interpret: bool = False
) -> tuple[jax.Array, SoftmaxStats]:
    """The attention output ``[b, q, h, e]`` and what `backward` needs.

    Args:
      q_length: number of queries.
      query_offset: the mask's, which has to be known.
      inputs: see `supported`.
      interpret: run on any device, slowly.
    """
    batch, k_length, heads, e = inputs.values.shape
    blocks, bias = operands(inputs), prepare_bias(inputs.biases)
    size = block_size(q_length, k_length)
    make_tile = functools.partial(
        logits_tile, mask=inputs.mask, offset=query_offset, size=size, length=k_length
    )

    def kernel(
        blocks: Operands,
        bias: Bias,
        out: Ref,
        row_max: Ref,
        inverse_row_sum: Ref,
        bias_tile: Ref = None,
    ) -> None:
        fill_bias_tile(bias_tile, bias, q_length)
        logits, allowed = make_tile(blocks, bias_tile)
        if allowed is not None:
            logits = jnp.where(allowed, logits, LOW)
        largest = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), LOW)
        # P = exp(S - max) is not normalized; O = P V / Σ P.
        weights = mask_weights(allowed, jnp.exp(logits - largest)).astype(blocks.values.dtype)
        row_sum = jnp.sum(weights.astype(jnp.float32), axis=1, keepdims=True)
        has_keys = row_sum > 0.0
        inverse = jnp.where(has_keys, 1.0 / jnp.where(has_keys, row_sum, 1.0), 0.0)
        out[...] = (matmul(weights, blocks.values[...], axes=(1, 0)) * inverse).astype(out.dtype)
        row_max[...] = jnp.where(has_keys, largest, 0.0).T
        inverse_row_sum[...] = inverse.T

    row_shape = jax.ShapeDtypeStruct((batch, heads, 1, q_length), jnp.float32)
    out_shape = jax.ShapeDtypeStruct((batch, heads, q_length, e), inputs.values.dtype)
    out, row_max, inverse_row_sum = call_kernel(
        kernel,
        (blocks, bias),
        (out_shape, row_shape, row_shape),
        specs=(operand_specs(blocks, queries=size, keys=k_length), bias_spec(bias, size)),
        out_specs=(spec(out_shape, size), row_spec(row_shape, size), row_spec(row_shape, size)),
        grid=(heads, pl.cdiv(q_length, size), batch),
        work=multiply_adds_per_logit(blocks.products) + e,
        tile_shape=(size, k_length),
        interpret=interpret,
    )
    real = inputs.mask.queries(q_length)
    if real is not None:
        out = jnp.where(real[:, None, :, None], out, 0)
        inverse_row_sum = jnp.where(real[:, None, None], inverse_row_sum, 0.0)
    return heads_first(out), SoftmaxStats(
        *(x.transpose(0, 3, 1, 2) for x in (row_max, inverse_row_sum))
    )


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("interpret",))
def backward(
    query_offset: int,
    inputs: FusedInputs,
    rows: SoftmaxStats,
    delta: jax.Array,
    g: jax.Array,
    *,
    interpret: bool = False,
) -> FusedInputs:
    """The cotangents of the inputs.

    Args:
      query_offset: as in `forward`.
      inputs: what `forward` was given.
      rows: what it returned.
      delta: `parts.softmax_vjp_delta` of its output and `g`.
      g: the cotangent of its output.
      interpret: as in `forward`.
    """
    q_length, k_length = g.shape[1], inputs.values.shape[1]
    bias, back_bias = jax.vjp(prepare_bias, inputs.biases)
    row_max, inverse_row_sum, delta = (x.transpose(0, 2, 3, 1) for x in (*rows, delta))
    blocks = BackwardOperands(operands(inputs), heads_first(g), row_max, inverse_row_sum, delta)
    size = block_size(q_length, k_length)
    options: Any = {"mask": inputs.mask, "offset": query_offset, "interpret": interpret}
    results, dbias = _query_cotangents(
        blocks, bias, size, has_all_queries=size == q_length, **options
    )
    if size < q_length:
        by_keys = _key_cotangents(
            blocks,
            transpose_bias(bias, q_length + k_length),
            block_size(k_length, q_length),
            **options,
        )
        results = _Cotangents(_merge_keys(results.products, by_keys.products), by_keys.values)
    results = jax.tree.map(heads_first, results)
    products = jax.tree.map(lambda d, x: d.astype(x.dtype), results.products, inputs.products)
    (biases,) = back_bias(dbias)
    return inputs.cotangents(products, biases, results.values.astype(inputs.values.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Cotangents:
    """The cotangents of operands that share the batch's rows; None for what a kernel leaves out.

    Attributes:
      products: those of `Operands.products`.
      values: ``[b, h, k, e]``.
    """

    products: Products
    values: Ref


def _merge_keys(products: Products, by_keys: Products) -> Products:
    """Returns the cotangents of queries and factors with those of the keys."""
    low_rank = tuple(
        dataclasses.replace(term, keys=other.keys)
        for term, other in zip(products.low_rank, by_keys.low_rank, strict=True)
    )
    return products._replace(low_rank=low_rank)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackwardOperands:
    """What the backward kernels read beside the bias.

    Attributes:
      operands: the forward's.
      g: the cotangent of the output, ``[b, h, q, e]``.
      row_max: of `SoftmaxStats`, ``[b, h, 1, q]`` float32.
      inverse_row_sum: likewise.
      delta: `parts.softmax_vjp_delta` likewise.
    """

    operands: Operands
    g: Ref
    row_max: Ref
    inverse_row_sum: Ref
    delta: Ref


def _query_cotangents(
    blocks: BackwardOperands,
    bias: Bias,
    size: int,
    *,
    has_all_queries: bool,
    mask: Mask,
    offset: int,
    interpret: bool,
) -> tuple[_Cotangents, Bias]:
    """Returns the cotangents of queries, factors and bias; with all queries also of keys and values."""
    forward_blocks = blocks.operands
    batch, heads, k_length, e = forward_blocks.values.shape
    q_length = blocks.g.shape[2]
    primals = _Cotangents(forward_blocks.products, forward_blocks.values)
    if not has_all_queries:
        primals = _Cotangents(_without_keys(forward_blocks.products), None)
    shared = jax.tree.map(_is_shared, primals)
    make_tile = functools.partial(logits_tile, mask=mask, offset=offset, size=size, length=k_length)

    kernel = functools.partial(
        _query_cotangents_kernel,
        make_tile=make_tile,
        shared=shared,
        has_all_queries=has_all_queries,
        q_length=q_length,
        batch=batch,
    )
    work = multiply_adds_per_logit(forward_blocks.products)
    return call_kernel(
        kernel,
        (blocks, bias),
        (jax.tree.map(_cotangent_shape, primals), _shapes_of(bias)),
        specs=(_cotangent_specs(blocks, queries=size, keys=k_length), bias_spec(bias, size)),
        out_specs=(_result_specs(primals, queries=size, keys=k_length), bias_spec(bias, size)),
        grid=(heads, pl.cdiv(q_length, size), batch),
        work=3 * work + 2 * e if has_all_queries else 2 * work + e,
        tile_shape=(size, k_length),
        scratch=() if bias.columns is None else (size + -size % SUBLANES, bias.columns.shape[2]),
        interpret=interpret,
    )


def _query_cotangents_kernel(
    blocks: BackwardOperands,
    bias: Bias,
    results: _Cotangents,
    dbias: Bias,
    bias_tile: Ref = None,
    dlogits_sum: Ref = None,
    *,
    make_tile: Callable[[Operands, Ref], tuple[jax.Array, jax.Array | None]],
    shared: PyTree,
    has_all_queries: bool,
    q_length: int,
    batch: int,
) -> None:
    """Computes the cotangents of a block of queries of one head and example."""
    forward_blocks, g = blocks.operands, blocks.g[...]
    fill_bias_tile(bias_tile, bias, q_length)
    logits, allowed = make_tile(forward_blocks, bias_tile)
    weights = (
        mask_weights(allowed, jnp.exp(logits - blocks.row_max[...].T))
        * blocks.inverse_row_sum[...].T
    )
    dlogits = weights * (matmul(g, forward_blocks.values[...], axes=(1, 1)) - blocks.delta[...].T)
    _write_product_cotangents(
        forward_blocks.products,
        results.products,
        dlogits,
        shared=shared.products,
        of_keys=has_all_queries,
    )
    if has_all_queries:
        dvalues = matmul(weights.astype(g.dtype), g, axes=(0, 0))  # dV = Pᵀ dO
        _write_result(results.values, dvalues, shared=shared.values)
    if dbias.table is not None:
        _write_result(dbias.table, dlogits, shared=True)
    if dbias.columns is not None:
        _accumulate_diagonals(dbias.columns, dlogits_sum, dlogits, q_length=q_length, batch=batch)


def _without_keys(products: Products) -> Products:
    """Returns products whose `LowRank` terms have None for their keys."""
    absent: Any = None
    low_rank = tuple(dataclasses.replace(term, keys=absent) for term in products.low_rank)
    return products._replace(low_rank=low_rank)


def _write_product_cotangents(
    products: Products, results: Products, dlogits: jax.Array, *, shared: PyTree, of_keys: bool
) -> None:
    """Writes the cotangents of the factors; those of `LowRank` keys if `of_keys`.

    Args:
      products: the factors of one head and example.
      results: where the cotangents go.
      dlogits: ``[q, k]``, of all queries if `of_keys`.
      shared: which factors the examples share, a tree of bools like `products`.
      of_keys: whether to write the cotangents of the keys.
    """
    for term, out, is_shared in zip(
        products.low_rank, results.low_rank, shared.low_rank, strict=True
    ):
        keys, queries = term.keys[...], term.queries[...]
        dqueries = matmul(dlogits.astype(keys.dtype), keys, axes=(1, 0))  # dQ = dS K
        _write_result(out.queries, dqueries, shared=is_shared.queries)
        if of_keys:
            dkeys = matmul(dlogits.astype(queries.dtype), queries, axes=(0, 0))  # dK = dSᵀ Q
            _write_result(out.keys, dkeys, shared=is_shared.keys)
    for outer, douter, is_shared in zip(products.outer, results.outer, shared.outer, strict=True):
        da, db = _outer_vjp(outer, dlogits, dlogits.shape[1])
        _write_result(douter.a, da, shared=is_shared.a)
        _write_result(douter.b, db, shared=is_shared.b)


def _key_cotangents(
    blocks: BackwardOperands,
    bias: Bias,
    size: int,
    *,
    mask: Mask,
    offset: int,
    interpret: bool,
) -> _Cotangents:
    """Returns the cotangents of keys and values, from tiles ``[keys of a block, queries]``."""
    forward_blocks = blocks.operands
    batch, heads, k_length, e = forward_blocks.values.shape
    q_length = blocks.g.shape[2]
    absent: Any = None
    keys_only = tuple(
        dataclasses.replace(t, queries=absent) for t in forward_blocks.products.low_rank
    )
    primals = _Cotangents(Products(low_rank=keys_only), forward_blocks.values)
    shared = jax.tree.map(_is_shared, primals)
    make_tile = functools.partial(
        logits_tile, mask=mask, offset=offset, size=size, length=q_length, transposed=True
    )

    def kernel(
        blocks: BackwardOperands, bias: Bias, results: _Cotangents, bias_tile: Ref = None
    ) -> None:
        forward_blocks, g = blocks.operands, blocks.g[...]
        products = forward_blocks.products
        fill_bias_tile(bias_tile, bias, k_length, transposed=True)
        logits, allowed = make_tile(forward_blocks, bias_tile)
        weights = (
            mask_weights(allowed, jnp.exp(logits - blocks.row_max[...]))
            * blocks.inverse_row_sum[...]
        )
        dlogits = weights * (matmul(forward_blocks.values[...], g, axes=(1, 1)) - blocks.delta[...])
        for term, out, is_shared in zip(
            products.low_rank,
            results.products.low_rank,
            shared.products.low_rank,
            strict=True,
        ):
            queries = term.queries[...]
            dkeys = matmul(dlogits.astype(queries.dtype), queries, axes=(1, 0))  # dK = dSᵀ Q
            _write_result(out.keys, dkeys, shared=is_shared.keys)
        dvalues = matmul(weights.astype(g.dtype), g, axes=(1, 0))  # dV = Pᵀ dO
        _write_result(results.values, dvalues, shared=shared.values)

    return call_kernel(
        kernel,
        (blocks, bias),
        jax.tree.map(_cotangent_shape, primals),
        specs=(
            _cotangent_specs(blocks, queries=q_length, keys=size),
            bias_spec(bias, size, transposed=True),
        ),
        out_specs=_result_specs(primals, queries=q_length, keys=size),
        grid=(heads, pl.cdiv(k_length, size), batch),
        work=2 * multiply_adds_per_logit(forward_blocks.products) + 2 * e,
        tile_shape=(size, q_length),
        interpret=interpret,
    )


def _accumulate_diagonals(
    total: Ref, dlogits_sum: Ref, dlogits: jax.Array, *, q_length: int, batch: int
) -> None:
    """Adds a tile's sums along its diagonals, those of all examples together.

    Args:
      total: the cotangent of `Bias.columns`, ``[1, w]``, which all blocks of queries share.
      dlogits_sum: memory for the sum over the examples, ``[size, w]`` with rows up to a multiple of 8.
      dlogits: ``[size, k]``.
      q_length: number of queries.
      batch: number of examples.
    """
    size, length = dlogits.shape
    count = total.shape[-1]
    block, example = pl.program_id(1), pl.program_id(2)

    @pl.when(example == 0)
    def _() -> None:
        dlogits_sum[...] = jnp.zeros_like(dlogits_sum)

    dlogits_sum[:size, :length] += dlogits

    @pl.when(example == batch - 1)
    def _() -> None:
        # `roll_diagonals` the other way round: all eights of rows onto one, and its rows onto another.
        row = lax.broadcasted_iota(jnp.int32, (SUBLANES, count), 0)
        lines = jnp.zeros((SUBLANES, count), jnp.float32)
        for begin in range(0, size, SUBLANES):
            first = block * size + begin
            forward_blocks = jnp.where(
                row + first < q_length, dlogits_sum[begin : begin + SUBLANES], 0.0
            )
            lines += pltpu.roll(
                forward_blocks, lax.rem(count + q_length - 1 - first, jnp.int32(count)), 1
            )
        for bit in (1, 2, 4):
            lines = jnp.where(row & bit != 0, pltpu.roll(lines, jnp.int32(count - bit), 1), lines)
        sums = lines.sum(axis=0, keepdims=True)

        @pl.when(block == 0)
        def _() -> None:
            total[...] = sums

        @pl.when(block > 0)
        def _() -> None:
            total[...] += sums


def _outer_vjp(term: Outer, dlogits: jax.Array, k_length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of an `Outer` term's factors, ``da = (dS ∘ b Eᵦᵀ) Eₐ`` and the twin.

    Args:
      term: its factors, ``a Eₐᵀ ∘ b Eᵦᵀ`` are the logits; E tell by ones which number a key has.
      dlogits: dS, ``[q, k]``.
      k_length: number of keys.
    """
    a_keys, b_keys = (factor_one_hot(term, name, 0, count=k_length) for name in ("a", "b"))
    a = matmul(term.a[...], a_keys, axes=(1, 1), exact=True)
    b = matmul(term.b[...], b_keys, axes=(1, 1), exact=True)
    da = matmul((dlogits * b).astype(a_keys.dtype), a_keys, axes=(1, 0), exact=True)
    return da, matmul((dlogits * a).astype(b_keys.dtype), b_keys, axes=(1, 0), exact=True)


def _is_shared(x: Ref) -> bool:
    """Whether all examples share an operand ``[b or 1, h, n, r]``."""
    return x.shape[0] == 1


def _result_specs(results: _Cotangents, *, queries: int, keys: int) -> _Cotangents:
    """Returns blocks of so many queries and keys of the cotangents that a kernel writes."""
    values = None if results.values is None else spec(results.values, keys)
    return _Cotangents(product_specs(results.products, queries=queries, keys=keys), values)


def _write_result(ref: Ref, value: jax.Array, *, shared: bool = False) -> None:
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


def _cotangent_shape(x: Ref) -> jax.ShapeDtypeStruct:
    """What a kernel returns for an operand: float32 where it is a sum over the batch."""
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if x.shape[0] == 1 else x.dtype)


def _cotangent_specs(blocks: BackwardOperands, *, queries: int, keys: int) -> BackwardOperands:
    """The same for the backward kernels."""
    forward_blocks = operand_specs(blocks.operands, queries=queries, keys=keys)
    return BackwardOperands(
        forward_blocks, spec(blocks.g, queries), *(row_spec(blocks.row_max, queries),) * 3
    )


def _shapes_of(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
