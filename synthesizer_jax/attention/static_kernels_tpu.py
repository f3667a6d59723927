"""The bodies of `static_tpu`'s kernels: what a program does with its blocks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.tiles_tpu import SUBLANES, Bias, dot, only, roll_out

LEAST = 2.0**-64
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
    values: Any
    keys: Any
    queries: Any


class Cotangent(NamedTuple):
    """What the backward kernel reads besides.

    Attributes:
      g: the cotangent of the output, ``[b, q, h · e]``.
      out: the output, likewise; None where `Operands.keys` is None.
      inverse: the forward kernel's, ``[h, b / c, c, q]``, or None likewise.
      earlier: the cotangents of the bias from the examples of earlier calls; None for the first call.
      dvalues: the cotangents of the values, which the calls fill one after the other, in HBM.
    """

    g: Any
    out: Any
    inverse: Any
    earlier: Bias | None = None
    dvalues: Any = None


class Scratch(NamedTuple):
    """Vector memory of a kernel.

    Attributes:
      weights: a block's numerators, normalised where `Operands.keys` is None, ``[heads, queries, k]`` in
        the values' dtype.
      tile: logits of one head, ``[queries, k]``, if they are made of `Bias.columns`.
      turned: the weights, ``[heads, k, queries]``.
      slopes: the sum of the logits' cotangents over the examples, ``[heads, queries, k]`` float32.
      dvalues: the sum of the values' cotangents over blocks of queries, ``[c, k, lanes]`` float32; None
        where there is one block.
    """

    weights: Any
    tile: Any
    turned: Any = None
    slopes: Any = None
    dvalues: Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
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


def forward_kernel(plan: Plan, given: Operands, out: Any, inverse: Any, scratch: Scratch) -> None:
    """A block of the output, and one over its denominators."""
    group, block = pl.program_id(1), pl.program_id(2)

    @pl.when(jnp.logical_or(group == 0, plan.blocks > 1))
    def _() -> None:
        for j in range(plan.heads):
            scratch.weights[j] = shared_weights(plan, given, j, block, scratch)

    seen: Any = None if given.queries is None else given.queries[...].T
    seen = None if seen is None else only(inside(plan, block), seen)

    def put(j: int, share: jax.Array | None) -> None:
        summed = dot(scratch.weights[j], side_by_side(plan, given.values, j), 1, 0)
        for i in range(plan.examples):
            own = summed[:, plan.columns_of(i)]
            own = own if share is None else own * share[:, i : i + 1]
            out[i, :, plan.lanes_of(j)] = own.astype(out.dtype)

    if given.keys is None:
        for j in range(plan.heads):
            put(j, seen)
        return

    real = given.keys[...].astype(out.dtype)
    totals = [dot(scratch.weights[j], real, 1, 1) for j in range(plan.heads)]
    least = functools.reduce(jnp.minimum, [jnp.where(seen > 0.0, t, 1.0) for t in totals])

    def fast() -> None:
        for j, total in enumerate(totals):
            share = seen / jnp.maximum(total, LEAST)
            put(j, share)
            inverse[j] = share.T

    def exact(i: jax.Array, _: None) -> None:
        for j in range(plan.heads):
            weights = own_weights(plan, given, j, block, i, scratch)
            total = jnp.sum(weights, axis=1, keepdims=True)
            share = given.queries[pl.ds(i, 1)].T / jnp.maximum(total, LEAST)
            lanes = plan.lanes_of(j)
            summed = dot(weights.astype(out.dtype), given.values[i, :, lanes], 1, 0)
            out[i, :, lanes] = (summed * share).astype(out.dtype)
            inverse[j, pl.ds(i, 1)] = -share.T

    either(jnp.min(least) >= LEAST, fast, functools.partial(one_by_one, plan, exact))


def backward_kernel(
    plan: Plan, given: Operands, lower: Cotangent, dbias: Bias, dvalues: Any, scratch: Scratch
) -> None:
    """A block of the bias' cotangent, and of what adds up to the values'."""
    group, block = pl.program_id(1), pl.program_id(2)
    real = inside(plan, block)
    seen = None if given.queries is None else given.queries[...].T
    put = functools.partial(add_values, plan, dvalues, scratch.dvalues, block)

    @pl.when(group == 0)  # the only one where there are several blocks
    def _() -> None:
        begin_block(plan, given, block, scratch)

    def fast() -> None:
        for j in range(plan.heads):
            share = seen if lower.inverse is None else lower.inverse[j].T
            slope = only(real, slope_of(plan, lower.g, j, share))
            narrow = slope.astype(given.values.dtype)
            down = dot(narrow, side_by_side(plan, given.values, j), 1, 1)
            if lower.inverse is not None:
                down -= dot(shift_of(plan, lower.out, j, slope), given.keys[...], 1, 0)
            scratch.slopes[j] += scratch.weights[j].astype(jnp.float32) * down
            back = dot(scratch.turned[j], narrow, 1, 0)
            for i in range(plan.examples):
                put(i, j, back[:, plan.columns_of(i)])

    def exact(i: jax.Array, _: None) -> None:
        for j in range(plan.heads):
            weights = own_weights(plan, given, j, block, i, scratch)
            weights = only(real, weights * -lower.inverse[j, pl.ds(i, 1)].T)
            lanes = plan.lanes_of(j)
            g, out = only(real, lower.g[i, :, lanes]), lower.out[i, :, lanes]
            delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), 1, keepdims=True)
            scratch.slopes[j] += weights * (dot(g, given.values[i, :, lanes], 1, 1) - delta)
            put(i, j, dot(weights.astype(g.dtype), g, 0, 0))

    if lower.inverse is None:
        fast()
    else:
        least = [jnp.min(only(real, lower.inverse[j].T)) for j in range(plan.heads)]
        trusted = functools.reduce(jnp.minimum, least) >= 0.0
        either(trusted, fast, functools.partial(one_by_one, plan, exact))

    @pl.when(group == plan.groups - 1)
    def _() -> None:
        end_block(plan, given, lower, dbias, block, scratch)


def begin_block(plan: Plan, given: Operands, block: jax.Array, scratch: Scratch) -> None:
    """Makes a block's weights, which are zero in rows that are no queries, and clears its sums."""
    real = inside(plan, block)
    for j in range(plan.heads):
        own = only(real, shared_weights(plan, given, j, block, scratch).astype(jnp.float32))
        scratch.weights[j] = own.astype(scratch.weights.dtype)
        scratch.turned[j] = own.T.astype(scratch.turned.dtype)
        scratch.slopes[j] = jnp.zeros(scratch.slopes.shape[1:], jnp.float32)


