"""The bodies of the kernels of `static_tpu`, which has the mathematics and the grid.

All blocks are in vector memory (VMEM), but `BackwardOperands.dvalues`, which stays in HBM.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.tiles_tpu import (
    SUBLANES,
    Bias,
    Ref,
    mask_weights,
    matmul,
    roll_diagonals,
)

MIN_ROW_SUM = 2.0**-64
"""The smallest denominator that is trusted, with or without kernels.

Weights lost to underflow are then below 1e-15 of a row's sum for up to 4,096 keys, and the division
of the cotangent cannot overflow.
"""


class Operands(NamedTuple):
    """What both kernels read; in a kernel, references to the blocks of a program.

    Attributes:
      bias: the logits.
      values: ``[b, k, h · e]``, zero where keys are padding.
      keys: ``[b / c, c, k]`` float32, 1 for real keys; None: the real queries of one position see the
        same keys in every example.
      queries: ``[b / c, c, q]`` float32, 1 for real queries that see a key; None: all of them.
    """

    bias: Bias
    values: Ref
    keys: Ref
    queries: Ref


class BackwardOperands(NamedTuple):
    """What the backward kernel reads besides.

    Attributes:
      g: the cotangent of the output, ``[b, q, h · e]``.
      out: the output, likewise; None where `Operands.keys` is None.
      inverse_row_sum: the forward kernel's, ``[h, b / c, c, q]``, or None likewise.
      earlier: the cotangents of the bias from the examples of earlier calls; None for the first call.
      dvalues: the cotangents of the values, which the calls fill one after the other, in HBM.
    """

    g: Ref
    out: Ref
    inverse_row_sum: Ref
    earlier: Bias | None = None
    dvalues: Ref = None


class Scratch(NamedTuple):
    """Vector memory of a kernel.

    Attributes:
      weights: a block's numerators, normalized where `Operands.keys` is None, ``[heads, queries, k]`` in
        the values' dtype.
      tile: logits of one head, ``[queries, k]``, if they are made of `Bias.columns`.
      transposed_tile: the weights, ``[heads, k, queries]``.
      dlogits_sum: the sum of the logits' cotangents over the examples, ``[heads, queries, k]`` float32.
      dvalues: the sum of the values' cotangents over blocks of queries, ``[c, k, lanes]`` float32; None
        where there is one block.
    """

    weights: Ref
    tile: Ref
    transposed_tile: Ref = None
    dlogits_sum: Ref = None
    dvalues: Ref = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut into programs, and what all of them know.

    Attributes:
      heads: of a program.
      examples: of a program, c.
      queries: of a program.
      width: of a head.
      shape: ``(b, h, q, k)`` of all logits.
      first: the first group of examples of this call.
      groups: the number of groups of examples of this call.
      offset: position of the first query.
      mask: the mask without its arrays, for `Mask.band_rules`.
      memory: bytes of vector memory that a program may take.
    """

    heads: int
    examples: int
    queries: int
    width: int
    shape: tuple[int, int, int, int]
    first: int
    groups: int
    offset: int
    mask: Mask
    memory: int

    @property
    def blocks(self) -> int:
        """Blocks of queries."""
        return -(-self.shape[2] // self.queries)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Groups of heads, groups of examples and blocks of queries."""
        return self.shape[1] // self.heads, self.groups, self.blocks

    @property
    def lanes(self) -> int:
        """Of a program's heads."""
        return self.heads * self.width

    def lanes_of(self, head: int) -> slice:
        """Where one of a program's heads lies."""
        return slice(head * self.width, (head + 1) * self.width)

    def columns_of(self, example: int) -> slice:
        """Where one of a program's examples lies in the columns of a product."""
        return slice(example * self.width, (example + 1) * self.width)


def forward_kernel(
    plan: Tiling, blocks: Operands, out: Ref, inverse_row_sum: Ref, scratch: Scratch
) -> None:
    """A block of the output, and one over its denominators."""
    group, block = pl.program_id(1), pl.program_id(2)

    @pl.when(jnp.logical_or(group == 0, plan.blocks > 1))
    def _() -> None:
        for j in range(plan.heads):
            scratch.weights[j] = _shared_weights(plan, blocks, j, block=block, scratch=scratch)

    seen: Ref = None if blocks.queries is None else blocks.queries[...].T
    seen = None if seen is None else mask_weights(_query_rows(plan, block), seen)

    def write_result(j: int, inverse_sum: jax.Array | None) -> None:
        weighted_sum = matmul(
            scratch.weights[j], _examples_in_columns(plan, blocks.values, j), axes=(1, 0)
        )
        for i in range(plan.examples):
            part = weighted_sum[:, plan.columns_of(i)]
            part = part if inverse_sum is None else part * inverse_sum[:, i : i + 1]
            out[i, :, plan.lanes_of(j)] = part.astype(out.dtype)

    if blocks.keys is None:
        for j in range(plan.heads):
            write_result(j, seen)
        return

    real = blocks.keys[...].astype(out.dtype)
    totals = [matmul(scratch.weights[j], real, axes=(1, 1)) for j in range(plan.heads)]
    least = functools.reduce(jnp.minimum, [jnp.where(seen > 0.0, t, 1.0) for t in totals])

    def fast() -> None:
        for j, total in enumerate(totals):
            inverse_sum = seen / jnp.maximum(total, MIN_ROW_SUM)
            write_result(j, inverse_sum)
            inverse_row_sum[j] = inverse_sum.T

    def exact(i: jax.Array, _: None) -> None:
        for j in range(plan.heads):
            weights = _example_weights(plan, blocks, j, block=block, example=i, scratch=scratch)
            total = jnp.sum(weights, axis=1, keepdims=True)
            inverse_sum = blocks.queries[pl.ds(i, 1)].T / jnp.maximum(total, MIN_ROW_SUM)
            lanes = plan.lanes_of(j)
            weighted_sum = matmul(
                weights.astype(out.dtype), blocks.values[i, :, lanes], axes=(1, 0)
            )
            out[i, :, lanes] = (weighted_sum * inverse_sum).astype(out.dtype)
            inverse_row_sum[j, pl.ds(i, 1)] = -inverse_sum.T

    _when_else(
        jnp.min(least) >= MIN_ROW_SUM, fast, functools.partial(_for_each_example, plan, exact)
    )


def backward_kernel(
    plan: Tiling,
    blocks: Operands,
    residuals: BackwardOperands,
    dbias: Bias,
    dvalues: Ref,
    scratch: Scratch,
) -> None:
    """Computes a block of the bias' cotangent, and adds to the values' cotangent."""
    group, block = pl.program_id(1), pl.program_id(2)
    real = _query_rows(plan, block)
    write_result = functools.partial(
        _accumulate_values_cotangent, plan, dvalues, scratch.dvalues, block
    )

    @pl.when(group == 0)  # the only one where there are several blocks
    def _() -> None:
        _begin_block(plan, blocks, block, scratch=scratch)

    def fast() -> None:
        for j in range(plan.heads):
            dvalues_by_example = _all_examples_cotangents(
                plan, blocks, residuals, head=j, real=real, scratch=scratch
            )
            for i in range(plan.examples):
                write_result(i, j, dvalues_by_example[:, plan.columns_of(i)])

    def exact(i: jax.Array, _: None) -> None:
        for j in range(plan.heads):
            weights = _example_weights(plan, blocks, j, block=block, example=i, scratch=scratch)
            weights = mask_weights(real, weights * -residuals.inverse_row_sum[j, pl.ds(i, 1)].T)
            lanes = plan.lanes_of(j)
            g, out = mask_weights(real, residuals.g[i, :, lanes]), residuals.out[i, :, lanes]
            delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), 1, keepdims=True)
            scratch.dlogits_sum[j] += weights * (
                matmul(g, blocks.values[i, :, lanes], axes=(1, 1)) - delta
            )
            write_result(i, j, matmul(weights.astype(g.dtype), g, axes=(0, 0)))

    if residuals.inverse_row_sum is None:
        fast()
    else:
        least = [
            jnp.min(mask_weights(real, residuals.inverse_row_sum[j].T)) for j in range(plan.heads)
        ]
        trusted = functools.reduce(jnp.minimum, least) >= 0.0
        _when_else(trusted, fast, functools.partial(_for_each_example, plan, exact))

    @pl.when(group == plan.groups - 1)
    def _() -> None:
        _end_block(plan, blocks, residuals, dbias=dbias, block=block, scratch=scratch)


