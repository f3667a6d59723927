"""The Pallas kernels of the fused route for TPUs.

The kernels compute ``O = softmax(S) V`` and its gradients without an array of all logits S. A
program holds one tile of logits in vector memory. The tile contains the logits of some queries and
all keys, for one head and one example. Keeping all keys in one tile has three consequences:

* A program computes the complete softmax of a row, without a loop over keys and without a running
  maximum.
* The innermost axis of the grid is the axis of examples. Arrays that the examples share therefore
  stay in vector memory. A tile of the bias is computed only once, and the cotangents of shared
  arrays are summed in place, one example after another.
* A program also computes the complete dQ of its queries, because dQ is a sum over keys. Both dK and
  dV are sums over queries. If one tile contains all queries, the same kernel computes dK and dV.
  Otherwise a second kernel computes dK and dV, with transposed tiles that contain some keys and all
  queries.

`fused_tpu_geometry` defines how arrays are cut into tiles, and `fused_tpu_logits` computes the
logits of a tile. `tpu` contains functions that the static route also uses. The comments write S for
the logits, P for the weights, Q, K and V for the rows of queries, keys and values, and O for the
outputs. Shapes in comments refer to a tile that is not transposed. In shapes such as ``[q, k]``, q
is the number of queries in the tile, and k is the number of all keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from synthesizer_jax.attention import tpu
from synthesizer_jax.attention.fused_arrays import FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.fused_tpu_geometry import (
    Operands,
    Scratch,
    Tiling,
    heads_first,
    make_operands,
    product_axes,
    without_keys,
    without_queries,
)
from synthesizer_jax.attention.fused_tpu_logits import (
    clear_forbidden,
    fill_bias_tile,
    logits_tile,
    outer_vjp,
)
from synthesizer_jax.attention.kernel_arrays import LabeledArrays
from synthesizer_jax.attention.tpu import (
    BIAS_AXES,
    LOW,
    Bias,
    Ref,
    call_kernel,
    matmul,
    prepare_bias,
    sum_diagonals,
)
from synthesizer_jax.base.typing import PyTree


def obstacle(inputs: FusedInputs) -> str | None:
    """Explains why the TPU kernels cannot take the inputs, or returns None if they can."""
    mask = inputs.mask
    if mask.allowed is not None and mask.allowed.shape[1] > 1:
        return "The kernels support Mask.allowed only if all heads share it."
    if inputs.positions is not None or (mask.counts_in_segments and mask.has_band):
        return "The kernels do not look up positions inside packed segments."
    return tpu.obstacle(inputs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("interpret",))
def forward(
    q_length: int,
    query_offset: int,
    soft_cap: float | None,
    inputs: FusedInputs,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, SoftmaxStats]:
    """Returns the attention output ``[b, q, h, e]`` and the row statistics that `backward` needs.

    Args:
      q_length: the number of queries.
      query_offset: `Mask.query_offset`, as a static number.
      soft_cap: the argument `soft_cap` of `attend`.
      inputs: terms, values and mask. The terms and values of padding must be zero, because even a
        weight of zero multiplied by NaN is NaN.
      interpret: whether to run the kernel in Python, without a TPU.
    """
    batch, k_length, heads, width = inputs.values.shape
    operands = make_operands(inputs, prepare_bias(inputs.biases))
    tiling = Tiling(inputs.mask, query_offset, batch, heads, q_length, k_length, soft_cap)

    statistic = jax.ShapeDtypeStruct((batch, heads, 1, q_length), jnp.float32)
    out_shape = jax.ShapeDtypeStruct((batch, heads, q_length, width), inputs.values.dtype)
    out, row_max, inverse_row_sum = call_kernel(
        functools.partial(_forward_kernel, tiling),
        LabeledArrays((operands,), (operands.axes(),)),
        LabeledArrays((out_shape, statistic, statistic), ("bhq.", "bh.q", "bh.q")),
        tiling.plan(operands.multiply_adds() + width, tiling.scratch(operands.bias)),
        interpret=interpret,
    )

    # The kernel treats padding queries like real queries, so the results of padding queries are set
    # to zero here.
    real_queries = inputs.mask.queries(q_length)
    if real_queries is not None:
        out = jnp.where(real_queries[:, None, :, None], out, 0)
        inverse_row_sum = jnp.where(real_queries[:, None, None], inverse_row_sum, 0.0)
    out = heads_first(out)
    # [b, h, 1, q] → [b, q, h, 1]
    return out, SoftmaxStats(*(x.transpose(0, 3, 1, 2) for x in (row_max, inverse_row_sum)))


def _forward_kernel(
    tiling: Tiling,
    refs: Operands,
    out: Ref,
    row_max: Ref,
    inverse_row_sum: Ref,
    scratch: Scratch,
) -> None:
    """Computes the output for one tile of queries of one head and one example."""
    fill_bias_tile(scratch.bias_tile, refs.bias, tiling)
    logits, allowed = logits_tile(refs, scratch.bias_tile, tiling)  # [q, k]
    if allowed is not None:
        logits = jnp.where(allowed, logits, LOW)
    largest = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), LOW)  # [q, 1]

    # The weights E = exp(S - max) are not normalized. Only the output O = (E V) / Σ E, [q, e], is
    # divided, because it is smaller than the array of weights, [q, k]. E is rounded to the dtype of
    # V before the sum, so that the sum adds up the same weights that are multiplied by V.
    weights = clear_forbidden(allowed, jnp.exp(logits - largest)).astype(refs.values.dtype)
    row_sum = jnp.sum(weights.astype(jnp.float32), axis=1, keepdims=True)  # [q, 1]

    # In rows without an allowed key, the output is set to zero, because the division would compute
    # 0 / 0.
    has_keys = row_sum > 0.0
    inverse = jnp.where(has_keys, 1.0 / jnp.where(has_keys, row_sum, 1.0), 0.0)
    out[...] = (matmul(weights, refs.values[...], axes=(1, 0)) * inverse).astype(out.dtype)

    # The statistics are stored as rows [1, q], which fill whole registers. A column [q, 1] would
    # use only one of the 128 lanes of each register.
    row_max[...] = jnp.where(has_keys, largest, 0.0).T
    inverse_row_sum[...] = inverse.T


class _Residuals(NamedTuple):
    """The arrays that the backward kernels read in addition to the operands.

    In a kernel, the attributes are references to a program's tiles, without axes b and h.

    Attributes:
      dout: the cotangent of the output, ``[b, h, q, e]``.
      row_max: `SoftmaxStats.row_max`, ``[b, h, 1, q]`` float32.
      inverse_row_sum: `SoftmaxStats.inverse_row_sum`, ``[b, h, 1, q]`` float32.
      delta: `softmax_vjp_delta`, ``[b, h, 1, q]`` float32.
    """

    dout: Ref
    row_max: Ref
    inverse_row_sum: Ref
    delta: Ref


_RESIDUAL_AXES = _Residuals(dout="bhq.", row_max="bh.q", inverse_row_sum="bh.q", delta="bh.q")


class _Cotangents(NamedTuple):
    """The cotangents that a backward kernel computes, or the arrays whose cotangents it computes.

    A cotangent is None if the kernel does not compute it.

    Attributes:
      products: the cotangents of `Operands.products`.
      values: the cotangent of `Operands.values`, ``[b, h, k, e]``.
      bias: the cotangents of `Operands.bias`.
    """

    products: Products
    values: Ref
    bias: Bias

    def axes(self) -> _Cotangents:
        """Returns the letters of the axes of every array."""
        return _Cotangents(product_axes(self.products), "bhk.", BIAS_AXES)

    def shapes(self) -> PyTree:
        """Returns the shapes and dtypes of a kernel's results.

        Cotangents that are summed over the batch are float32. All other cotangents have the dtype
        of the corresponding array.
        """

        def shape(x: Ref) -> jax.ShapeDtypeStruct:
            is_sum = x.shape[0] == 1 or x.ndim < 4  # the bias has no batch axis
            return jax.ShapeDtypeStruct(x.shape, jnp.float32 if is_sum else x.dtype)

        return jax.tree.map(shape, self)

    def is_shared(self) -> PyTree:
        """Returns a tree with a bool for each array: whether all examples share the array.

        The bool of the bias has no meaning, because the first axis of the bias is not the batch. No
        kernel reads it.
        """
        return jax.tree.map(lambda x: x.shape[0] == 1, self)


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
    """Returns the cotangents of the inputs of `forward`.

    Args:
      query_offset: `Mask.query_offset`, as a static number.
      soft_cap: the argument `soft_cap` of `attend`.
      inputs: the inputs of `forward`.
      stats: the row statistics that `forward` returned.
      delta: the result of `softmax_vjp_delta` for the output and its cotangent, ``[b, q, h, 1]``.
      dout: the cotangent of the output, ``[b, q, h, e]``.
      interpret: whether to run the kernels in Python, without a TPU.
    """
    batch, k_length, heads, _ = inputs.values.shape
    q_length = dout.shape[1]
    bias, bias_vjp = jax.vjp(prepare_bias, inputs.biases)
    operands = make_operands(inputs, bias)
    # [b, q, h, 1] → [b, h, 1, q]
    rows = (x.transpose(0, 2, 3, 1) for x in (*stats, delta))
    residuals = _Residuals(heads_first(dout), *rows)
    tiling = Tiling(inputs.mask, query_offset, batch, heads, q_length, k_length, soft_cap)

    if tiling.tile_rows == q_length:
        # One tile holds all queries, so a single program can sum over the queries. One kernel can
        # therefore compute all cotangents.
        primals = _Cotangents(operands.products, operands.values, bias)
        cotangents = _call_backward(operands, residuals, primals, tiling, interpret=interpret)
    else:
        primals = _Cotangents(without_keys(operands.products), None, bias)
        by_queries = _call_backward(operands, residuals, primals, tiling, interpret=interpret)

        # A second kernel with transposed tiles computes the cotangents that are sums over queries.
        # The rows of transposed tiles are keys.
        tiling = tiling.transpose()
        operands = operands._replace(bias=_transpose_bias(bias, q_length + k_length - 1))
        keys = without_queries(operands.products._replace(outer=()))
        primals = _Cotangents(keys, operands.values, Bias())
        by_keys = _call_backward(operands, residuals, primals, tiling, interpret=interpret)
        cotangents = _merge(by_queries, by_keys)

    def finish(d: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the cotangent of an array, in the layout and dtype of the array."""
        return heads_first(d).astype(x.dtype)

    dproducts = jax.tree.map(finish, cotangents.products, inputs.products)
    dvalues = finish(cotangents.values, inputs.values)
    (dbiases,) = bias_vjp(jax.tree.map(lambda d, x: d.astype(x.dtype), cotangents.bias, bias))
    return inputs.cotangents(dproducts, dbiases, dvalues)