def end_block(
    plan: Plan, given: Operands, lower: Cotangent, dbias: Bias, block: jax.Array, scratch: Scratch
) -> None:
    """Writes a block's cotangents of the bias."""
    for j in range(plan.heads):
        if (
            given.keys is None
        ):  # the weights are normalised, and their sums have not been subtracted
            down = scratch.slopes[j]
            own = scratch.weights[j].astype(jnp.float32)
            scratch.slopes[j] = down - own * jnp.sum(down, axis=1, keepdims=True)
        put_bias(plan, dbias, lower.earlier, scratch.slopes, j, block)


def either(condition: jax.Array, first: Any, second: Any) -> None:
    """Runs one of two functions."""
    pl.when(condition)(first)
    pl.when(jnp.logical_not(condition))(second)


def one_by_one(plan: Plan, function: Any) -> None:
    """Calls ``function(i, None)`` for every example of a program."""
    lax.fori_loop(jnp.int32(0), jnp.int32(plan.examples), function, None)


def logits_of(plan: Plan, bias: Bias, head: int, block: jax.Array, tile: Any) -> jax.Array:
    """A program's logits of one of its heads, ``[queries, k]`` float32."""
    if bias.columns is None:
        return bias.table[head].astype(jnp.float32)
    roll_out(tile, bias.columns[head], block * plan.queries, plan.shape[2])
    return tile[...] if bias.table is None else tile[...] + bias.table[head].astype(jnp.float32)


def band(plan: Plan, block: jax.Array) -> jax.Array | None:
    """What `Mask.band_rules` allow in a program's block; None: everything."""
    shape = plan.queries, plan.shape[3]
    query = lax.broadcasted_iota(jnp.int32, shape, 0) + (block * plan.queries + plan.offset)
    key = lax.broadcasted_iota(jnp.int32, shape, 1)
    rules = plan.mask.band_rules(query, key)
    return functools.reduce(jnp.logical_and, rules) if rules else None


def inside(plan: Plan, block: jax.Array) -> jax.Array | None:
    """Which rows of a block are queries, ``[queries, 1]``; None: all, in every block."""
    if plan.shape[2] % plan.queries == 0:
        return None
    row = lax.broadcasted_iota(jnp.int32, (plan.queries, 1), 0)
    return row + block * plan.queries < plan.shape[2]


