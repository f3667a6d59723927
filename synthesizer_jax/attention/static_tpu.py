"""The static route on TPUs: Pallas kernels for logits that all examples share.

A program holds the logits of some heads, a block of queries and all keys in vector memory. Examples are
the innermost axis of the grid: the numerators ``E = exp(S - max)`` are computed with the first examples
and serve all others, for which only matrix products are left,

    out = E (m ∘ v) / E m,    dS = E ∘ (slope (m ∘ v)ᵀ - shift mᵀ),    dv = m ∘ Eᵀ slope,

with m the real keys, ``slope = g / E m`` and ``shift = Σ_e out · slope``. Several examples lie side by
side in the columns of a product. Where a denominator is too small to be trusted, a program computes the
weights of each of its examples from that example's own maximum instead.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention import tiles_tpu
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Inputs
from synthesizer_jax.attention.terms import Relative, Static, Terms, wide
from synthesizer_jax.attention.tiles_tpu import LANES, SUBLANES, VMEM, Bias, dot, only, roll_out

LEAST = 2.0**-64
"""The smallest denominator that is trusted; see `static.LEAST`."""

MOST_HEADS = 8
"""Most heads of a program; their lanes fill whole registers together."""

TILES = 2 * 2**20
"""Most logits of a program's heads, in bytes of float32."""

COLUMNS = 512
"""Columns that the examples of a program fill in a matrix product, if there are so many."""

LINES = 2 * 2**20
"""Most bytes of a program's block of values."""


class Operands(NamedTuple):
    """What both kernels read; in a kernel, references to the blocks of a program.

    Attributes:
      bias: the logits.
      values: ``[b, k, h · e]``, zero where keys are padding.
      keys: ``[b / c, c, k]`` float32, 1 for real keys; None: the queries of one position see
        the same keys in every example.
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
    """

    g: Any
    out: Any
    inverse: Any


class Scratch(NamedTuple):
    """Vector memory that lasts from one program to the next.

    Attributes:
      weights: a block's numerators, normalised where all examples have the same,
        ``[heads, queries, k]`` in the values' dtype.
      turned: the same, ``[heads, k, queries]``.
      tile: logits of one head, ``[queries, k]``, where `Bias.columns` are made into them.
      slopes: the sum of the logits' cotangents over the examples, ``[heads, queries, k]`` float32.
      dvalues: that of the values' cotangents over blocks of queries, ``[b, k, lanes]`` float32; None for
        one block.
    """

    weights: Any
    turned: Any = None
    tile: Any = None
    slopes: Any = None
    dvalues: Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut into programs, and what all of them know.

    Attributes:
      heads: of a program.
      queries: of a program.
      examples: of a program.
      width: of a head.
      shape: ``(b, h, q, k)`` of all logits.
      offset: position of the first query.
      causal: as in `Mask`.
      window: as in `Mask`.
    """

    heads: int
    queries: int
    examples: int
    width: int
    shape: tuple[int, int, int, int]
    offset: int
    causal: bool
    window: int | None

    @property
    def grid(self) -> tuple[int, int, int]:
        """Numbers of groups of heads, blocks of queries and groups of examples."""
        batch, heads, q_length, _ = self.shape
        return heads // self.heads, pl.cdiv(q_length, self.queries), batch // self.examples

    @property
    def lanes(self) -> int:
        """Of a program's heads."""
        return self.heads * self.width

    def lanes_of(self, head: int) -> slice:
        """Where one of the program's heads lies among them."""
        return slice(head * self.width, (head + 1) * self.width)


def supported(inputs: Inputs) -> bool:
    """Whether the kernels take such inputs: no prefix or traced offset, and no 64-bit numbers."""
    _, biases, values, mask, _ = inputs
    plain = mask.prefix_lengths is None and isinstance(mask.query_offset, int)
    narrow = wide(values, *jax.tree.leaves(biases)) == jnp.float32
    return plain and narrow and heads_of_a_program(*values.shape[2:]) <= MOST_HEADS


def heads_of_a_program(heads: int, width: int) -> int:
    """The fewest heads whose lanes are whole registers, or all."""
    fits = (n for n in range(1, heads) if heads % n == 0 and n * width % LANES == 0)
    return next(fits, heads)