def _merge(by_queries: _Cotangents, by_keys: _Cotangents) -> _Cotangents:
    """Combines the cotangents that the kernel for queries and the kernel for keys have computed.

    Each of the two kernels leaves out the cotangents that the other kernel computes.
    """
    low_rank = tuple(
        dataclasses.replace(term, keys=other.keys)
        for term, other in zip(by_queries.products.low_rank, by_keys.products.low_rank, strict=True)
    )
    products = by_queries.products._replace(low_rank=low_rank)
    return _Cotangents(products, by_keys.values, by_queries.bias)


def _transpose_bias(bias: Bias, count: int) -> Bias:
    """Returns the bias for tiles whose rows are keys.

    The order of the diagonals is reversed. The table is unchanged, because `fill_bias_tile`
    transposes each tile of the table.

    Args:
      bias: the bias for tiles whose rows are queries.
      count: the number of diagonals, without the zeros at the end of the array.
    """
    if bias.diagonals is None:
        return bias
    used = bias.diagonals[..., :count]
    zeros = bias.diagonals[..., count:]
    return bias._replace(diagonals=jnp.concatenate([used[..., ::-1], zeros], axis=-1))


def _call_backward(
    operands: Operands,
    residuals: _Residuals,
    primals: _Cotangents,
    tiling: Tiling,
    *,
    interpret: bool,
) -> _Cotangents:
    """Returns the cotangents of the operands that `primals` contains."""
    # S, dQ and dK each take one multiply-add per logit for every column of the factors. The
    # products dP and dV each take one multiply-add per logit for every column of the values.
    low_rank = primals.products.low_rank
    has_queries = any(term.queries is not None for term in low_rank)
    has_keys = any(term.keys is not None for term in low_rank)
    num_factors = 1 + has_queries + has_keys
    num_widths = 1 + (primals.values is not None)
    width = operands.values.shape[-1]

    scratch = tiling.scratch(operands.bias, sums_diagonals=primals.bias.diagonals is not None)
    results: tuple[_Cotangents] = call_kernel(
        functools.partial(_backward_kernel, tiling, primals.is_shared()),
        LabeledArrays((operands, residuals), (operands.axes(), _RESIDUAL_AXES)),
        LabeledArrays((primals.shapes(),), (primals.axes(),)),
        tiling.plan(num_factors * operands.multiply_adds() + num_widths * width, scratch),
        interpret=interpret,
    )
    return results[0]


