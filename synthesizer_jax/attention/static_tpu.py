"""The static route on TPUs: Pallas kernels for logits that all examples share.

A program holds the logits of some heads, a block of queries and all keys in vector memory, computes the
numerators ``E = exp(S - max)`` once, and has nothing but matrix products left for the examples,

    out = E (m ∘ v) / E m,    dS = E ∘ (D (m ∘ v)ᵀ - δ mᵀ),    dv = m ∘ Eᵀ D,

with m the real keys, ``D = g / E m`` and ``δ = Σ_e out · D``. Several examples lie side by side in the
columns of a product. Where a denominator is too small to be trusted, a program computes the
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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention import tiles_tpu
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Biases, FusedInputs, Products
from synthesizer_jax.attention.static_kernels_tpu import (
    BackwardOperands,
    Operands,
    Scratch,
    Tiling,
    backward_kernel,
    forward_kernel,
)
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.attention.tiles_tpu import LANES, VMEM, Bias, vmem_bytes_per_program
from synthesizer_jax.typing import PyTree

MAX_HEADS = 8
"""Most heads of a program; their lanes fill whole registers together."""

TILES = 10
"""Tiles of logits in float32 that live at once: of the table, its cotangent, weights and temporaries."""

COLUMNS = 512
"""Columns that a program's examples fill in a matrix product, or a few more, where there is one block."""