def _all_examples_cotangents(
    plan: Tiling,
    blocks: Operands,
    residuals: BackwardOperands,
    *,
    head: int,
    real: jax.Array | None,
    scratch: Scratch,
) -> jax.Array:
    """Adds the examples' cotangents of a head's logits; returns those of its values, side by side."""
    if residuals.inverse_row_sum is not None:
        inverse_sum = residuals.inverse_row_sum[head].T
    else:
        inverse_sum = None if blocks.queries is None else blocks.queries[...].T
    # D = g / E m
    scaled = mask_weights(real, _scaled_cotangent(plan, residuals.g, head, inverse_sum=inverse_sum))
    cast = scaled.astype(blocks.values.dtype)
    # dE = D (m ∘ v)ᵀ − δ mᵀ
    dweights = matmul(cast, _examples_in_columns(plan, blocks.values, head), axes=(1, 1))
    if residuals.inverse_row_sum is not None:
        delta = softmax_vjp_delta(plan, residuals.out, head, scaled=scaled)
        dweights -= matmul(delta, blocks.keys[...], axes=(1, 0))
    # dS = E ∘ dE
    scratch.dlogits_sum[head] += scratch.weights[head].astype(jnp.float32) * dweights
    return matmul(scratch.transposed_tile[head], cast, axes=(1, 0))  # dv = Eᵀ D


