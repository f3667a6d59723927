"""The static route on TPUs: Pallas kernels for logits that all examples share.

A program holds the logits of some heads, a block of queries and all keys in vector memory, computes the
numerators ``E = exp(S - max)`` once, and has nothing but matrix products left for the examples,

    out = E (m ∘ v) / E m,    dS = E ∘ (slope (m ∘ v)ᵀ - shift mᵀ),    dv = m ∘ Eᵀ slope,

with m the real keys, ``slope = g / E m`` and ``shift = Σ_e out · slope``. Several examples lie side by
side in the columns of a product. Where a denominator is too small to be trusted, a program computes the
weights of each of its examples from that example's own maximum instead.

The grid goes over groups of heads, groups of examples and, innermost, blocks of queries. What one group
of examples reads and adds up stays in vector memory while the blocks go by. If there is one block, as up
to 512 keys, it stays there while the examples go by, and with it the sum of its cotangents; if there are
several, the backward kernel is called once for every group of examples, and each call adds to the last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention import tiles_tpu
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Inputs
from synthesizer_jax.attention.static_kernels_tpu import (
    Cotangent,
    Operands,
    Plan,
    Scratch,
    backward_kernel,
    forward_kernel,
)
from synthesizer_jax.attention.terms import Relative, Static, Terms, wide
from synthesizer_jax.attention.tiles_tpu import LANES, VMEM, Bias, memory_of_a_program

MOST_HEADS = 8
"""Most heads of a program; their lanes fill whole registers together."""

TILES = 10
"""Tiles of logits in float32 that live at once: of the table, its cotangent, weights and temporaries."""

COLUMNS = 512
"""Columns that a program's examples fill in a matrix product, or a few more, where there is one block."""