def _backward_kernel(
    tiling: Tiling,
    is_shared: PyTree,
    refs: Operands,
    residuals: _Residuals,
    results: _Cotangents,
    scratch: Scratch,
) -> None:
    """Computes the cotangents for one tile of logits of one head and one example.

    Args:
      tiling: the tiling of the logits.
      is_shared: a tree with a bool for each result, which is true if all examples share the result.
      refs: references to the tiles of the operands.
      residuals: references to the tiles of the residuals.
      results: references to the tiles of the results, with None for results that the kernel leaves
        out.
      scratch: references to the scratch memory.
    """
    fill_bias_tile(scratch.bias_tile, refs.bias, tiling)
    logits, allowed = logits_tile(refs, scratch.bias_tile, tiling)  # [q, k], or [k, q]

    # The residuals are rows [1, q], which broadcast to a transposed tile [k, q]. For a tile [q, k],
    # the rows are transposed to columns [q, 1].
    row_max, inverse_row_sum, delta = (
        row[...] if tiling.transposed else row[...].T
        for row in (residuals.row_max, residuals.inverse_row_sum, residuals.delta)
    )
    # The weights are P = exp(S - max) / Σ exp(S - max).
    weights = clear_forbidden(allowed, jnp.exp(logits - row_max)) * inverse_row_sum

    # dP = dO Vᵀ. If the tile is transposed, dPᵀ = V dOᵀ is computed instead.
    # The cotangent of the logits is dS = P ∘ (dP - delta).
    dout = residuals.dout[...]
    values = refs.values[...]
    pair = (values, dout) if tiling.transposed else (dout, values)
    dlogits = weights * (matmul(*pair, axes=(1, 1)) - delta)
    if tiling.soft_cap is not None:
        # With a soft cap c, the logits are c · tanh(x / c), whose derivative is 1 - tanh²(x / c).
        dlogits *= 1.0 - (logits / tiling.soft_cap) ** 2

    _write_products(tiling, is_shared.products, refs.products, results.products, dlogits)
    if results.values is not None:
        # dV = Pᵀ dO.
        # The shape of dV is [k, e].
        dvalues = matmul(weights.astype(dout.dtype), dout, axes=(tiling.query_axis, 0))
        _write_result(results.values, dvalues, is_shared=is_shared.values)
    if results.bias.table is not None:
        _write_result(results.bias.table, dlogits, is_shared=True)
    if results.bias.diagonals is not None:
        _add_diagonals(results.bias.diagonals, scratch.dlogits_sum, dlogits, tiling)


