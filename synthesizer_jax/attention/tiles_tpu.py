"""What the TPU kernels share: the operands' layout and blocks, and a program's tile of logits."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Inputs
from synthesizer_jax.attention.terms import LowRank, Outer, Relative, Static, Terms

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What logits are made of, heads first; in a kernel, references to the blocks of a program.

    Attributes:
      products: `LowRank` and `Outer` terms of arrays ``[b or 1, h, n, r]``.
      values: ``[b, h, k, e]``.
      real: ``[b, 1, k]`` int32, which keys are real; None: all.
      query_segments: ``[b, 1, q]`` int32, in packed rows.
      key_segments: ``[b, 1, k]`` int32.
    """

    products: tuple[Any, ...]
    values: Any
    real: Any
    query_segments: Any
    key_segments: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bias:
    """What heads add to the logits of every example; in a kernel, references to blocks.

    Attributes:
      table: ``[h, q, k]`` float32, or None.
      columns: ``[h, 1, w]`` float32, or None: what depends on ``key - query`` alone. Column j belongs
        to ``j + 1 - q``; zeros fill up to a multiple of 128. A tile is made of it in place.
    """

    table: Any
    columns: Any


def bias_of(biases: Terms) -> Bias:
    """The sum of `Static` terms, and that of `Relative` ones that are cut to the block."""
    tables = [t.logits.astype(jnp.float32) for t in biases if isinstance(t, Static)]
    lines = [t.logits.astype(jnp.float32) for t in biases if isinstance(t, Relative)]
    columns = None
    if lines:
        line = functools.reduce(operator.add, lines)
        columns = jnp.pad(line, ((0, 0), (0, -line.shape[1] % LANES)))[:, None]
    return Bias(functools.reduce(operator.add, tables) if tables else None, columns)


def turned(bias: Bias, length: int) -> Bias:
    """The bias for tiles whose rows are keys: the columns of q + k = `length` from last to first."""
    if bias.columns is None:
        return bias
    used = bias.columns[..., : length - 1]
    rest = bias.columns[..., length - 1 :]
    return dataclasses.replace(bias, columns=jnp.concatenate([used[..., ::-1], rest], axis=-1))


def operands(inputs: Inputs) -> Operands:
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


def fill(tile: Any, bias: Bias, rows: int, *, turned: bool = False) -> None:
    """Makes a program's bias ``[size, length]``, once for all examples.

    Args:
      tile: where it goes.
      bias: what it is made of.
      rows: number of rows of the whole bias, q, or k where `turned`.
      turned: the table's rows are columns here; the bias's `columns` are turned already.
    """
    if tile is None:
        return
    block, example = pl.program_id(1), pl.program_id(2)

    @pl.when(example == 0)
    def _() -> None:
        if bias.columns is not None:
            roll_out(tile, bias.columns[...], block * tile.shape[0], rows)
        if bias.table is not None:
            table = bias.table[...].T if turned else bias.table[...]
            tile[...] = table if bias.columns is None else tile[...] + table


def roll_out(tile: Any, columns: jax.Array, first: jax.Array, rows: int) -> None:
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


def tile(
    own: Operands,
    bias: Any,
    *,
    mask: Mask,
    offset: int,
    size: int,
    length: int,
    turned: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """A program's logits, and which of them the mask allows (None: all).

    Args:
      own: the program's blocks.
      bias: its bias ``[size, length]``.
      mask: of which `causal`, `window` and `ahead` are read; the rest is in `own`.
      offset: position of the first query.
      size: rows of the tile.
      length: columns.
      turned: rows are keys and columns queries.
    """
    shape = (size, length)
    parts = [] if bias is None else [bias[...]]
    for term in own.products:
        if isinstance(term, LowRank):
            pair = term.queries[...], term.keys[...]
            parts.append(dot(*(pair[::-1] if turned else pair), 1, 1))
            continue
        first, count = (pl.program_id(1) * size, size) if turned else (0, length)
        halves = []
        for name, x in arrays(term):
            pair = x[...], places(term, name, first, count)
            halves.append(dot(*(pair[::-1] if turned else pair), 1, 1, exact=True))
        parts.append(halves[0] * halves[1])
    logits = functools.reduce(operator.add, parts) if parts else jnp.zeros(shape, jnp.float32)

    row = lax.broadcasted_iota(jnp.int32, shape, 0) + pl.program_id(1) * size
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    query, key = (column + offset, row) if turned else (row + offset, column)
    rules = mask.band_rules(query, key)
    if own.real is not None:
        rules.append((own.real[...].T if turned else own.real[...]) != 0)
    if own.query_segments is not None:
        ids = own.query_segments[...], own.key_segments[...]
        rules.append((ids[0] == ids[1].T) if turned else (ids[1] == ids[0].T))
    if not rules:
        return logits, None
    allowed = functools.reduce(operator.and_, rules)
    return logits, jnp.broadcast_to(allowed, shape)


def places(term: Outer, name: str, first: Any, count: int) -> jax.Array:
    """Which number of a factor each key has, as ones and zeros ``[count, A or B]``."""
    x, size = getattr(term, name), term.b.shape[-1]
    shape = (count, x.shape[-1])
    key = lax.broadcasted_iota(jnp.int32, shape, 0) + first
    divide = lax.div if name == "a" else lax.rem
    index = divide(key, jnp.int32(size))
    return (index == lax.broadcasted_iota(jnp.int32, shape, 1)).astype(x.dtype)


def dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, *, exact: bool = False) -> jax.Array:
    """A matrix product over the given axes, float32; `exact`: without rounding float32 factors."""
    dims = (((x_axis,), (y_axis,)), ((), ()))
    precision = lax.Precision.HIGHEST if exact and x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def only(allowed: jax.Array | None, weights: jax.Array) -> jax.Array:
    """The weights, zero where the mask forbids."""
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def call(
    kernel: Callable[..., None],
    arguments: tuple[Any, Bias],
    shapes: Any,
    *,
    specs: Any,
    out_specs: Any,
    grid: tuple[int, int, int],
    work: int,
    tile_shape: tuple[int, int],
    interpret: bool,
    scratch: tuple[int, ...] = (),
) -> Any:
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
    rooms = ([tile_shape] if some_bias else []) + ([scratch] if scratch else [])
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=grid,
        in_specs=specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(room, jnp.float32) for room in rooms],
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