def _begin_block(plan: Tiling, blocks: Operands, block: jax.Array, *, scratch: Scratch) -> None:
    """Computes the weights of a block, 0 in rows that are no queries, and clears its sums."""
    real = _query_rows(plan, block)
    for j in range(plan.heads):
        part = mask_weights(
            real, _shared_weights(plan, blocks, j, block=block, scratch=scratch).astype(jnp.float32)
        )
        scratch.weights[j] = part.astype(scratch.weights.dtype)
        scratch.transposed_tile[j] = part.T.astype(scratch.transposed_tile.dtype)
        scratch.dlogits_sum[j] = jnp.zeros(scratch.dlogits_sum.shape[1:], jnp.float32)


def _end_block(
    plan: Tiling,
    blocks: Operands,
    residuals: BackwardOperands,
    *,
    dbias: Bias,
    block: jax.Array,
    scratch: Scratch,
) -> None:
    """Writes a block's cotangents of the bias."""
    for j in range(plan.heads):
        if (
            blocks.keys is None
        ):  # the weights are normalized, and their sums have not been subtracted
            dweights = scratch.dlogits_sum[j]
            part = scratch.weights[j].astype(jnp.float32)
            scratch.dlogits_sum[j] = dweights - part * jnp.sum(dweights, axis=1, keepdims=True)
        _write_bias_cotangent(
            plan, dbias, residuals.earlier, dlogits_sum=scratch.dlogits_sum, head=j, block=block
        )


def _when_else(condition: jax.Array, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Runs one of two functions."""
    pl.when(condition)(first)
    pl.when(jnp.logical_not(condition))(second)


def _for_each_example(plan: Tiling, function: Callable[[jax.Array, None], None]) -> None:
    """Calls ``function(i, None)`` for every example of a program."""
    lax.fori_loop(jnp.int32(0), jnp.int32(plan.examples), function, None)


def _head_logits(plan: Tiling, bias: Bias, head: int, *, block: jax.Array, tile: Ref) -> jax.Array:
    """A program's logits of one of its heads, ``[queries, k]`` float32."""
    if bias.columns is None:
        return bias.table[head].astype(jnp.float32)
    roll_diagonals(tile, bias.columns[head], block * plan.queries, rows=plan.shape[2])
    return tile[...] if bias.table is None else tile[...] + bias.table[head].astype(jnp.float32)


def _band_mask(plan: Tiling, block: jax.Array) -> jax.Array | None:
    """What `Mask.band_rules` allow in a program's block; None: everything."""
    shape = plan.queries, plan.shape[3]
    query = lax.broadcasted_iota(jnp.int32, shape, 0) + (block * plan.queries + plan.offset)
    key = lax.broadcasted_iota(jnp.int32, shape, 1)
    rules = plan.mask.band_rules(query, key)
    return functools.reduce(jnp.logical_and, rules) if rules else None


def _query_rows(plan: Tiling, block: jax.Array) -> jax.Array | None:
    """Which rows of a block are queries, ``[queries, 1]``; None: all, in every block."""
    if plan.shape[2] % plan.queries == 0:
        return None
    row = lax.broadcasted_iota(jnp.int32, (plan.queries, 1), 0)
    return row + block * plan.queries < plan.shape[2]


def numerators(logits: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """``exp(logits - max)`` of every row, zero where it is not allowed."""
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    row_max = jnp.max(logits, axis=1, keepdims=True)
    return jnp.exp(logits - jnp.maximum(row_max, float(jnp.finfo(jnp.float32).min)))


def _shared_weights(
    plan: Tiling, blocks: Operands, head: int, *, block: jax.Array, scratch: Scratch
) -> jax.Array:
    """The weights of a block for all examples; see `Scratch.weights`."""
    logits = _head_logits(plan, blocks.bias, head, block=block, tile=scratch.tile)
    weights = numerators(logits, _band_mask(plan, block))
    if blocks.keys is None:
        weights /= jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), MIN_ROW_SUM)
    return weights.astype(scratch.weights.dtype)