def obstacle(q_length: int, inputs: FusedInputs) -> str | None:
    """Returns why the kernels cannot take such inputs; None: they can."""
    _, biases, values, mask, _ = inputs
    heads = _heads_per_program(*values.shape[2:])
    tiles = TILES * 4 * heads * values.shape[1] * min(q_length, LANES)
    if mask.prefix_lengths is not None:
        return "the kernels do not read Mask.prefix_lengths"
    if not isinstance(mask.query_offset, int):
        return "Mask.query_offset is not known when the function is traced"
    if logits_dtype(values, *jax.tree.leaves(biases)) != jnp.float32:
        return "the kernels have no 64-bit numbers"
    if heads > MAX_HEADS:
        return (
            f"only {heads} heads of width {values.shape[3]} fill whole registers; at most {MAX_HEADS} "
            "are computed together"
        )
    free_bytes = vmem_bytes_per_program() - tiles
    if _examples_per_program(values, free_bytes, several=q_length > LANES) < 1:
        return f"{values.shape[1]} keys are too many for the vector memory"
    return None


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("same_keys", "interpret"))
def forward(
    q_length: int,
    query_offset: int,
    inputs: FusedInputs,
    *,
    same_keys: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The attention output, and what `backward` needs.

    Args:
      q_length: number of queries.
      query_offset: the mask's, which has to be known.
      inputs: biases, values and mask; see `obstacle`.
      same_keys: whether the real queries of one position see the same keys in every example.
      interpret: run on any device, slowly.

    Returns:
      The output ``[b, q, h, e]``, and one over the denominators, ``[h, b, q]`` float32: 0 where a query
      is padding or sees no key, negative where the example's own maximum was subtracted. None if
      `same_keys`.
    """
    _, biases, values, mask, _ = inputs
    plan, bias = _make_tiling(values, mask, q_length, offset=query_offset), prepare_bias(biases)
    plan = dataclasses.replace(plan, groups=values.shape[0] // plan.examples)
    blocks = operands(plan, bias, values, mask=mask, same_keys=same_keys)
    batch, heads = plan.shape[:2]
    rows = jax.ShapeDtypeStruct((heads, plan.groups, plan.examples, q_length), jnp.float32)
    out = jax.ShapeDtypeStruct((batch, q_length, heads * plan.width), values.dtype)
    out, inverse_row_sum = call_kernel(
        forward_kernel,
        plan,
        (blocks,),
        specs=(operand_specs(plan, blocks),),
        shapes=(out, None if same_keys else rows),
        out_specs=(_values_spec(plan, of_keys=False), None if same_keys else _inverse_spec(plan)),
        scratch=_scratch_of(plan, bias, values.dtype),
        products=1,
        interpret=interpret,
    )
    inverse_row_sum = None if same_keys else inverse_row_sum.reshape(heads, batch, q_length)
    return out.reshape(batch, q_length, heads, plan.width), inverse_row_sum


@functools.partial(jax.jit, static_argnums=0, static_argnames="interpret")
def backward(
    query_offset: int,
    inputs: FusedInputs,
    out: jax.Array,
    inverse_row_sum: jax.Array | None,
    g: jax.Array,
    *,
    interpret: bool = False,
) -> FusedInputs:
    """The cotangents of the inputs.

    Args:
      query_offset: as in `forward`.
      inputs: what `forward` was given.
      out: what that returned.
      inverse_row_sum: likewise.
      g: the cotangent of `out`.
      interpret: run on any device, slowly.
    """
    _, biases, values, mask, _ = inputs
    plan = _make_tiling(values, mask, g.shape[1], offset=query_offset)
    bias, bias_back = jax.vjp(prepare_bias, biases)
    blocks = operands(plan, bias, values, mask=mask, same_keys=inverse_row_sum is None)
    residuals = BackwardOperands(_flatten_heads(g), None, None)
    if inverse_row_sum is not None:
        rows = inverse_row_sum.reshape(plan.shape[1], -1, plan.examples, g.shape[1])
        residuals = BackwardOperands(_flatten_heads(g), _flatten_heads(out), rows)
    groups = values.shape[0] // plan.examples
    calls = 1 if plan.blocks == 1 else groups
    for first in range(calls):
        part = dataclasses.replace(plan, first=first, groups=groups // calls)
        dbias, dvalues = _add_cotangents(part, blocks, residuals, interpret=interpret)
        residuals = residuals._replace(earlier=dbias, dvalues=dvalues)
    dbias = jax.tree.map(lambda x, y: x.astype(y.dtype), dbias, bias)
    dvalues = dvalues.reshape(values.shape)
    if inverse_row_sum is not None:
        keys: Any = mask.keys(values.shape[1])
        dvalues = jnp.where(keys[..., None, None], dvalues, 0)
    (dbiases,) = bias_back(dbias)
    return inputs.cotangents(Products(), dbiases, dvalues)


def _add_cotangents(
    plan: Tiling, blocks: Operands, residuals: BackwardOperands, *, interpret: bool
) -> tuple[Bias, jax.Array]:
    """The cotangents of the bias and of values ``[b, k, h · e]``, those of the plan's examples added."""
    dtype, several = blocks.values.dtype, plan.blocks > 1
    line = _values_spec(plan, of_keys=False)
    known = residuals.inverse_row_sum is not None
    earlier = residuals.earlier is not None
    specs = BackwardOperands(
        g=line,
        out=line if known else None,
        inverse_row_sum=_inverse_spec(plan) if known else None,
        earlier=_bias_specs(plan, blocks.bias) if earlier else None,
        dvalues=pl.BlockSpec(memory_space=pl.ANY) if earlier else None,
    )
    narrow = jnp.float32 if several else None
    shapes = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, narrow or x.dtype), blocks.bias),
        jax.ShapeDtypeStruct(blocks.values.shape, dtype),
    )
    scratch = _scratch_of(plan, blocks.bias, dtype)
    block = (plan.heads, plan.queries, plan.shape[3])
    scratch = scratch._replace(
        transposed_tile=pltpu.VMEM((block[0], block[2], block[1]), dtype),
        dlogits_sum=pltpu.VMEM(block, jnp.float32),
    )
    if several:
        sums = (plan.examples, plan.shape[3], plan.lanes)
        scratch = scratch._replace(dvalues=pltpu.VMEM(sums, jnp.float32))
    return call_kernel(
        backward_kernel,
        plan,
        (blocks, residuals),
        specs=(operand_specs(plan, blocks), specs),
        shapes=shapes,
        out_specs=(_bias_specs(plan, blocks.bias), _values_spec(plan, of_keys=True)),
        scratch=scratch,
        products=2,
        interpret=interpret,
    )