def arrays(term: Any) -> list[tuple[str, Any]]:
    """The arrays of a term with their names."""
    names = ("a", "b") if isinstance(term, Outer) else ("queries", "keys")
    return [(name, getattr(term, name)) for name in names]


def width(products: tuple[Any, ...]) -> int:
    """Multiply-adds of a logit."""
    return sum(
        sum(x.shape[-1] for _, x in arrays(t)) if isinstance(t, Outer) else t.keys.shape[-1]
        for t in products
    )


def operand_specs(own: Operands, *, queries: int, keys: int) -> Operands:
    """Blocks of so many queries and keys."""
    products = tuple(
        dataclasses.replace(
            term, **{n: spec(x, keys if n == "keys" else queries) for n, x in arrays(term)}
        )
        for term in own.products
    )
    return Operands(
        products=products,
        values=spec(own.values, keys),
        real=line_spec(own.real, keys),
        query_segments=line_spec(own.query_segments, queries),
        key_segments=line_spec(own.key_segments, keys),
    )


def spec(x: Any, size: int) -> pl.BlockSpec:
    """Blocks of ``[b or 1, h, n, r]``: an example, a head and `size` positions."""
    shared, whole = x.shape[0] == 1, size == x.shape[2]
    return pl.BlockSpec(
        (None, None, size, x.shape[3]),
        lambda head, block, example: (0 if shared else example, head, 0 if whole else block, 0),
    )


def row_spec(x: Any, size: int) -> pl.BlockSpec:
    """Blocks of ``[b, h, 1, q]``."""
    whole = size == x.shape[3]
    return pl.BlockSpec(
        (None, None, 1, size),
        lambda head, block, example: (example, head, 0, 0 if whole else block),
    )


def line_spec(x: Any, size: int) -> pl.BlockSpec | None:
    """Blocks of ``[b or 1, 1, n]``."""
    if x is None:
        return None
    shared, whole = x.shape[0] == 1, size == x.shape[2]
    return pl.BlockSpec(
        (None, 1, size),
        lambda head, block, example: (0 if shared else example, 0, 0 if whole else block),
    )


def bias_spec(bias: Bias, size: int, *, turned: bool = False) -> Bias:
    """Blocks of some queries with all keys, or `turned` of all queries with some keys."""
    table = columns = None
    if bias.table is not None:
        _, q, k = bias.table.shape
        table = pl.BlockSpec(
            (None, q, size) if turned else (None, size, k),
            lambda head, block, _: (head, 0, block) if turned else (head, block, 0),
        )
    if bias.columns is not None:
        columns = pl.BlockSpec((None, 1, bias.columns.shape[2]), lambda head, *_: (head, 0, 0))
    return Bias(table, columns)


def heads_first(x: jax.Array) -> jax.Array:
    """``[b, n, h, r]`` to ``[b, h, n, r]``, and back."""
    return x.swapaxes(1, 2)


def memory_of_a_program() -> int:
    """Bytes: most of the chip's vector memory where the chip is known, else what all after TPU v4 have."""
    if not pltpu.is_tpu_device():
        return VMEM
    return pltpu.get_tpu_info().vmem_capacity_bytes // 8 * 7