def obstacle(q_length: int, inputs: Inputs) -> str:
    """Why these kernels do not take such inputs, or nothing."""
    _, biases, values, mask, _ = inputs
    heads = heads_of_a_program(*values.shape[2:])
    tiles = TILES * 4 * heads * values.shape[1] * min(q_length, LANES)
    if mask.prefix_lengths is not None:
        return "Mask.prefix_lengths opens other keys in every example"
    if not isinstance(mask.query_offset, int):
        return "Mask.query_offset is known only when the program runs"
    if wide(values, *jax.tree.leaves(biases)) != jnp.float32:
        return "64-bit numbers"
    if heads > MOST_HEADS:
        return f"heads of width {values.shape[3]} fill whole registers only by {heads}"
    room = room_for_examples(values, memory_of_a_program() - tiles, several=q_length > LANES)
    if room < 1:
        return f"{values.shape[1]} keys are too many for the vector memory"
    return ""


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("same", "interpret"))
def forward(
    q_length: int, query_offset: int, inputs: Inputs, *, same: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """The attention output, and what `backward` needs.

    Args:
      q_length: number of queries.
      query_offset: the mask's, which has to be known.
      inputs: biases, values and mask; see `obstacle`.
      same: the real queries of one position see the same keys in every example.
      interpret: run on any device, slowly.

    Returns:
      The output ``[b, q, h, e]``, and one over the denominators, ``[h, b, q]`` float32: 0 where a query
      is padding or sees no key, negative where the example's own maximum was subtracted. None if `same`.
    """
    _, biases, values, mask, _ = inputs
    plan, bias = plan_of(values, mask, q_length, query_offset), bias_of(biases)
    plan = dataclasses.replace(plan, groups=values.shape[0] // plan.examples)
    given = operands(plan, bias, values, mask, same=same)
    batch, heads = plan.shape[:2]
    rows = jax.ShapeDtypeStruct((heads, plan.groups, plan.examples, q_length), jnp.float32)
    out = jax.ShapeDtypeStruct((batch, q_length, heads * plan.width), values.dtype)
    out, inverse = call(
        forward_kernel,
        plan,
        (given,),
        (operand_specs(plan, given),),
        (out, None if same else rows),
        (line_spec(plan, of_keys=False), None if same else inverse_spec(plan)),
        scratch_of(plan, bias, values.dtype),
        products=1,
        interpret=interpret,
    )
    inverse = None if same else inverse.reshape(heads, batch, q_length)
    return out.reshape(batch, q_length, heads, plan.width), inverse


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
    plan = plan_of(values, mask, g.shape[1], query_offset)
    bias, bias_back = jax.vjp(bias_of, biases)
    given = operands(plan, bias, values, mask, same=inverse is None)
    lower = Cotangent(flat(g), None, None)
    if inverse is not None:
        rows = inverse.reshape(plan.shape[1], -1, plan.examples, g.shape[1])
        lower = Cotangent(flat(g), flat(out), rows)
    groups = values.shape[0] // plan.examples
    calls = 1 if plan.blocks == 1 else groups
    for first in range(calls):
        part = dataclasses.replace(plan, first=first, groups=groups // calls)
        dbias, dvalues = add_cotangents(part, given, lower, interpret=interpret)
        lower = lower._replace(earlier=dbias, dvalues=dvalues)
    dbias = jax.tree.map(lambda x, y: x.astype(y.dtype), dbias, bias)
    dvalues = dvalues.reshape(values.shape)
    if inverse is not None:
        keys: Any = mask.keys(values.shape[1])
        dvalues = jnp.where(keys[..., None, None], dvalues, 0)
    (dbiases,) = bias_back(dbias)
    return inputs.cotangents((), dbiases, dvalues)


def add_cotangents(
    plan: Plan, given: Operands, lower: Cotangent, *, interpret: bool
) -> tuple[Bias, jax.Array]:
    """The cotangents of the bias and of values ``[b, k, h · e]``, those of the plan's examples added."""
    dtype, several = given.values.dtype, plan.blocks > 1
    line = line_spec(plan, of_keys=False)
    known = lower.inverse is not None
    earlier = lower.earlier is not None
    specs = Cotangent(
        g=line,
        out=line if known else None,
        inverse=inverse_spec(plan) if known else None,
        earlier=bias_specs(plan, given.bias) if earlier else None,
        dvalues=pl.BlockSpec(memory_space=pl.ANY) if earlier else None,
    )
    narrow = jnp.float32 if several else None
    shapes = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, narrow or x.dtype), given.bias),
        jax.ShapeDtypeStruct(given.values.shape, dtype),
    )
    scratch = scratch_of(plan, given.bias, dtype)
    block = (plan.heads, plan.queries, plan.shape[3])
    scratch = scratch._replace(
        turned=pltpu.VMEM((block[0], block[2], block[1]), dtype),
        slopes=pltpu.VMEM(block, jnp.float32),
    )
    if several:
        sums = (plan.examples, plan.shape[3], plan.lanes)
        scratch = scratch._replace(dvalues=pltpu.VMEM(sums, jnp.float32))
    return call(
        backward_kernel,
        plan,
        (given, lower),
        (operand_specs(plan, given), specs),
        shapes,
        (bias_specs(plan, given.bias), line_spec(plan, of_keys=True)),
        scratch,
        products=2,
        interpret=interpret,
    )


def heads_of_a_program(heads: int, width: int) -> int:
    """The fewest heads whose lanes are whole registers, or all."""
    fits = (n for n in range(1, heads) if heads % n == 0 and n * width % LANES == 0)
    return next(fits, heads)