def _example_weights(
    plan: Tiling,
    blocks: Operands,
    head: int,
    *,
    block: jax.Array,
    example: jax.Array,
    scratch: Scratch,
) -> jax.Array:
    """The numerators under an example's own maximum, ``[queries, k]`` float32."""
    allowed = jnp.broadcast_to(blocks.keys[pl.ds(example, 1)] > 0.0, (plan.queries, plan.shape[3]))
    pairs = _band_mask(plan, block)
    allowed = allowed if pairs is None else jnp.logical_and(pairs, allowed)
    return numerators(
        _head_logits(plan, blocks.bias, head, block=block, tile=scratch.tile), allowed
    )


def _examples_in_columns(plan: Tiling, x: Ref, head: int) -> jax.Array:
    """One head of a block ``[c, n, lanes]``, the examples in columns, ``[n, c · e]``."""
    lanes = plan.lanes_of(head)
    return jnp.concatenate([x[i, :, lanes] for i in range(plan.examples)], axis=1)


def _scaled_cotangent(
    plan: Tiling, g: Ref, head: int, *, inverse_sum: jax.Array | None
) -> jax.Array:
    """The output's cotangent times a number for every query and example, ``[queries, c · e]`` float32."""
    lanes, parts = plan.lanes_of(head), []
    for i in range(plan.examples):
        part = g[i, :, lanes].astype(jnp.float32)
        parts.append(part if inverse_sum is None else part * inverse_sum[:, i : i + 1])
    return jnp.concatenate(parts, axis=1)


def softmax_vjp_delta(plan: Tiling, out: Ref, head: int, *, scaled: jax.Array) -> jax.Array:
    """Returns ``δ = Σ_e out · D``, ``[queries, c]`` float32."""
    products = scaled * _examples_in_columns(plan, out, head).astype(jnp.float32)
    sums = [
        jnp.sum(products[:, plan.columns_of(i)], axis=1, keepdims=True)
        for i in range(plan.examples)
    ]
    return jnp.concatenate(sums, axis=1)


def _accumulate_values_cotangent(
    plan: Tiling,
    dvalues: Ref,
    total: Ref,
    block: jax.Array,
    example: int | jax.Array,
    head: int,
    value: jax.Array,
) -> None:
    """Adds a block of queries' part of the values' cotangent ``[k, e]``, and writes it with the last."""
    lanes = plan.lanes_of(head)
    if total is None:
        dvalues[example, :, lanes] = value.astype(dvalues.dtype)
        return

    @pl.when(block == 0)
    def _() -> None:
        total[example, :, lanes] = value

    @pl.when(block > 0)
    def _() -> None:
        total[example, :, lanes] += value

    @pl.when(block == plan.blocks - 1)
    def _() -> None:
        dvalues[example, :, lanes] = total[example, :, lanes].astype(dvalues.dtype)


def _write_bias_cotangent(
    plan: Tiling,
    dbias: Bias,
    earlier: Bias | None,
    *,
    dlogits_sum: Ref,
    head: int,
    block: jax.Array,
) -> None:
    """Writes a block of the table's cotangent, and adds its diagonals to that of the columns."""
    if dbias.table is not None:
        part = dlogits_sum[head]
        part = part if earlier is None else part + earlier.table[head].astype(jnp.float32)
        dbias.table[head] = part.astype(dbias.table.dtype)
    if dbias.columns is None:
        return
    sums = _diagonal_sums(plan, dlogits_sum.at[head], block, count=dbias.columns.shape[2])

    @pl.when(block == 0)
    def _() -> None:
        dbias.columns[head] = sums if earlier is None else sums + earlier.columns[head]

    @pl.when(block > 0)
    def _() -> None:
        dbias.columns[head] += sums


def _diagonal_sums(plan: Tiling, dlogits_sum: Ref, block: jax.Array, *, count: int) -> jax.Array:
    """The sums along a block's diagonals, ``[1, count]``: the inverse of `tiles_tpu.roll_diagonals`."""
    size, length = dlogits_sum.shape
    q_length, first = plan.shape[2], block * plan.queries
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, count), 0)
    lines = jnp.zeros((SUBLANES, count), jnp.float32)
    for begin in range(0, size, SUBLANES):
        rows = min(SUBLANES, size - begin)
        part = jnp.pad(
            dlogits_sum[begin : begin + rows], ((0, SUBLANES - rows), (0, count - length))
        )
        part = jnp.where(row + (first + begin) < q_length, part, 0.0)
        lines += pltpu.roll(
            part, lax.rem(count + q_length - 1 - begin - first, jnp.int32(count)), 1
        )
    for bit in (1, 2, 4):
        lines = jnp.where(row & bit != 0, pltpu.roll(lines, jnp.int32(count - bit), 1), lines)
    return lines.sum(axis=0, keepdims=True)
