"""The Pallas kernels of the fused route for NVIDIA's GPUs, which Triton compiles.

The kernels compute ``O = softmax(S) V`` and its gradients without an array of all logits S. The
logits of one head and one example are cut into tiles. A program computes one tile of logits at a
time, from a tile of queries and a tile of keys, and holds it in registers. The fused route has four
kernels for GPUs:

* In the forward kernel, a program loops over key tiles, and writes the outputs of a query tile.
* In the queries kernel, a program loops over key tiles, and writes the cotangents of a query tile.
* In the keys kernel, a program loops over query tiles, and writes the cotangents of the keys and
  values of a key tile.
* In the bias kernel, a program loops over examples, and also along a diagonal of tiles if the bias
  is relative. It writes the sum of the cotangents of these tiles of logits.

This module contains the forward kernel, and `fused_gpu_backward` contains the other three kernels.

The forward kernel loops over the keys once. The largest logit of a row is not known until the loop
ends. The forward kernel therefore keeps a running maximum, and rescales its sums when the maximum
grows (Dao 2023, FlashAttention-2, section 3.1). For each row of logits, the forward kernel returns
the maximum, and the inverse of the sum of exponentials. The backward kernels recompute the weights
of a tile from these two numbers.

`fused_gpu_geometry` defines how arrays are cut into tiles, and `fused_gpu_logits` computes the
logits of a tile. The comments write S for the logits, P for the weights, Q, K and V for the rows of
queries, keys and values, and O for the outputs. A tile has bq queries and bk keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from synthesizer_jax.attention.fused_arrays import Biases, FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.fused_gpu_backward import (
    Residuals,
    call_by_bias,
    call_by_keys,
    call_by_queries,
)
from synthesizer_jax.attention.fused_gpu_geometry import (
    Operands,
    Program,
    Ref,
    Scalar,
    Tiling,
    fill_width,
    make_operands,
    make_tiling,
    store_rows,
    store_vector,
)
from synthesizer_jax.attention.fused_gpu_logits import exp, forbid, logits_tile, matmul
from synthesizer_jax.attention.kernel_arrays import LabeledArrays
from synthesizer_jax.attention.terms import logits_dtype

MAX_WIDTH = 256
"""The largest width of queries, keys and values. Wider rows do not fit into a GPU's registers."""


