"""What the TPU kernels share: the operands' layout and blocks, and a program's tile of logits."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Biases, FusedInputs, Products
from synthesizer_jax.attention.terms import Outer, Term
from synthesizer_jax.typing import PyTree

TILE = 256 * 1024
"""Most logits of a program: 1 MiB in float32, of which about six live at once in 16 MiB."""

VMEM = 32 * 2**20
"""What a program may take of a core's vector memory, which is that large from TPU v4 on."""

LANES = 128
"""A block's last axis is all of an array's, or a multiple of this."""

SUBLANES = 8
"""Rows of a register in float32."""

LOW = float(jnp.finfo(jnp.float32).min)
"""In the place of a forbidden logit; finite, so that differences are numbers."""


Ref: TypeAlias = Any
"""An array, or in a kernel a Pallas reference to a block of it, or the specification of the block."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What logits are made of, heads first; in a kernel, references to the blocks of a program.

    Attributes:
      products: terms of arrays ``[b or 1, h, n, r]``.
      values: ``[b, h, k, e]``.
      real: ``[b, 1, k]`` int32, which keys are real; None: all.
      query_segments: ``[b, 1, q]`` int32, in packed rows.
      key_segments: ``[b, 1, k]`` int32.
    """

    products: Products
    values: Ref
    real: Ref
    query_segments: Ref
    key_segments: Ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bias:
    """What heads add to the logits of every example; in a kernel, references to blocks.

    Attributes:
      table: ``[h, q, k]`` float32, or None.
      columns: ``[h, 1, w]`` float32, or None: what depends on ``key - query`` alone. Column j belongs
        to ``j + 1 - q``; zeros fill up to a multiple of 128. A tile is made of it in place.
    """

    table: Ref
    columns: Ref


def prepare_bias(biases: Biases) -> Bias:
    """Returns the sum of the tables, and that of the diagonals."""
    tables = [term.logits.astype(jnp.float32) for term in biases.tables]
    lines = [term.logits.astype(jnp.float32) for term in biases.diagonals]
    columns = None
    if lines:
        line = functools.reduce(operator.add, lines)
        columns = jnp.pad(line, ((0, 0), (0, -line.shape[1] % LANES)))[:, None]
    return Bias(functools.reduce(operator.add, tables) if tables else None, columns)


def transpose_bias(bias: Bias, length: int) -> Bias:
    """The bias for tiles whose rows are keys: the columns of q + k = `length` from last to first."""
    if bias.columns is None:
        return bias
    used = bias.columns[..., : length - 1]
    rest = bias.columns[..., length - 1 :]
    return dataclasses.replace(bias, columns=jnp.concatenate([used[..., ::-1], rest], axis=-1))