def _write_products(
    tiling: Tiling, is_shared: PyTree, terms: Products, results: Products, dlogits: jax.Array
) -> None:
    """Computes the cotangents of the factors of all products from dS, and writes them."""
    low_rank = zip(terms.low_rank, results.low_rank, is_shared.low_rank, strict=True)
    for term, result, shared in low_rank:
        if result.queries is not None:
            # dQ = dS K.
            # The shape of dQ is [q, r].
            keys = term.keys[...]
            dqueries = matmul(dlogits.astype(keys.dtype), keys, axes=(tiling.key_axis, 0))
            _write_result(result.queries, dqueries, is_shared=shared.queries)
        if result.keys is not None:
            # dK = dSᵀ Q.
            # The shape of dK is [k, r].
            queries = term.queries[...]
            dkeys = matmul(dlogits.astype(queries.dtype), queries, axes=(tiling.query_axis, 0))
            _write_result(result.keys, dkeys, is_shared=shared.keys)

    # The kernel with transposed tiles skips `Outer` terms, because both of their factors, a and b,
    # belong to queries.
    if results.outer:
        outer = zip(terms.outer, results.outer, is_shared.outer, strict=True)
        for outer_term, outer_result, outer_shared in outer:
            da, db = outer_vjp(outer_term, dlogits)
            _write_result(outer_result.a, da, is_shared=outer_shared.a)
            _write_result(outer_result.b, db, is_shared=outer_shared.b)


def _write_result(ref: Ref, value: jax.Array, *, is_shared: bool) -> None:
    """Writes the result of one example, or adds it to the sum over the previous examples.

    If all examples share the result, the tile of the result stays in vector memory until the last
    example.
    """
    value = value.astype(ref.dtype)
    if not is_shared:
        ref[...] = value
        return

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        ref[...] = value

    @pl.when(pl.program_id(2) > 0)
    def _() -> None:
        ref[...] += value


def _add_diagonals(total: Ref, dlogits_sum: Ref, dlogits: jax.Array, tiling: Tiling) -> None:
    """Adds the sums along a tile's diagonals to the cotangent of the diagonals.

    The tiles of all examples are summed first. Summing along diagonals rotates registers, which is
    slow, so the kernel sums along the diagonals only once, after the last example.

    Args:
      total: the cotangent of the diagonals, ``[1, w]``, which stays in vector memory until all
        tiles of a head are done.
      dlogits_sum: scratch memory for the sum over the examples, ``[tile_rows, columns]``.
      dlogits: the cotangents of the logits of the current example, ``[tile_rows, columns]``.
      tiling: the tiling of the logits.
    """
    index = pl.program_id(1)
    example = pl.program_id(2)
    _write_result(dlogits_sum, dlogits, is_shared=True)

    @pl.when(example == tiling.batch - 1)
    def _() -> None:
        first = index * tiling.tile_rows
        sums = sum_diagonals(dlogits_sum, first, rows=tiling.rows, count=total.shape[-1])

        @pl.when(index == 0)
        def _() -> None:
            total[...] = sums

        @pl.when(index > 0)
        def _() -> None:
            total[...] += sums