def plan_of(values: jax.Array, mask: Mask, q_length: int, offset: int) -> Plan:
    """The plan for values ``[b, k, h, e]``."""
    batch, k_length, heads, width = values.shape
    group = heads_of_a_program(heads, width)
    rows = TILES // (4 * group * k_length)
    queries = q_length if q_length <= max(rows, LANES) else max(LANES, rows // LANES * LANES)
    line = k_length * max(group * width, LANES) * values.dtype.itemsize
    most = max(1, min(LINES // line, COLUMNS // width))
    examples = max(n for n in range(1, most + 1) if batch % n == 0)
    return Plan(
        heads=group,
        queries=queries,
        examples=examples,
        width=width,
        shape=(batch, heads, q_length, k_length),
        offset=offset,
        causal=mask.causal,
        window=mask.window,
    )


def operands(plan: Plan, bias: Bias, values: jax.Array, mask: Mask, *, same: bool) -> Operands:
    """The inputs in the kernels' layout; `same` as in `forward`."""
    batch, _, q_length, k_length = plan.shape
    in_groups = lambda x: x.reshape(-1, plan.examples, x.shape[-1])
    queries = mask.queries(q_length)
    queries = None if queries is None else jnp.broadcast_to(queries, (batch, q_length))
    if same:
        seen = None if queries is None else in_groups(queries.astype(jnp.float32))
        return Operands(bias, flat(values), None, seen)
    keys = jnp.broadcast_to(mask.keys(k_length), (batch, k_length))
    band = mask.band(q_length, k_length)
    if band is None:
        seen = jnp.broadcast_to(keys.any(axis=1, keepdims=True), (batch, q_length))
    else:
        seen = jnp.matmul(keys.astype(jnp.bfloat16), band.T.astype(jnp.bfloat16)) > 0
    seen = seen if queries is None else seen & queries
    return Operands(
        bias=bias,
        values=flat(jnp.where(keys[..., None, None], values, 0)),
        keys=in_groups(keys.astype(jnp.float32)),
        queries=in_groups(seen.astype(jnp.float32)),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("same", "interpret"))
def forward(
    q_length: int, query_offset: int, inputs: Inputs, *, same: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """The attention output, and what `backward` needs.

    Args:
      q_length: number of queries.
      query_offset: the mask's, which has to be known.
      inputs: biases, values and mask; see `supported`.
      same: the real queries of one position see the same keys in every example.
      interpret: run on any device, slowly.

    Returns:
      The output ``[b, q, h, e]``, and one over the denominators, ``[h, b, q]`` float32: 0 where a query
      is padding or sees no key, negative where the example's own maximum was subtracted. None if `same`.
    """
    _, biases, values, mask, _ = inputs
    plan, bias = plan_of(values, mask, q_length, query_offset), bias_of(biases)
    given = operands(plan, bias, values, mask, same=same)
    batch, heads, _, k_length = plan.shape
    out = jax.ShapeDtypeStruct((batch, q_length, heads * plan.width), values.dtype)
    rows = (heads, batch // plan.examples, plan.examples, q_length)
    inverse = None if same else jax.ShapeDtypeStruct(rows, jnp.float32)
    block = (plan.queries, k_length)
    scratch = Scratch(
        weights=pltpu.VMEM((plan.heads, *block), values.dtype),
        tile=None if bias.columns is None else pltpu.VMEM(block, jnp.float32),
    )
    out, inverse = call(
        forward_kernel,
        plan,
        (given,),
        (operand_specs(plan, given),),
        (out, inverse),
        (line_spec(plan, of_keys=False), None if same else inverse_spec(plan)),
        scratch,
        products=1,
        interpret=interpret,
    )
    out = out.reshape(batch, q_length, heads, plan.width)
    return out, None if same else inverse.reshape(heads, batch, q_length)


def forward_kernel(plan: Plan, given: Operands, out: Any, inverse: Any, scratch: Scratch) -> None:
    """A block of the output."""
    block, group = pl.program_id(1), pl.program_id(2)

    @pl.when(group == 0)
    def _() -> None:
        for j in range(plan.heads):
            own = numerators(logits_of(plan, given.bias, j, block, scratch.tile), band(plan, block))
            if given.keys is None:
                own /= jnp.maximum(jnp.sum(own, axis=1, keepdims=True), LEAST)
            scratch.weights[j] = own.astype(scratch.weights.dtype)

    seen = None if given.queries is None else only(inside(plan, block), given.queries[...].T)

    def put(j: int, share: jax.Array | None) -> None:
        summed = dot(scratch.weights[j], side_by_side(plan, given.values, j), 1, 0)
        for i in range(plan.examples):
            own = summed[:, i * plan.width : (i + 1) * plan.width]
            own = own if share is None else own * share[:, i : i + 1]
            out[i, :, plan.lanes_of(j)] = own.astype(out.dtype)

    if given.keys is None:
        for j in range(plan.heads):
            put(j, seen)
        return

    real = given.keys[...].astype(out.dtype)
    totals = [dot(scratch.weights[j], real, 1, 1) for j in range(plan.heads)]
    least = functools.reduce(jnp.minimum, [jnp.where(seen > 0.0, t, 1.0) for t in totals])
    trusted = jnp.min(least) >= LEAST

    @pl.when(trusted)
    def _() -> None:
        for j, total in enumerate(totals):
            share = seen / jnp.maximum(total, LEAST)
            put(j, share)
            inverse[j] = share.T

    def exact(i: jax.Array, _: None) -> None:
        for j in range(plan.heads):
            weights, total = own_weights(plan, given, j, block, i, scratch.tile)
            share = given.queries[pl.ds(i, 1)].T / jnp.maximum(total, LEAST)
            lanes = plan.lanes_of(j)
            summed = dot(weights.astype(out.dtype), given.values[i, :, lanes], 1, 0)
            out[i, :, lanes] = (summed * share).astype(out.dtype)
            inverse[j, pl.ds(i, 1)] = -share.T

    @pl.when(jnp.logical_not(trusted))
    def _() -> None:
        lax.fori_loop(0, plan.examples, exact, None)


@functools.partial(jax.jit, static_argnums=0, static_argnames="interpret")
def backward(
    query_offset: int,
    inputs: Inputs,
    out: jax.Array,
    inverse: jax.Array | None,
    g: jax.Array,
    *,
    interpret: bool = False,
) -> Inputs:
    """The cotangents of the inputs.

    Args:
      query_offset: as in `forward`.
      inputs: what `forward` was given.
      out: what that returned.
      inverse: likewise.
      g: the cotangent of `out`.
      interpret: run on any device, slowly.
    """
    _, biases, values, mask, _ = inputs
    q_length, same = g.shape[1], inverse is None
    plan = plan_of(values, mask, q_length, query_offset)
    bias, bias_back = jax.vjp(bias_of, biases)
    given = operands(plan, bias, values, mask, same=same)
    batch, heads, _, k_length = plan.shape
    if inverse is not None:
        inverse = inverse.reshape(heads, -1, plan.examples, q_length)
    lower = Cotangent(flat(g), None if same else flat(out), inverse)
    line = line_spec(plan, of_keys=False)
    lower_specs = Cotangent(line, *((None, None) if same else (line, inverse_spec(plan))))
    block, several = (plan.queries, k_length), plan.grid[1] > 1
    memory = lambda *shape, dtype=jnp.float32: pltpu.VMEM(shape, dtype)
    scratch = Scratch(
        weights=memory(plan.heads, *block, dtype=values.dtype),
        turned=memory(plan.heads, *block[::-1], dtype=values.dtype),
        tile=None if bias.columns is None else memory(*block),
        slopes=memory(plan.heads, *block),
        dvalues=memory(batch, k_length, plan.lanes) if several else None,
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (bias, flat(values)))
    dbias, dvalues = call(
        backward_kernel,
        plan,
        (given, lower),
        (operand_specs(plan, given), lower_specs),
        shapes,
        (bias_specs(plan, bias), line_spec(plan, of_keys=True, late=several)),
        scratch,
        products=2,
        interpret=interpret,
    )
    dvalues = dvalues.reshape(values.shape)
    if not same:
        dvalues = jnp.where(mask.keys(k_length)[..., None, None], dvalues, 0)
    return inputs.cotangents((), *bias_back(dbias), dvalues)


def bias_of(biases: Terms) -> Bias:
    """The sum of `Static` terms, one alone as it is, and that of `Relative` ones cut to the block."""
    tables = [t.logits for t in biases if isinstance(t, Static)]
    if len(tables) > 1:
        tables = [functools.reduce(operator.add, [x.astype(jnp.float32) for x in tables])]
    lines = tuple(t for t in biases if isinstance(t, Relative))
    return Bias(tables[0] if tables else None, tiles_tpu.bias_of(lines).columns)


def backward_kernel(
    plan: Plan, given: Operands, lower: Cotangent, dbias: Bias, dvalues: Any, scratch: Scratch
) -> None:
    """A block of the logits' cotangents, and what it adds to those of the values."""
    block, group = pl.program_id(1), pl.program_id(2)
    real = inside(plan, block)
    seen = None if given.queries is None else given.queries[...].T

    @pl.when(group == 0)
    def _() -> None:
        for j in range(plan.heads):
            own = numerators(logits_of(plan, given.bias, j, block, scratch.tile), band(plan, block))
            if given.keys is None:
                own /= jnp.maximum(jnp.sum(own, axis=1, keepdims=True), LEAST)
            own = only(real, own)
            scratch.weights[j] = own.astype(scratch.weights.dtype)
            scratch.turned[j] = own.T.astype(scratch.turned.dtype)
            scratch.slopes[j] = jnp.zeros(scratch.slopes.shape[1:], jnp.float32)

    def fast() -> None:
        for j in range(plan.heads):
            share = seen if lower.inverse is None else lower.inverse[j].T
            slope = only(real, slope_of(plan, lower.g, j, share))
            down = dot(slope.astype(given.values.dtype), side_by_side(plan, given.values, j), 1, 1)
            if lower.inverse is not None:
                down -= dot(shift_of(plan, lower, slope, j), given.keys[...], 1, 0)
            scratch.slopes[j] += scratch.weights[j].astype(jnp.float32) * down
            back = dot(scratch.turned[j], slope.astype(given.values.dtype), 1, 0)
            for i in range(plan.examples):
                own = back[:, i * plan.width : (i + 1) * plan.width]
                add_values(plan, dvalues, scratch.dvalues, (block, group, i, j), own)

    def exact(i: jax.Array, _: None) -> None:
        for j in range(plan.heads):
            weights, _ = own_weights(plan, given, j, block, i, scratch.tile)
            weights = only(real, weights * -lower.inverse[j, pl.ds(i, 1)].T)
            lanes = plan.lanes_of(j)
            g = only(real, lower.g[i, :, lanes])
            out = lower.out[i, :, lanes]
            delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), 1, keepdims=True)
            down = dot(g, given.values[i, :, lanes], 1, 1) - delta
            scratch.slopes[j] += weights * down
            add_values(
                plan,
                dvalues,
                scratch.dvalues,
                (block, group, i, j),
                dot(weights.astype(g.dtype), g, 0, 0),
            )

    if lower.inverse is None:
        fast()
    else:
        least = [jnp.min(only(real, lower.inverse[j].T)) for j in range(plan.heads)]
        trusted = functools.reduce(jnp.minimum, least) >= 0.0
        pl.when(trusted)(fast)
        pl.when(jnp.logical_not(trusted))(lambda: lax.fori_loop(0, plan.examples, exact, None))

    @pl.when(group == plan.grid[2] - 1)
    def _() -> None:
        if given.keys is None:
            for j in range(plan.heads):
                down = scratch.slopes[j]
                rest = numerators(
                    logits_of(plan, given.bias, j, block, scratch.tile), band(plan, block)
                )
                rest /= jnp.maximum(jnp.sum(rest, axis=1, keepdims=True), LEAST)
                scratch.slopes[j] = down - rest * jnp.sum(down, axis=1, keepdims=True)
        put_bias(plan, dbias, scratch.slopes, block)


def logits_of(plan: Plan, bias: Bias, head: int, block: jax.Array, tile: Any) -> jax.Array:
    """A program's logits of one of its heads, ``[queries, k]`` float32."""
    if bias.columns is None:
        return bias.table[head].astype(jnp.float32)
    roll_out(tile, bias.columns[head], block * plan.queries, plan.shape[2])
    return tile[...] if bias.table is None else tile[...] + bias.table[head].astype(jnp.float32)


def band(plan: Plan, block: jax.Array) -> jax.Array | None:
    """What `causal` and `window` allow in a program's block; None: everything."""
    shape = plan.queries, plan.shape[3]
    query = lax.broadcasted_iota(jnp.int32, shape, 0) + block * plan.queries
    query, key = query + plan.offset, lax.broadcasted_iota(jnp.int32, shape, 1)
    rules = [key <= query] if plan.causal else []
    rules += [] if plan.window is None else [key > query - plan.window]
    return functools.reduce(jnp.logical_and, rules) if rules else None


def inside(plan: Plan, block: jax.Array) -> jax.Array | None:
    """Which rows of the last block are queries, ``[queries, 1]``; None: all, in every block."""
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


def own_weights(
    plan: Plan, given: Operands, head: int, block: jax.Array, example: jax.Array, tile: Any
) -> tuple[jax.Array, jax.Array]:
    """The numerators ``[queries, k]`` under an example's own maximum, and their sums ``[queries, 1]``."""
    real = given.keys[pl.ds(example, 1)] > 0.0
    pairs = band(plan, block)
    real = jnp.broadcast_to(real, (plan.queries, plan.shape[3]))
    allowed = real if pairs is None else jnp.logical_and(pairs, real)
    weights = numerators(logits_of(plan, given.bias, head, block, tile), allowed)
    return weights, jnp.sum(weights, axis=1, keepdims=True)


def side_by_side(plan: Plan, x: Any, head: int) -> jax.Array:
    """One head of blocks ``[c, n, lanes]``, the examples in columns, ``[n, c · e]``."""
    lanes = plan.lanes_of(head)
    return jnp.concatenate([x[i, :, lanes] for i in range(plan.examples)], axis=1)


def slope_of(plan: Plan, g: Any, head: int, share: jax.Array | None) -> jax.Array:
    """The output's cotangent times a number for every query and example, ``[queries, c · e]`` float32."""
    lanes, parts = plan.lanes_of(head), []
    for i in range(plan.examples):
        own = g[i, :, lanes].astype(jnp.float32)
        parts.append(own if share is None else own * share[:, i : i + 1])
    return jnp.concatenate(parts, axis=1)


def shift_of(plan: Plan, lower: Cotangent, slope: jax.Array, head: int) -> jax.Array:
    """``Σ_e out · slope``, ``[queries, c]`` float32."""
    products = slope * side_by_side(plan, lower.out, head).astype(jnp.float32)
    sums = [
        jnp.sum(products[:, i * plan.width : (i + 1) * plan.width], axis=1, keepdims=True)
        for i in range(plan.examples)
    ]
    return jnp.concatenate(sums, axis=1)


def add_values(
    plan: Plan,
    dvalues: Any,
    total: Any,
    at: tuple[jax.Array, jax.Array, Any, int],
    value: jax.Array,
) -> None:
    """Adds a block of queries' part of the values' cotangent ``[k, e]``, and writes it with the last."""
    block, group, example, head = at
    lanes = plan.lanes_of(head)
    if total is None:
        dvalues[example, :, lanes] = value.astype(dvalues.dtype)
        return
    row = group * plan.examples + example

    @pl.when(block == 0)
    def _() -> None:
        total[row, :, lanes] = value

    @pl.when(block > 0)
    def _() -> None:
        total[row, :, lanes] += value

    @pl.when(block == plan.grid[1] - 1)
    def _() -> None:
        dvalues[example, :, lanes] = total[row, :, lanes].astype(dvalues.dtype)


def put_bias(plan: Plan, dbias: Bias, slopes: Any, block: jax.Array) -> None:
    """Writes a block's cotangents of the table, and adds its diagonals to those of the columns."""
    if dbias.table is not None:
        dbias.table[...] = slopes[...].astype(dbias.table.dtype)
    if dbias.columns is None:
        return
    for j in range(plan.heads):
        sums = diagonal_sums(plan, slopes.at[j], block, dbias.columns.shape[2])

        @pl.when(block == 0)
        def _(j: int = j, sums: jax.Array = sums) -> None:
            dbias.columns[j] = sums

        @pl.when(block > 0)
        def _(j: int = j, sums: jax.Array = sums) -> None:
            dbias.columns[j] += sums


def diagonal_sums(plan: Plan, slopes: Any, block: jax.Array, count: int) -> jax.Array:
    """The sums along a block's diagonals, ``[1, count]``: `tiles_tpu.roll_out` the other way round."""
    size, length = slopes.shape
    q_length, first = plan.shape[2], block * plan.queries
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, count), 0)
    lines = jnp.zeros((SUBLANES, count), jnp.float32)
    for begin in range(0, size, SUBLANES):
        some = min(SUBLANES, size - begin)
        own = jnp.pad(slopes[begin : begin + some], ((0, SUBLANES - some), (0, count - length)))
        own = jnp.where(row + (first + begin) < jnp.minimum(q_length, first + size), own, 0.0)
        shift = lax.rem(count + q_length - 1 - begin - first, jnp.int32(count))
        lines += pltpu.roll(own, shift, 1)
    for bit in (1, 2, 4):
        lines = jnp.where(row & bit != 0, pltpu.roll(lines, count - bit, 1), lines)
    return lines.sum(axis=0, keepdims=True)


def flat(x: jax.Array) -> jax.Array:
    """``[b, n, h, e]`` as ``[b, n, h · e]``."""
    return x.reshape(*x.shape[:2], -1)


def line_spec(plan: Plan, *, of_keys: bool, late: bool = False) -> pl.BlockSpec:
    """Blocks of ``[b, n, h · e]``: all keys or a block of queries; `late`: with the last block only."""
    last = plan.grid[1] - 1

    def index(group: Any, block: Any, examples: Any) -> tuple[Any, ...]:
        if late:
            examples = jnp.where(block == last, examples, 0)
        return examples, 0 if of_keys else block, group

    rows = plan.shape[3] if of_keys else plan.queries
    return pl.BlockSpec((plan.examples, rows, plan.lanes), index)


def inverse_spec(plan: Plan) -> pl.BlockSpec:
    """Blocks of ``[h, b / c, c, q]``."""
    shape = plan.heads, None, plan.examples, plan.queries
    return pl.BlockSpec(shape, lambda group, block, examples: (group, examples, 0, block))


def bias_specs(plan: Plan, bias: Bias) -> Bias:
    """Blocks of the logits."""
    table = columns = None
    if bias.table is not None:
        block = plan.heads, plan.queries, plan.shape[3]
        table = pl.BlockSpec(block, lambda group, block, _: (group, block, 0))
    if bias.columns is not None:
        block = plan.heads, 1, bias.columns.shape[2]
        columns = pl.BlockSpec(block, lambda group, *_: (group, 0, 0))
    return Bias(table, columns)


def operand_specs(plan: Plan, given: Operands) -> Operands:
    """Blocks of the operands."""
    keys = pl.BlockSpec(
        (None, plan.examples, plan.shape[3]), lambda g, b, examples: (examples, 0, 0)
    )
    queries = pl.BlockSpec(
        (None, plan.examples, plan.queries), lambda g, block, examples: (examples, 0, block)
    )
    return Operands(
        bias=bias_specs(plan, given.bias),
        values=line_spec(plan, of_keys=True),
        keys=None if given.keys is None else keys,
        queries=None if given.queries is None else queries,
    )


def call(
    kernel: Callable[..., None],
    plan: Plan,
    arguments: tuple[Any, ...],
    specs: tuple[Any, ...],
    shapes: tuple[Any, ...],
    out_specs: tuple[Any, ...],
    scratch: Scratch,
    *,
    products: int,
    interpret: bool,
) -> Any:
    """`pl.pallas_call` over groups of heads, blocks of queries and, innermost, groups of examples."""
    varying = (jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arguments))
    axes = jax.sharding.ManualAxisType(varying=frozenset[str]().union(*varying))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes), shapes
    )
    size = lambda x: math.prod(x.shape) * x.dtype.itemsize
    moved = sum(map(size, jax.tree.leaves((arguments, shapes))))
    if plan.grid[2] > 1:  # a block of queries reads all values again
        moved += (plan.grid[1] - 1) * size(arguments[0].values)
    logits = math.prod(plan.shape)
    return pl.pallas_call(
        functools.partial(kernel, plan),
        out_shape=shapes,
        grid=plan.grid,
        in_specs=specs,
        out_specs=out_specs,
        scratch_shapes=(scratch,),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * plan.width * logits,
            transcendentals=logits // plan.shape[0],
            bytes_accessed=moved,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        interpret=interpret,
    )(*arguments)