def obstacle(inputs: FusedInputs) -> str | None:
    """Explains why the GPU kernels cannot take the inputs, or returns None if they can."""
    products, biases, values, mask, positions = inputs
    if products.outer:
        return "The kernels do not support Outer terms."
    if positions is not None or (mask.counts_in_segments and mask.has_band):
        return "The kernels do not look up positions inside packed segments."
    if not isinstance(mask.query_offset, int):
        return "Mask.query_offset is traced, but the kernels need to know its value."
    if logits_dtype(values, *jax.tree.leaves((products, biases))) != jnp.float32:
        return "The kernels do not support 64-bit numbers."
    # Triton computes offsets in arrays as 32-bit integers. The kernels get `Mask.allowed` as int8,
    # so its offsets count bytes.
    if mask.allowed is not None and mask.allowed.size > 2**31:
        return f"Mask.allowed has more than {2**31:,} entries, which is too large for the kernels."
    widest = max(x.shape[-1] for x in (values, *jax.tree.leaves(products)))
    if widest > MAX_WIDTH:
        return (
            f"Queries, keys or values have {widest} features per head, but the kernels support at "
            f"most {MAX_WIDTH}."
        )
    return None


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
      inputs: terms, values and mask.
      interpret: whether to run the kernel in Python, without a GPU.
    """
    batch, _, heads, width = inputs.values.shape
    operands = make_operands(inputs, q_length)

    # `jax.jit` traces the offset of the mask, unless the offset is 0. A kernel can read a traced
    # number only if it is an argument of the kernel, so the mask gets the static offset again.
    mask = dataclasses.replace(inputs.mask, query_offset=query_offset)
    tiling = make_tiling("forward", operands, mask, q_length, soft_cap)

    statistic = jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32)
    out_shape = jax.ShapeDtypeStruct(
        (batch, q_length, heads, operands.values.shape[-1]), inputs.values.dtype
    )
    out, row_max, inverse_row_sum = tiling.call(
        functools.partial(_forward_kernel, tiling),
        LabeledArrays((operands,), (operands.axes(),)),
        LabeledArrays((out_shape, statistic, statistic), ("bqh.", "bhq", "bhq")),
        grid=(tiling.counts[0], heads, batch),
        multiply_adds=operands.rank + width,
        interpret=interpret,
    )

    out = out[..., :width]  # removes the columns that `fill_width` added
    real_queries = inputs.mask.queries(q_length)
    if real_queries is not None and operands.query_ends is None:
        # The kernel does not know about padding between real queries, so the output and the inverse
        # sums of padding queries are set to zero here.
        out = jnp.where(real_queries[..., None, None], out, 0)
        inverse_row_sum = jnp.where(real_queries[:, None], inverse_row_sum, 0.0)
    # [b, h, q] → [b, q, h, 1]
    return out, SoftmaxStats(*(x.swapaxes(1, 2)[..., None] for x in (row_max, inverse_row_sum)))


class _OnlineSoftmax(NamedTuple):
    """The state of the online softmax for a tile of queries, after the keys read so far.

    Attributes:
      weighted_sum: ``Σ exp(S - row_max) V``, ``[bq, e]`` float32.
      row_max: the largest logit of each row so far, ``[bq]`` float32. It is -inf before the first
        key.
      row_sum: ``Σ exp(S - row_max)``, ``[bq]`` float32.
    """

    weighted_sum: jax.Array
    row_max: jax.Array
    row_sum: jax.Array


def _forward_kernel(
    tiling: Tiling,
    refs: Operands,
    out: Ref,
    row_max: Ref,
    inverse_row_sum: Ref,
) -> None:
    """Computes the output for one tile of queries of one head and one example."""
    i = pl.program_id(0)
    example = pl.program_id(2)
    program = Program(tiling, refs, example)
    query_tile = tiling.query_tile(i)
    queries = program.load_queries(query_tile)  # [bq, r] for every term

    def add_keys(j: Scalar, sums: _OnlineSoftmax) -> _OnlineSoftmax:
        """Returns the sums after the keys of tile j are added."""
        tile = tiling.tile(i, j)
        # `keys` contains an array [bk, r] for every term. The shape of `values` is [bk, e].
        keys, values = program.load_keys(tile.keys)
        logits, allowed = logits_tile(program, tile, queries, keys)
        logits = forbid(logits, allowed)  # [bq, bk]

        # The maximum of a row is -inf until the first allowed key. If the maximum is -inf, zero is
        # subtracted from the logits instead, because -inf - (-inf) would be NaN.
        new_max = jnp.maximum(sums.row_max, jnp.max(logits, axis=1))  # [bq]
        finite_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)

        # The weights E = exp(S - max) are not normalized inside the loop. After the loop, the
        # output O = (E V) / Σ E is divided once by the sum of the weights.
        weights = exp(logits - finite_max[:, None])  # [bq, bk]

        # The factor exp(old maximum - new maximum) rescales the sums to the new maximum.
        rescale = exp(sums.row_max - finite_max)  # [bq]
        # As in FlashAttention, `row_sum` adds up the float32 weights, but the product with V uses
        # weights that are rounded to the dtype of V. The TPU kernel and `fused_loop` add up the
        # rounded weights instead. The results differ only by rounding errors.
        weighted_sum = sums.weighted_sum * rescale[:, None]  # [bq, e]
        weighted_sum += matmul(weights.astype(values.dtype), values)
        row_sum = sums.row_sum * rescale + jnp.sum(weights, axis=1)  # [bq]
        return _OnlineSoftmax(weighted_sum, new_max, row_sum)

    zeros = jnp.zeros(query_tile.size, jnp.float32)
    no_keys = _OnlineSoftmax(
        weighted_sum=jnp.zeros((query_tile.size, refs.values.shape[-1]), jnp.float32),
        row_max=zeros - jnp.inf,
        row_sum=zeros,
    )
    first, last = program.visible_keys(i)
    sums = lax.fori_loop(first, last, add_keys, no_keys)

    # In rows without an allowed key and in rows of padding queries, the output is set to zero,
    # because the division would compute 0 / 0.
    has_keys = sums.row_sum > 0.0
    if refs.query_ends is not None:
        has_keys &= query_tile.is_before(refs.query_ends, example)
    inverse = jnp.where(has_keys, 1.0 / jnp.where(has_keys, sums.row_sum, 1.0), 0.0)  # [bq]

    store_rows(out, example, query_tile, sums.weighted_sum * inverse[:, None])
    store_vector(row_max, example, query_tile, jnp.where(has_keys, sums.row_max, 0.0))
    store_vector(inverse_row_sum, example, query_tile, inverse)


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
      interpret: whether to run the kernels in Python, without a GPU.
    """
    q_length = dout.shape[1]
    operands = make_operands(inputs, q_length)
    rows = (x[..., 0].swapaxes(1, 2) for x in (*stats, delta))  # [b, q, h, 1] → [b, h, q]
    residuals = Residuals(fill_width(dout), *rows)
    # As in `forward`, the kernels need the offset as a Python number.
    mask = dataclasses.replace(inputs.mask, query_offset=query_offset)

    def tiling(kernel: str) -> Tiling:
        """Returns the tiling of one of the three backward kernels."""
        return make_tiling(kernel, operands, mask, q_length, soft_cap)

    dqueries = call_by_queries(tiling("queries"), operands, residuals, interpret=interpret)
    dkeys, dvalues = call_by_keys(tiling("keys"), operands, residuals, interpret=interpret)

    # The bias kernel returns the cotangent of the sum of all tables, and the cotangent of the sum
    # of all diagonals. `sums_vjp` converts them to the cotangents of the individual terms.
    _, sums_vjp = jax.vjp(Biases.sums, inputs.biases)
    dsums = call_by_bias(tiling("bias"), operands, residuals, interpret=interpret)
    sums = (operands.table, operands.diagonals)
    (dbiases,) = sums_vjp(jax.tree.map(lambda d, x: d.astype(x.dtype), dsums, sums))

    def finish(d: jax.Array, x: jax.Array) -> jax.Array:
        """Converts a kernel's result to the cotangent of an array, in the array's shape and dtype.

        If all examples share the array, the cotangents of the examples are summed. The columns that
        `fill_width` added are removed.
        """
        d = d if d.shape[0] == x.shape[0] else d.sum(axis=0, keepdims=True)
        return d[..., : x.shape[-1]].astype(x.dtype)

    low_rank = tuple(
        dataclasses.replace(term, queries=finish(dq, term.queries), keys=finish(dk, term.keys))
        for term, dq, dk in zip(inputs.products.low_rank, dqueries, dkeys, strict=True)
    )
    return inputs.cotangents(Products(low_rank), dbiases, finish(dvalues, inputs.values))