def plan_of(values: jax.Array, mask: Mask, q_length: int, offset: int) -> Plan:
    """The plan for values ``[b, k, h, e]``."""
    batch, k_length, heads, width = values.shape
    group, memory = heads_of_a_program(heads, width), memory_of_a_program()
    row = TILES * 4 * group * k_length
    if 3 * q_length * row <= 2 * VMEM:  # the compiler keeps arrays in the rest
        memory = min(memory, VMEM)
    queries = rows_of_a_block(q_length, 2 * memory // (3 * row))
    examples = room_for_examples(values, memory - queries * row, several=queries < q_length)
    if queries == q_length:
        examples = min(examples, COLUMNS // width)
    return Plan(
        heads=group,
        examples=max(n for n in range(1, max(examples, 1) + 1) if batch % n == 0),
        queries=queries,
        width=width,
        shape=(batch, heads, q_length, k_length),
        first=0,
        groups=1,
        offset=offset,
        mask=Mask(causal=mask.causal, window=mask.window, ahead=mask.ahead),
        memory=memory,
    )


def rows_of_a_block(q_length: int, most: int) -> int:
    """All queries, or some 128 of them, so that blocks are equally long if that is possible."""
    if q_length <= most:
        return q_length
    sizes = range(LANES, max(most, LANES) + 1, LANES)
    return max((n for n in sizes if q_length % n == 0), default=min(sizes[-1], q_length))


def room_for_examples(values: jax.Array, memory: int, *, several: bool) -> int:
    """How many examples' values, outputs and cotangents fit in beside a program's tiles.

    Args:
      values: ``[b, k, h, e]``.
      memory: bytes that the tiles leave.
      several: there are several blocks of queries. Values and their cotangents are then there once, and
        summed in float32; otherwise they and the output and its cotangent are there twice.
    """
    _, k_length, heads, width = values.shape
    lanes = max(heads_of_a_program(heads, width) * width, LANES)
    size = values.dtype.itemsize
    line = k_length * lanes * (2 * size + 4 if several else 8 * size)
    return 2 * memory // (3 * line)


def operands(plan: Plan, bias: Bias, values: jax.Array, mask: Mask, *, same: bool) -> Operands:
    """The inputs in the kernels' layout; `same` as in `forward`."""
    batch, _, q_length, k_length = plan.shape
    in_groups = lambda x: x.astype(jnp.float32).reshape(-1, plan.examples, x.shape[-1])
    queries = mask.queries(q_length)
    queries = None if queries is None else jnp.broadcast_to(queries, (batch, q_length))
    if same:
        return Operands(bias, flat(values), None, None if queries is None else in_groups(queries))
    keys: Any = mask.keys(k_length)
    keys = jnp.broadcast_to(keys, (batch, k_length))
    pairs = mask.band(q_length, k_length)
    if pairs is None:
        seen = jnp.broadcast_to(keys.any(axis=1, keepdims=True), (batch, q_length))
    else:
        seen = jnp.matmul(keys.astype(jnp.bfloat16), pairs.T.astype(jnp.bfloat16)) > 0
    seen = seen if queries is None else seen & queries
    real = jnp.where(keys[..., None, None], values, 0)
    return Operands(bias, flat(real), in_groups(keys), in_groups(seen))


def bias_of(biases: Terms) -> Bias:
    """The sum of `Static` terms, one alone as it is, and that of `Relative` ones cut to the block."""
    tables = [t.logits for t in biases if isinstance(t, Static)]
    if len(tables) > 1:
        tables = [functools.reduce(operator.add, [x.astype(jnp.float32) for x in tables])]
    lines = tuple(t for t in biases if isinstance(t, Relative))
    return Bias(tables[0] if tables else None, tiles_tpu.bias_of(lines).columns)


def flat(x: jax.Array) -> jax.Array:
    """``[b, n, h, e]`` as ``[b, n, h · e]``."""
    return x.reshape(*x.shape[:2], -1)


def scratch_of(plan: Plan, bias: Bias, dtype: jnp.dtype) -> Scratch:
    """The forward kernel's vector memory."""
    block = (plan.queries, plan.shape[3])
    return Scratch(
        weights=pltpu.VMEM((plan.heads, *block), dtype),
        tile=None if bias.columns is None else pltpu.VMEM(block, jnp.float32),
    )


def line_spec(plan: Plan, *, of_keys: bool) -> pl.BlockSpec:
    """Blocks of ``[b, n, h · e]``: all keys, which stay while blocks of queries go by, or such a block."""
    if not of_keys:
        return pl.BlockSpec(
            (plan.examples, plan.queries, plan.lanes),
            lambda heads, group, block: (group + plan.first, block, heads),
        )
    return pl.BlockSpec(
        (plan.examples, plan.shape[3], plan.lanes),
        lambda heads, group, block: (group + plan.first, 0, heads),
        pipeline_mode=pl.Buffered(1) if plan.blocks > 1 else None,
    )


def inverse_spec(plan: Plan) -> pl.BlockSpec:
    """Blocks of ``[h, b / c, c, q]``."""
    return pl.BlockSpec(
        (plan.heads, None, plan.examples, plan.queries),
        lambda heads, group, block: (heads, group + plan.first, 0, block),
    )


def bias_specs(plan: Plan, bias: Bias) -> Bias:
    """Blocks of the logits."""
    table = columns = None
    if bias.table is not None:
        shape: tuple[int, ...] = plan.heads, plan.queries, plan.shape[3]
        table = pl.BlockSpec(shape, lambda heads, _, block: (heads, block, 0))
    if bias.columns is not None:
        shape = plan.heads, 1, bias.columns.shape[2]
        columns = pl.BlockSpec(shape, lambda heads, *_: (heads, 0, 0))
    return Bias(table, columns)


def operand_specs(plan: Plan, given: Operands) -> Operands:
    """Blocks of the operands."""
    keys = pl.BlockSpec(
        (None, plan.examples, plan.shape[3]), lambda _, group, block: (group + plan.first, 0, 0)
    )
    queries = pl.BlockSpec(
        (None, plan.examples, plan.queries), lambda _, group, block: (group + plan.first, 0, block)
    )
    return Operands(
        bias=bias_specs(plan, given.bias),
        values=line_spec(plan, of_keys=True),
        keys=None if given.keys is None else keys,
        queries=None if given.queries is None else queries,
    )


def call(
    kernel: Any,
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
    """`pl.pallas_call` with estimates of its costs; results of earlier calls are added to in place."""
    leaves = jax.tree.leaves(arguments)
    varying = jax.typeof(leaves[0]).mat
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying), shapes
    )
    results = len(jax.tree.leaves(shapes))
    grown = kernel is backward_kernel and arguments[1].earlier is not None
    first = len(leaves) - results
    return pl.pallas_call(
        functools.partial(kernel, plan),
        out_shape=shapes,
        grid=plan.grid,
        in_specs=specs,
        out_specs=out_specs,
        scratch_shapes=(scratch,),
        input_output_aliases={first + i: i for i in range(results)} if grown else {},
        cost_estimate=costs(plan, arguments, shapes, products),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=plan.memory,
        ),
        interpret=interpret,
    )(*arguments)


def costs(plan: Plan, arguments: Any, shapes: Any, products: int) -> pl.CostEstimate:
    """What a call does: `products` matrix products, and what moves between HBM and vector memory."""
    logits, share = math.prod(plan.shape), plan.groups * plan.examples / plan.shape[0]
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    given, lower = arguments[0], arguments[1:]
    tables = size(given.bias) * (plan.groups if plan.blocks > 1 else 1)
    examples = size((given.values, given.keys, given.queries))
    if not lower:
        moved = tables + share * (examples + size(shapes))
    else:
        examples += size((lower[0].g, lower[0].out, lower[0].inverse, shapes[1]))
        moved = tables + size((shapes[0], lower[0].earlier)) + share * examples
    return pl.CostEstimate(
        flops=int(2 * products * plan.width * logits * share),
        transcendentals=logits // plan.shape[0] * (plan.groups if plan.blocks > 1 else 1),
        bytes_accessed=int(moved),
    )