def numerators(logits: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """``exp(logits - max)`` of every row, zero where it is not allowed."""
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    peak = jnp.max(logits, axis=1, keepdims=True)
    return jnp.exp(logits - jnp.maximum(peak, float(jnp.finfo(jnp.float32).min)))


def shared_weights(
    plan: Plan, given: Operands, head: int, block: jax.Array, scratch: Scratch
) -> jax.Array:
    """The weights of a block for all examples; see `Scratch.weights`."""
    logits = logits_of(plan, given.bias, head, block, scratch.tile)
    weights = numerators(logits, band(plan, block))
    if given.keys is None:
        weights /= jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), LEAST)
    return weights.astype(scratch.weights.dtype)


def own_weights(
    plan: Plan, given: Operands, head: int, block: jax.Array, example: jax.Array, scratch: Scratch
) -> jax.Array:
    """The numerators under an example's own maximum, ``[queries, k]`` float32."""
    allowed = jnp.broadcast_to(given.keys[pl.ds(example, 1)] > 0.0, (plan.queries, plan.shape[3]))
    pairs = band(plan, block)
    allowed = allowed if pairs is None else jnp.logical_and(pairs, allowed)
    return numerators(logits_of(plan, given.bias, head, block, scratch.tile), allowed)


def side_by_side(plan: Plan, x: Any, head: int) -> jax.Array:
    """One head of a block ``[c, n, lanes]``, the examples in columns, ``[n, c · e]``."""
    lanes = plan.lanes_of(head)
    return jnp.concatenate([x[i, :, lanes] for i in range(plan.examples)], axis=1)


def slope_of(plan: Plan, g: Any, head: int, share: jax.Array | None) -> jax.Array:
    """The output's cotangent times a number for every query and example, ``[queries, c · e]`` float32."""
    lanes, parts = plan.lanes_of(head), []
    for i in range(plan.examples):
        own = g[i, :, lanes].astype(jnp.float32)
        parts.append(own if share is None else own * share[:, i : i + 1])
    return jnp.concatenate(parts, axis=1)


def shift_of(plan: Plan, out: Any, head: int, slope: jax.Array) -> jax.Array:
    """``Σ_e out · slope``, ``[queries, c]`` float32."""
    products = slope * side_by_side(plan, out, head).astype(jnp.float32)
    sums = [
        jnp.sum(products[:, plan.columns_of(i)], axis=1, keepdims=True)
        for i in range(plan.examples)
    ]
    return jnp.concatenate(sums, axis=1)


def add_values(
    plan: Plan, dvalues: Any, total: Any, block: jax.Array, example: Any, head: int, value: Any
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


def put_bias(
    plan: Plan, dbias: Bias, earlier: Bias | None, slopes: Any, head: int, block: jax.Array
) -> None:
    """Writes a block of the table's cotangent, and adds its diagonals to that of the columns."""
    if dbias.table is not None:
        own = slopes[head]
        own = own if earlier is None else own + earlier.table[head].astype(jnp.float32)
        dbias.table[head] = own.astype(dbias.table.dtype)
    if dbias.columns is None:
        return
    sums = diagonal_sums(plan, slopes.at[head], block, dbias.columns.shape[2])

    @pl.when(block == 0)
    def _() -> None:
        dbias.columns[head] = sums if earlier is None else sums + earlier.columns[head]

    @pl.when(block > 0)
    def _() -> None:
        dbias.columns[head] += sums


def diagonal_sums(plan: Plan, slopes: Any, block: jax.Array, count: int) -> jax.Array:
    """The sums along a block's diagonals, ``[1, count]``: `tiles_tpu.roll_out` the other way round."""
    size, length = slopes.shape
    q_length, first = plan.shape[2], block * plan.queries
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, count), 0)
    lines = jnp.zeros((SUBLANES, count), jnp.float32)
    for begin in range(0, size, SUBLANES):
        rows = min(SUBLANES, size - begin)
        own = jnp.pad(slopes[begin : begin + rows], ((0, SUBLANES - rows), (0, count - length)))
        own = jnp.where(row + (first + begin) < q_length, own, 0.0)
        lines += pltpu.roll(own, lax.rem(count + q_length - 1 - begin - first, jnp.int32(count)), 1)
    for bit in (1, 2, 4):
        lines = jnp.where(row & bit != 0, pltpu.roll(lines, jnp.int32(count - bit), 1), lines)
    return lines.sum(axis=0, keepdims=True)