def _heads_per_program(heads: int, width: int) -> int:
    """Returns the smallest number of heads whose lanes are whole registers, or the number of all heads."""
    fits = (n for n in range(1, heads) if heads % n == 0 and n * width % LANES == 0)
    return next(fits, heads)


def _make_tiling(values: jax.Array, mask: Mask, q_length: int, *, offset: int) -> Tiling:
    """The plan for values ``[b, k, h, e]``."""
    batch, k_length, heads, width = values.shape
    group, memory = _heads_per_program(heads, width), vmem_bytes_per_program()
    row = TILES * 4 * group * k_length
    if 3 * q_length * row <= 2 * VMEM:  # the compiler keeps arrays in the rest
        memory = min(memory, VMEM)
    queries = _queries_per_block(q_length, 2 * memory // (3 * row))
    examples = _examples_per_program(values, memory - queries * row, several=queries < q_length)
    if queries == q_length:
        examples = min(examples, COLUMNS // width)
    return Tiling(
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


def _queries_per_block(q_length: int, most: int) -> int:
    """All queries, or some 128 of them, so that blocks are equally long if that is possible."""
    if q_length <= most:
        return q_length
    sizes = range(LANES, max(most, LANES) + 1, LANES)
    return max((n for n in sizes if q_length % n == 0), default=min(sizes[-1], q_length))


def _examples_per_program(values: jax.Array, memory: int, *, several: bool) -> int:
    """How many examples' values, outputs and cotangents fit in beside a program's tiles.

    Args:
      values: ``[b, k, h, e]``.
      memory: bytes that the tiles leave.
      several: there are several blocks of queries. Values and their cotangents are then there once, and
        summed in float32; otherwise they and the output and its cotangent are there twice.
    """
    _, k_length, heads, width = values.shape
    lanes = max(_heads_per_program(heads, width) * width, LANES)
    size = values.dtype.itemsize
    line = k_length * lanes * (2 * size + 4 if several else 8 * size)
    return 2 * memory // (3 * line)


def operands(
    plan: Tiling, bias: Bias, values: jax.Array, *, mask: Mask, same_keys: bool
) -> Operands:
    """Returns the inputs in the layout of the kernels; `same_keys` as in `forward`."""
    batch, _, q_length, k_length = plan.shape
    in_groups = lambda x: x.astype(jnp.float32).reshape(-1, plan.examples, x.shape[-1])
    queries = mask.queries(q_length)
    queries = None if queries is None else jnp.broadcast_to(queries, (batch, q_length))
    if same_keys:
        return Operands(
            bias, _flatten_heads(values), None, None if queries is None else in_groups(queries)
        )
    keys: Any = mask.keys(k_length)
    keys = jnp.broadcast_to(keys, (batch, k_length))
    pairs = mask.band(q_length, k_length)
    if pairs is None:
        seen = jnp.broadcast_to(keys.any(axis=1, keepdims=True), (batch, q_length))
    else:
        seen = jnp.matmul(keys.astype(jnp.bfloat16), pairs.T.astype(jnp.bfloat16)) > 0
    seen = seen if queries is None else seen & queries
    real = jnp.where(keys[..., None, None], values, 0)
    return Operands(bias, _flatten_heads(real), in_groups(keys), in_groups(seen))


def prepare_bias(biases: Biases) -> Bias:
    """Returns the sum of the tables, one alone as it is, and that of the diagonals."""
    tables = [term.logits for term in biases.tables]
    if len(tables) > 1:
        tables = [functools.reduce(operator.add, [x.astype(jnp.float32) for x in tables])]
    columns = tiles_tpu.prepare_bias(biases._replace(tables=())).columns
    return Bias(tables[0] if tables else None, columns)


def _flatten_heads(x: jax.Array) -> jax.Array:
    """``[b, n, h, e]`` as ``[b, n, h · e]``."""
    return x.reshape(*x.shape[:2], -1)


def _scratch_of(plan: Tiling, bias: Bias, dtype: jnp.dtype) -> Scratch:
    """The forward kernel's vector memory."""
    block = (plan.queries, plan.shape[3])
    return Scratch(
        weights=pltpu.VMEM((plan.heads, *block), dtype),
        tile=None if bias.columns is None else pltpu.VMEM(block, jnp.float32),
    )


def _values_spec(plan: Tiling, *, of_keys: bool) -> pl.BlockSpec:
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


def _inverse_spec(plan: Tiling) -> pl.BlockSpec:
    """Blocks of ``[h, b / c, c, q]``."""
    return pl.BlockSpec(
        (plan.heads, None, plan.examples, plan.queries),
        lambda heads, group, block: (heads, group + plan.first, 0, block),
    )


def _bias_specs(plan: Tiling, bias: Bias) -> Bias:
    """Blocks of the logits."""
    table = columns = None
    if bias.table is not None:
        shape: tuple[int, ...] = plan.heads, plan.queries, plan.shape[3]
        table = pl.BlockSpec(shape, lambda heads, _, block: (heads, block, 0))
    if bias.columns is not None:
        shape = plan.heads, 1, bias.columns.shape[2]
        columns = pl.BlockSpec(shape, lambda heads, *_: (heads, 0, 0))
    return Bias(table, columns)


def operand_specs(plan: Tiling, blocks: Operands) -> Operands:
    """Blocks of the operands."""
    keys = pl.BlockSpec(
        (None, plan.examples, plan.shape[3]), lambda _, group, block: (group + plan.first, 0, 0)
    )
    queries = pl.BlockSpec(
        (None, plan.examples, plan.queries), lambda _, group, block: (group + plan.first, 0, block)
    )
    return Operands(
        bias=_bias_specs(plan, blocks.bias),
        values=_values_spec(plan, of_keys=True),
        keys=None if blocks.keys is None else keys,
        queries=None if blocks.queries is None else queries,
    )


def call_kernel(
    kernel: Callable[..., None],
    plan: Tiling,
    arguments: tuple[PyTree, ...],
    *,
    specs: tuple[PyTree, ...],
    shapes: tuple[PyTree, ...],
    out_specs: tuple[PyTree, ...],
    scratch: Scratch,
    products: int,
    interpret: bool,
) -> PyTree:
    """Runs `pl.pallas_call` with an estimate of the cost; adds to the results of earlier calls in place."""
    leaves = jax.tree.leaves(arguments)
    varying = jax.typeof(leaves[0]).mat
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying), shapes
    )
    num_results = len(jax.tree.leaves(shapes))
    accumulates = kernel is backward_kernel and arguments[1].earlier is not None
    first = len(leaves) - num_results
    return pl.pallas_call(
        functools.partial(kernel, plan),
        out_shape=shapes,
        grid=plan.grid,
        in_specs=specs,
        out_specs=out_specs,
        scratch_shapes=(scratch,),
        input_output_aliases={first + i: i for i in range(num_results)} if accumulates else {},
        cost_estimate=cost_estimate(plan, arguments, shapes, products=products),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=plan.memory,
        ),
        interpret=interpret,
    )(*arguments)


def cost_estimate(
    plan: Tiling, arguments: PyTree, shapes: PyTree, *, products: int
) -> pl.CostEstimate:
    """What a call does: `products` matrix products, and what moves between HBM and vector memory."""
    logits, share = math.prod(plan.shape), plan.groups * plan.examples / plan.shape[0]
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    blocks, residuals = arguments[0], arguments[1:]
    tables = size(blocks.bias) * (plan.groups if plan.blocks > 1 else 1)
    examples = size((blocks.values, blocks.keys, blocks.queries))
    if not residuals:
        moved = tables + share * (examples + size(shapes))
    else:
        examples += size(
            (residuals[0].g, residuals[0].out, residuals[0].inverse_row_sum, shapes[1])
        )
        moved = tables + size((shapes[0], residuals[0].earlier)) + share * examples
    return pl.CostEstimate(
        flops=int(2 * products * plan.width * logits * share),
        transcendentals=logits // plan.shape[0] * (plan.groups if plan.blocks > 1 else 1),
        bytes_accessed=int(moved),
    )