def operands(inputs: FusedInputs) -> Operands:
    """The inputs in the kernels' layout."""
    products, _, values, mask, _ = inputs
    apart = mask.key_lengths is not None or mask.key_valid is not None
    real = mask.keys(values.shape[1]) if apart else None  # segments tell padding by themselves

    def line(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.astype(jnp.int32)[:, None]

    return Operands(
        products=jax.tree.map(heads_first, products),
        values=heads_first(values),
        real=line(real),
        query_segments=line(mask.query_segments),
        key_segments=line(mask.key_segments),
    )


def fill_bias_tile(tile: Ref, bias: Bias, rows: int, *, transposed: bool = False) -> None:
    """Makes a program's bias ``[size, length]``, once for all examples.

    Args:
      tile: where it goes.
      bias: what it is made of.
      rows: number of rows of the whole bias, q, or k where `transposed`.
      transposed: the table's rows are columns here; the bias's `columns` are transposed already.
    """
    if tile is None:
        return
    block, example = pl.program_id(1), pl.program_id(2)

    @pl.when(example == 0)
    def _() -> None:
        if bias.columns is not None:
            roll_diagonals(tile, bias.columns[...], block * tile.shape[0], rows=rows)
        if bias.table is not None:
            table = bias.table[...].T if transposed else bias.table[...]
            tile[...] = table if bias.columns is None else tile[...] + table


def roll_diagonals(tile: Ref, columns: jax.Array, first: jax.Array, *, rows: int) -> None:
    """Fills a tile ``[size, length]`` with columns ``[1, count]``, each row one further right.

    Its row r is row ``first + r`` of the whole, which begins at column ``rows - 1 - first - r``. Eight rows
    are rolled one by one, and these eight together make all others: a single roll with a stride would do,
    but not before TPU v5.
    """
    size, length = tile.shape
    count = columns.shape[-1]
    lines = jnp.broadcast_to(columns, (SUBLANES, count))
    row = lax.broadcasted_iota(jnp.int32, lines.shape, 0)
    for bit in (1, 2, 4):
        lines = jnp.where(row & bit != 0, pltpu.roll(lines, jnp.int32(bit), 1), lines)
    for begin in range(0, size, SUBLANES):
        end = min(begin + SUBLANES, size)
        shift = lax.rem(first + (begin + count + 1 - rows), jnp.int32(count))
        tile[begin:end] = pltpu.roll(lines, shift, 1)[: end - begin, :length]


def logits_tile(
    blocks: Operands,
    bias: Ref,
    *,
    mask: Mask,
    offset: int,
    size: int,
    length: int,
    transposed: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """A program's logits, and which of them the mask allows (None: all).

    Args:
      own: the program's blocks.
      bias: its bias ``[size, length]``.
      mask: of which `causal`, `window` and `ahead` are read; the rest is in `own`.
      offset: position of the first query.
      size: rows of the tile.
      length: columns.
      transposed: rows are keys and columns queries.
    """
    shape = (size, length)
    parts = [] if bias is None else [bias[...]]
    for low_rank in blocks.products.low_rank:
        pair = low_rank.queries[...], low_rank.keys[...]
        parts.append(matmul(*(pair[::-1] if transposed else pair), axes=(1, 1)))
    for outer in blocks.products.outer:
        first, count = (pl.program_id(1) * size, size) if transposed else (0, length)
        halves = []
        for name, x in (("a", outer.a), ("b", outer.b)):
            pair = x[...], factor_one_hot(outer, name, first, count=count)
            halves.append(matmul(*(pair[::-1] if transposed else pair), axes=(1, 1), exact=True))
        parts.append(halves[0] * halves[1])
    logits = functools.reduce(operator.add, parts) if parts else jnp.zeros(shape, jnp.float32)

    row = lax.broadcasted_iota(jnp.int32, shape, 0) + pl.program_id(1) * size
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    query, key = (column + offset, row) if transposed else (row + offset, column)
    rules = mask.band_rules(query, key)
    if blocks.real is not None:
        rules.append((blocks.real[...].T if transposed else blocks.real[...]) != 0)
    if blocks.query_segments is not None:
        ids = blocks.query_segments[...], blocks.key_segments[...]
        rules.append((ids[0] == ids[1].T) if transposed else (ids[1] == ids[0].T))
    if not rules:
        return logits, None
    allowed = functools.reduce(operator.and_, rules)
    return logits, jnp.broadcast_to(allowed, shape)


def factor_one_hot(term: Outer, name: str, first: int | jax.Array, *, count: int) -> jax.Array:
    """Which number of a factor each key has, as ones and zeros ``[count, A or B]``."""
    x, size = getattr(term, name), term.b.shape[-1]
    shape = (count, x.shape[-1])
    key = lax.broadcasted_iota(jnp.int32, shape, 0) + first
    divide = lax.div if name == "a" else lax.rem
    index = divide(key, jnp.int32(size))
    return (index == lax.broadcasted_iota(jnp.int32, shape, 1)).astype(x.dtype)


def matmul(x: jax.Array, y: jax.Array, *, axes: tuple[int, int], exact: bool = False) -> jax.Array:
    """Multiplies matrices, in float32.

    Args:
      x: a matrix.
      y: a matrix.
      axes: the axes of `x` and of `y` that are summed over.
      exact: whether float32 factors are not rounded to bfloat16.
    """
    dims = (((axes[0],), (axes[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if exact and x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def mask_weights(allowed: jax.Array | None, weights: jax.Array) -> jax.Array:
    """The weights, zero where the mask forbids."""
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def call_kernel(
    kernel: Callable[..., None],
    arguments: tuple[PyTree, Bias],
    shapes: PyTree,
    *,
    specs: PyTree,
    out_specs: PyTree,
    grid: tuple[int, int, int],
    work: int,
    tile_shape: tuple[int, int],
    interpret: bool,
    scratch: tuple[int, ...] = (),
) -> PyTree:
    """`pl.pallas_call` over heads, blocks and, innermost, examples.

    Args:
      kernel: the program.
      arguments: what it reads.
      shapes: of what it writes.
      specs: the blocks of the arguments.
      out_specs: the blocks of the results.
      grid: numbers of heads, blocks and examples.
      work: multiply-adds for each logit.
      tile_shape: rows and columns of a program's logits.
      interpret: run on any device, slowly.
      scratch: shape of further float32 memory that lasts, after the bias's tile.
    """
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((arguments, shapes)))
    total = math.prod(grid) * math.prod(tile_shape)
    some_bias = bool(jax.tree.leaves(arguments[1]))
    varying = jax.typeof(jax.tree.leaves(arguments)[0]).mat
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying), shapes
    )
    scratch_tiles = ([tile_shape] if some_bias else []) + ([scratch] if scratch else [])
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=grid,
        in_specs=specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch_tiles],
        cost_estimate=pl.CostEstimate(
            flops=2 * work * total, transcendentals=total, bytes_accessed=moved
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        interpret=interpret,
    )(*arguments)


def block_size(rows: int, columns: int) -> int:
    """Rows of a tile: all, or a multiple of `LANES` such that the tile is not much above `TILE`."""
    return (
        rows if rows * columns <= TILE else min(rows, max(LANES, TILE // columns // LANES * LANES))
    )


def multiply_adds_per_logit(products: Products) -> int:
    """Returns the multiply-adds of a logit."""
    low_rank = sum(term.keys.shape[-1] for term in products.low_rank)
    return low_rank + sum(term.a.shape[-1] + term.b.shape[-1] for term in products.outer)


def product_specs(products: Products, *, queries: int, keys: int) -> Products:
    """Returns blocks of so many queries and keys of every array that is not None."""

    def specs(term: Term) -> Term:
        return term.map_arrays(lambda _, x, axes: spec(x, queries if axes[1] == "q" else keys))

    return jax.tree.map(specs, products, is_leaf=lambda x: isinstance(x, Term))


def operand_specs(blocks: Operands, *, queries: int, keys: int) -> Operands:
    """Returns blocks of so many queries and keys."""
    products = product_specs(blocks.products, queries=queries, keys=keys)
    return Operands(
        products=products,
        values=spec(blocks.values, keys),
        real=_line_spec(blocks.real, keys),
        query_segments=_line_spec(blocks.query_segments, queries),
        key_segments=_line_spec(blocks.key_segments, keys),
    )


def spec(x: Ref, size: int) -> pl.BlockSpec:
    """Blocks of ``[b or 1, h, n, r]``: an example, a head and `size` positions."""
    shared, whole = x.shape[0] == 1, size == x.shape[2]
    return pl.BlockSpec(
        (None, None, size, x.shape[3]),
        lambda head, block, example: (0 if shared else example, head, 0 if whole else block, 0),
    )


def row_spec(x: Ref, size: int) -> pl.BlockSpec:
    """Blocks of ``[b, h, 1, q]``."""
    whole = size == x.shape[3]
    return pl.BlockSpec(
        (None, None, 1, size),
        lambda head, block, example: (example, head, 0, 0 if whole else block),
    )


def _line_spec(x: Ref, size: int) -> pl.BlockSpec | None:
    """Blocks of ``[b or 1, 1, n]``."""
    if x is None:
        return None
    shared, whole = x.shape[0] == 1, size == x.shape[2]
    return pl.BlockSpec(
        (None, 1, size),
        lambda head, block, example: (0 if shared else example, 0, 0 if whole else block),
    )


def bias_spec(bias: Bias, size: int, *, transposed: bool = False) -> Bias:
    """Blocks of some queries with all keys, or `transposed` of all queries with some keys."""
    table = columns = None
    if bias.table is not None:
        _, q, k = bias.table.shape
        table = pl.BlockSpec(
            (None, q, size) if transposed else (None, size, k),
            lambda head, block, _: (head, 0, block) if transposed else (head, block, 0),
        )
    if bias.columns is not None:
        columns = pl.BlockSpec((None, 1, bias.columns.shape[2]), lambda head, *_: (head, 0, 0))
    return Bias(table, columns)


def heads_first(x: jax.Array) -> jax.Array:
    """``[b, n, h, r]`` to ``[b, h, n, r]``, and back."""
    return x.swapaxes(1, 2)


def vmem_bytes_per_program() -> int:
    """Bytes: most of the chip's vector memory where the chip is known, else what all after TPU v4 have."""
    if not pltpu.is_tpu_device():
        return VMEM
    return pltpu.get_tpu_info().vmem_capacity_bytes // 8 * 7
