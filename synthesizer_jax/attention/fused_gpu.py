"""The fused route on NVIDIA's GPUs: Pallas kernels, lowered by Triton.

A program computes the output of a block of queries of one head and example, and goes over the keys block by
block (Dao 2023, FlashAttention-2, section 3.1). Distances are looked up in their diagonals, so that a
relative bias needs no array of every logit.

The backward pass is three kernels without atomic operations, so that the order of its sums is always the
same: over blocks of queries, over blocks of keys, and over blocks of the bias that examples share. For
`Relative` the last one adds up all square blocks on one diagonal, which have the same distances, of all
examples: its result grows with the length, not with its square.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from synthesizer_jax.attention.fused import Biases, FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.mesh_axes import match_varying_axes
from synthesizer_jax.attention.terms import cap_logits, expand_diagonals, logits_dtype
from synthesizer_jax.base.typing import PyTree

MAX_WIDTH = 256
"""Widest rows of queries, keys and values."""

BIAS_PROGRAMS, BIAS_EXAMPLES = 1024, 4
"""About how many programs a bias's kernel is to have, to fill a GPU, and the fewest examples of one."""

Ref: TypeAlias = Any
"""An array, or in a kernel a Pallas reference to one."""


def obstacle(inputs: FusedInputs) -> str | None:
    """Returns why the kernels cannot take such inputs; None: they can."""
    products, biases, values, mask, positions = inputs
    if products.outer:
        return "the kernels have no Outer terms"
    if positions is not None or (mask.counts_in_segments and mask.has_band):
        return "positions inside packed segments are not looked up by the kernels"
    if not isinstance(mask.query_offset, int):
        return "Mask.query_offset is not known when the function is traced"
    if logits_dtype(values, *jax.tree.leaves((products, biases))) != jnp.float32:
        return "the kernels have no 64-bit numbers"
    if mask.allowed is not None and mask.allowed.size > 2**31:
        return "Mask.allowed is too large for the kernels"  # its int8's offsets have 32 bits until 4 GiB
    widest = max(x.shape[-1] for x in (values, *jax.tree.leaves(products)))
    return f"rows of {widest} numbers are too wide for the kernels" if widest > MAX_WIDTH else None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel divides the logits.

    Attributes:
      q: queries of a block, a power of two.
      k: keys of a block, a power of two.
      warps: warps of a program.
      stages: blocks of keys that are loaded ahead.
    """

    q: int
    k: int
    warps: int
    stages: int

    def fit(self, q_length: int, k_length: int) -> Blocks:
        """Returns the blocks for short rows; products need 16 rows."""
        q, k = (max(16, pl.next_power_of_2(n)) for n in (q_length, k_length))
        return dataclasses.replace(self, q=min(self.q, q), k=min(self.k, k))


def choose_blocks(kernel: str, row_bytes: int, *, has_bias: bool) -> Blocks:
    """Returns the blocks of a kernel for the bytes of a key's row, all terms together.

    Those up to 128 bytes were the fastest of about eight on an H200.
    """
    if row_bytes <= 128:
        return {
            "forward": Blocks(64, 32, 4, 3) if has_bias else Blocks(128, 64, 4, 3),
            "queries": Blocks(64, 32, 4, 3),
            "keys": Blocks(64, 64, 4, 3),
            "bias": Blocks(64, 64, 4, 2),
        }[kernel]
    if row_bytes <= 256:
        return Blocks(128, 64, 8, 2) if kernel == "forward" else Blocks(64, 64, 4, 2)
    return Blocks(64, 32, 4, 2) if kernel == "forward" else Blocks(32, 32, 4, 1)


class _Operands(NamedTuple):
    """What logits are made of; in a kernel, references to the arrays of one head.

    Attributes:
      queries: of each `LowRank` term, ``[b or 1, q, h, r]``.
      keys: ``[b or 1, k, h, r]`` likewise.
      values: ``[b, k, h, e]``.
      table: ``[h, q, k]``, the sum of all `Static` terms; None: there are none.
      columns: ``[h, q + k - 1]`` float32, the sum of all `Relative` terms; None: there are none.
      ends: ``[b]`` int32, keys from there on are padding; None: there is none.
      query_ends: ``[b]`` int32 likewise; None: there is none, or it is cleared.
      real: ``[b, k]``, which keys are real; None: those before `ends`.
      prefix: ``[b]`` int32, `Mask.prefix_lengths`.
      query_segments: ``[b, q]`` int32, in packed rows.
      key_segments: ``[b, k]`` int32.
      allowed: ``[b or 1, h or 1, q, k]``, `Mask.allowed`.
    """

    queries: tuple[Ref, ...]
    keys: tuple[Ref, ...]
    values: Ref
    table: Ref
    columns: Ref
    ends: Ref
    query_ends: Ref
    real: Ref
    prefix: Ref
    query_segments: Ref
    key_segments: Ref
    allowed: Ref


class _Residuals(NamedTuple):
    """What the backward kernels read beside the operands.

    Attributes:
      dout: the cotangent of the output, ``[b, q, h, e]``.
      row_max: of `SoftmaxStats`, ``[b, h, q]`` float32.
      inverse_row_sum: likewise.
      delta: `softmax_vjp_delta` likewise.
    """

    dout: Ref
    row_max: Ref
    inverse_row_sum: Ref
    delta: Ref


def _operand_axes(blocks: _Operands) -> _Operands:
    names = ("bqhr",) * len(blocks.queries), ("bkhr",) * len(blocks.keys)
    return _Operands(*names, "bkhr", "hqk", "hr", "b", "b", "bk", "b", "bq", "bk", "bhqk")


_RESIDUAL_AXES = _Residuals("bqhr", "bhq", "bhq", "bhq")


def _operands(inputs: FusedInputs, q_length: int) -> _Operands:
    """Returns the inputs as the kernels read them."""
    mask = inputs.mask
    holes = (mask.query_valid, mask.key_valid, mask.query_segments, mask.key_segments)
    is_end = all(x is None for x in holes)  # of which rows the kernels load no padding
    products, biases, values, *_ = inputs if is_end else inputs.cleared(q_length)
    keys, queries = mask.keys(values.shape[1]), mask.queries(q_length) if is_end else None
    cast = lambda x, dtype: None if x is None else x.astype(dtype)
    pairs = [
        (term.queries, term.keys, jnp.result_type(term.queries, term.keys)) for term in products.low_rank
    ]
    table, columns = biases.sums()
    return _Operands(
        tuple(_fill_width(queries.astype(dtype)) for queries, _, dtype in pairs),
        tuple(_fill_width(keys.astype(dtype)) for _, keys, dtype in pairs),
        _fill_width(values),
        table,
        columns,
        ends=_ends(keys),
        query_ends=_ends(queries),
        real=None if is_end else cast(keys, jnp.int8),
        prefix=cast(mask.prefix_lengths, jnp.int32),
        query_segments=cast(mask.query_segments, jnp.int32),
        key_segments=cast(mask.key_segments, jnp.int32),
        allowed=cast(mask.allowed, jnp.int8),
    )


def _ends(real: jax.Array | None) -> jax.Array | None:
    """Returns where the padding after the last real of ``[b, n]`` begins, ``[b]``."""
    if real is None:
        return None
    last = real.shape[1] - jnp.argmax(real[:, ::-1], axis=1)
    return jnp.where(real.any(axis=1), last, 0).astype(jnp.int32)


def _fill_width(x: jax.Array) -> jax.Array:
    """Returns ``[b, n, h, r]`` with zeros up to a power of two that products can take."""
    width = max(16, pl.next_power_of_2(x.shape[-1]))
    return x if width == x.shape[-1] else jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),))


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """What all programs of a kernel know.

    Attributes:
      mask: of which the band is read; the rest is in `_Operands`.
      lengths: the numbers of queries and keys.
      blocks: how they are divided.
      soft_cap: as in `attend`.
    """

    mask: Mask
    lengths: tuple[int, int]
    blocks: Blocks
    soft_cap: float | None

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of blocks of queries and of keys."""
        return pl.cdiv(self.lengths[0], self.blocks.q), pl.cdiv(self.lengths[1], self.blocks.k)

    def key_blocks(self, block: Ref, end: Ref) -> tuple[Ref, Ref]:
        """Returns the first and the last + 1 of the blocks of keys that a block of queries may see."""
        before, after = self._band
        query = block * self.blocks.q + self.mask.query_offset
        first: Ref = 0
        last: Ref = self.lengths[1] if end is None else end
        if before is not None:
            first = jnp.maximum(query - before, 0)
        if after is not None:
            last = jnp.clip(query + self.blocks.q + after, 0, last)
        return _floor_divide(first, self.blocks.k), _floor_divide(last + self.blocks.k - 1, self.blocks.k)

    def query_blocks(self, block: Ref) -> tuple[Ref, Ref]:
        """Returns the first and the last + 1 of the blocks of queries that may see a block of keys."""
        before, after = self._band
        key = block * self.blocks.k - self.mask.query_offset
        first: Ref = 0
        last: Ref = self.lengths[0]
        if after is not None:
            first = jnp.maximum(key - after, 0)
        if before is not None:
            last = jnp.clip(key + self.blocks.k + before, 0, last)
        return _floor_divide(first, self.blocks.q), _floor_divide(last + self.blocks.q - 1, self.blocks.q)

    def load_queries(self, blocks: _Operands, example: Ref, block: Ref) -> list[jax.Array]:
        """Returns a block of the queries of every term, zeros for padding: a NaN there has no effect."""
        place = example, block, self.blocks.q, self.lengths[0]
        return [_load_rows(x, *place, blocks.query_ends) for x in blocks.queries]

    def load_keys(self, blocks: _Operands, example: Ref, block: Ref) -> tuple[list[jax.Array], jax.Array]:
        """Returns a block of the keys of every term, and of the values, likewise."""
        place = example, block, self.blocks.k, self.lengths[1]
        keys = [_load_rows(x, *place, blocks.ends) for x in blocks.keys]
        return keys, _load_rows(blocks.values, *place, blocks.ends)

    @property
    def _band(self) -> tuple[int | None, int | None]:
        return (None, None) if self.mask.prefix_lengths is not None else self.mask.band

    def call(
        self,
        kernel: Callable[..., None],
        arguments: tuple[PyTree, ...],
        axes: tuple[PyTree, ...],
        shapes: PyTree,
        out_axes: PyTree,
        *,
        grid: tuple[int, int, int],
        products: int,
        interpret: bool,
    ) -> Any:
        """Calls a kernel on arrays whose axes are named by one letter each; it sees one head of them.

        Rows of queries and keys are numbered up to whole blocks. The second axis of the grid is that of
        heads. `products` is the number of multiply-adds that the kernel makes for a logit.
        """
        (q_count, k_count), blocks = self.counts, self.blocks
        rows = {"q": q_count * blocks.q, "k": k_count * blocks.k, "h": None}

        def spec(x: Ref, names: str) -> pl.BlockSpec | None:
            if x is None:
                return None
            shape = tuple(rows.get(a, n) for a, n in zip(names, x.shape, strict=True))
            at = [a == "h" and n > 1 for a, n in zip(names, x.shape, strict=True)]
            return pl.BlockSpec(shape, lambda _, head, __: tuple(head if here else 0 for here in at))

        specs, out_specs = (
            jax.tree.map(spec, tree, names, is_leaf=lambda x: x is None)
            for tree, names in ((arguments, axes), (shapes, out_axes))
        )
        batch, _, heads, _ = arguments[0].values.shape
        num_logits = batch * heads * math.prod(self.lengths)
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((arguments, shapes)))
        cost = pl.CostEstimate(
            flops=2 * products * num_logits, transcendentals=num_logits, bytes_accessed=moved
        )
        varying = jax.typeof(jax.tree.leaves(arguments)[0]).mat
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying), shapes
        )
        return pl.pallas_call(
            kernel,
            out_shape=shapes,
            grid=grid,
            in_specs=specs,
            out_specs=out_specs,
            cost_estimate=cost,
            compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            interpret=interpret,
        )(*arguments)


def _floor_divide(x: Ref, y: int) -> Ref:
    return x // y if isinstance(x, int) else lax.div(x, jnp.int32(y))


def _make_tiles(
    kernel: str, mask: Mask, blocks: _Operands, queries: tuple[int, int], soft_cap: float | None
) -> _Tiles:
    """Returns the tiles of a kernel; `queries` are their number and the position of the first."""
    q_length, offset = queries
    row_bytes = sum(x.shape[-1] * x.dtype.itemsize for x in blocks.keys)
    row_bytes = max(row_bytes, blocks.values.shape[-1] * blocks.values.dtype.itemsize)
    lengths = q_length, blocks.values.shape[1]
    has_bias = blocks.table is not None or blocks.columns is not None
    sizes = choose_blocks(kernel, row_bytes, has_bias=has_bias).fit(*lengths)
    return _Tiles(dataclasses.replace(mask, query_offset=offset), lengths, sizes, soft_cap)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("interpret",))
def forward(
    q_length: int,
    query_offset: int,
    soft_cap: float | None,
    inputs: FusedInputs,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, SoftmaxStats]:
    """Returns the attention output ``[b, q, h, e]`` and what `backward` needs."""
    batch, _, heads, width = inputs.values.shape
    operands = _operands(inputs, q_length)
    tiles = _make_tiles("forward", inputs.mask, operands, (q_length, query_offset), soft_cap)
    q_block, length = tiles.blocks.q, q_length

    def kernel(blocks: _Operands, out: Ref, row_max: Ref, inverse_row_sum: Ref) -> None:
        block, example = pl.program_id(0), pl.program_id(2)
        queries = tiles.load_queries(blocks, example, block)

        def add_keys(j: Ref, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            total, largest, row_sum = carry
            keys, values = tiles.load_keys(blocks, example, j)
            logits, allowed = _logits(blocks, queries, keys, example, (block, j), tiles)
            logits = _forbid(logits, allowed)
            new = jnp.maximum(largest, jnp.max(logits, axis=1))
            finite = jnp.where(new == -jnp.inf, 0.0, new)
            # P = exp(S - max) is not normalized; O = P V / Σ P.
            weights = _exp(logits - finite[:, None])
            factor = _exp(largest - finite)
            total = total * factor[:, None] + _matmul(weights.astype(values.dtype), values)
            return total, new, row_sum * factor + jnp.sum(weights, axis=1)

        zeros = jnp.zeros(q_block, jnp.float32)
        start = jnp.zeros((q_block, blocks.values.shape[-1]), jnp.float32), zeros - jnp.inf, zeros
        first, last = tiles.key_blocks(block, None if blocks.ends is None else blocks.ends[example])
        total, largest, row_sum = lax.fori_loop(first, last, add_keys, start)
        has_keys = row_sum > 0.0
        if blocks.query_ends is not None:
            has_keys &= _before_end(blocks.query_ends, example, block, q_block)
        inverse = jnp.where(has_keys, 1.0 / jnp.where(has_keys, row_sum, 1.0), 0.0)
        _store_rows(out, example, block, total * inverse[:, None], length)
        _store_row(row_max, example, block, jnp.where(has_keys, largest, 0.0), length)
        _store_row(inverse_row_sum, example, block, inverse, length)

    row = jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32)
    out_shape = jax.ShapeDtypeStruct(
        (batch, q_length, heads, operands.values.shape[-1]), inputs.values.dtype
    )
    out, row_max, inverse_row_sum = tiles.call(
        kernel,
        (operands,),
        (_operand_axes(operands),),
        (out_shape, row, row),
        ("bqhr", "bhq", "bhq"),
        grid=(tiles.counts[0], heads, batch),
        products=_widths(operands.queries) + width,
        interpret=interpret,
    )
    out = out[..., :width]
    real = inputs.mask.queries(q_length)
    if real is not None and operands.query_ends is None:
        out = jnp.where(real[..., None, None], out, 0)
        inverse_row_sum = jnp.where(real[:, None], inverse_row_sum, 0.0)
    return out, SoftmaxStats(*(x.swapaxes(1, 2)[..., None] for x in (row_max, inverse_row_sum)))


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
    """Returns the cotangents of the inputs of `forward`; `delta` is `softmax_vjp_delta`."""
    blocks = _operands(inputs, dout.shape[1])
    rows = (x[..., 0].swapaxes(1, 2) for x in (*stats, delta))
    arguments = blocks, _Residuals(_fill_width(dout), *rows)
    tiles = lambda kernel: _make_tiles(kernel, inputs.mask, blocks, (dout.shape[1], query_offset), soft_cap)
    dqueries = _call_by_queries(tiles("queries"), arguments, interpret=interpret)
    dkeys, dvalues = _call_by_keys(tiles("keys"), arguments, interpret=interpret)
    _, bias_vjp = jax.vjp(Biases.sums, inputs.biases)
    dbias = _call_by_bias(tiles("bias"), arguments, interpret=interpret)
    (dbiases,) = bias_vjp(
        jax.tree.map(lambda d, x: d.astype(x.dtype), dbias, (blocks.table, blocks.columns))
    )

    def finish(d: jax.Array, x: jax.Array) -> jax.Array:
        d = d if d.shape[0] == x.shape[0] else d.sum(axis=0, keepdims=True)
        return d[..., : x.shape[-1]].astype(x.dtype)

    low_rank = tuple(
        dataclasses.replace(term, queries=finish(dq, term.queries), keys=finish(dk, term.keys))
        for term, dq, dk in zip(inputs.products.low_rank, dqueries, dkeys, strict=True)
    )
    return inputs.cotangents(Products(low_rank), dbiases, finish(dvalues, inputs.values))


_Arguments: TypeAlias = tuple[_Operands, _Residuals]


def _cotangent_shape(x: jax.Array, batch: int) -> jax.ShapeDtypeStruct:
    """What a kernel returns for an operand: float32 where a sum over the examples follows."""
    return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype if x.shape[0] == batch else jnp.float32)


def _call_by_queries(tiles: _Tiles, arguments: _Arguments, *, interpret: bool) -> tuple[jax.Array, ...]:
    """Returns the cotangents of the queries of every term, ``[b, q, h, r]``."""
    operands, residuals = arguments
    if not operands.queries:
        return ()
    length, (batch, _, heads, _) = tiles.lengths[0], operands.values.shape

    def kernel(blocks: _Operands, residuals: _Residuals, results: tuple[Ref, ...]) -> None:
        block, example = pl.program_id(0), pl.program_id(2)
        queries = tiles.load_queries(blocks, example, block)
        rest = _load_residuals(residuals, example, block, tiles)

        def add_keys(j: Ref, totals: list[jax.Array]) -> list[jax.Array]:
            keys, values = tiles.load_keys(blocks, example, j)
            _, dlogits = _backward_tile(blocks, queries, keys, values, rest, example, (block, j), tiles)
            # dQ = dS K
            return [t + _matmul(dlogits.astype(k.dtype), k) for t, k in zip(totals, keys, strict=True)]

        start = [jnp.zeros(x.shape, jnp.float32) for x in queries]
        first, last = tiles.key_blocks(block, None if blocks.ends is None else blocks.ends[example])
        for result, total in zip(results, lax.fori_loop(first, last, add_keys, start), strict=True):
            _store_rows(result, example, block, total, length)

    shapes = tuple(_cotangent_shape(x, batch) for x in operands.queries)
    results: tuple[tuple[jax.Array, ...]] = tiles.call(
        kernel,
        (operands, residuals),
        (_operand_axes(operands), _RESIDUAL_AXES),
        (shapes,),
        (("bqhr",) * len(shapes),),
        grid=(tiles.counts[0], heads, batch),
        products=2 * _widths(operands.queries) + operands.values.shape[-1],
        interpret=interpret,
    )
    return results[0]


def _call_by_keys(
    tiles: _Tiles, arguments: _Arguments, *, interpret: bool
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns the cotangents of the keys of every term, ``[b, k, h, r]``, and of the values.

    The rows of a tile are keys: its products need no transposed weights.
    """
    operands, residuals = arguments
    k_block, length = tiles.blocks.k, tiles.lengths[1]
    batch, _, heads, _ = operands.values.shape

    def kernel(blocks: _Operands, residuals: _Residuals, dkeys: tuple[Ref, ...], dvalues: Ref) -> None:
        block, example = pl.program_id(0), pl.program_id(2)
        keys, values = tiles.load_keys(blocks, example, block)

        def add_queries(
            i: Ref, totals: tuple[list[jax.Array], jax.Array]
        ) -> tuple[list[jax.Array], jax.Array]:
            queries = tiles.load_queries(blocks, example, i)
            rest = _load_residuals(residuals, example, i, tiles)
            weights, dlogits = _backward_tile(
                blocks, queries, keys, values, rest, example, (i, block), tiles, transposed=True
            )
            # dK = dSᵀ Q,  dV = Pᵀ dO
            of_keys = [
                t + _matmul(dlogits.astype(q.dtype), q) for t, q in zip(totals[0], queries, strict=True)
            ]
            return of_keys, totals[1] + _matmul(weights.astype(rest.dout.dtype), rest.dout)

        start = [jnp.zeros(x.shape, jnp.float32) for x in keys], jnp.zeros(values.shape, jnp.float32)
        first, last = tiles.query_blocks(block)
        if blocks.ends is not None:
            last *= jnp.clip(blocks.ends[example] - block * k_block, 0, 1)  # nothing beyond the last key
        of_keys, of_values = lax.fori_loop(first, last, add_queries, start)
        for result, total in zip((*dkeys, dvalues), (*of_keys, of_values), strict=True):
            _store_rows(result, example, block, total, length)

    shapes = tuple(_cotangent_shape(x, batch) for x in operands.keys)
    results: tuple[tuple[jax.Array, ...], jax.Array] = tiles.call(
        kernel,
        (operands, residuals),
        (_operand_axes(operands), _RESIDUAL_AXES),
        (shapes, _cotangent_shape(operands.values, batch)),
        (("bkhr",) * len(shapes), "bkhr"),
        grid=(tiles.counts[1], heads, batch),
        products=2 * (_widths(operands.queries) + operands.values.shape[-1]),
        interpret=interpret,
    )
    return results


def _call_by_bias(
    tiles: _Tiles, arguments: _Arguments, *, interpret: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the cotangents of the table ``[h, q, k]`` and of the diagonals ``[h, q + k - 1]``."""
    operands, residuals = arguments
    if operands.table is None and operands.columns is None:
        return None, None
    side = min(tiles.blocks.q, tiles.blocks.k)
    tiles = dataclasses.replace(tiles, blocks=dataclasses.replace(tiles.blocks, q=side, k=side))
    batch, _, heads, _ = operands.values.shape
    q_count, k_count = tiles.counts
    by_diagonal = operands.table is None
    count = q_count + k_count - 1 if by_diagonal else q_count * k_count
    programs = BIAS_PROGRAMS * (4 if by_diagonal else 1)  # long diagonals need more time
    parts = _divisor(batch, min(programs // (count * heads), batch // BIAS_EXAMPLES))
    examples = batch // parts

    def kernel(blocks: _Operands, residuals: _Residuals, result: Ref) -> None:
        number: Ref
        place, part = pl.program_id(0), pl.program_id(2)
        first_i, first_j, number = lax.div(place, jnp.int32(k_count)), lax.rem(place, jnp.int32(k_count)), 1
        if by_diagonal:
            first_i, first_j = (jnp.maximum(x, 0) for x in (q_count - 1 - place, place - (q_count - 1)))
            number = jnp.minimum(q_count - first_i, k_count - first_j)
        bias = _bias_tile(blocks, (first_i, first_j), tiles)  # the same for all tiles on a diagonal

        def add_tile(t: Ref, total: jax.Array) -> jax.Array:
            example, step = (lax.div(t, number), lax.rem(t, number)) if by_diagonal else (t, 0)
            example, i, j = part * examples + example, first_i + step, first_j + step
            queries = tiles.load_queries(blocks, example, i)
            keys, values = tiles.load_keys(blocks, example, j)
            rest = _load_residuals(residuals, example, i, tiles)
            _, dlogits = _backward_tile(
                blocks, queries, keys, values, rest, example, (i, j), tiles, bias=bias
            )
            return total + dlogits

        start = jnp.zeros((side, side), jnp.float32)
        result[part, place] = lax.fori_loop(0, examples * number, add_tile, start)

    shape = jax.ShapeDtypeStruct((parts, count, heads, side, side), jnp.float32)
    (sums,) = tiles.call(
        kernel,
        (operands, residuals),
        (_operand_axes(operands), _RESIDUAL_AXES),
        (shape,),
        ("pnhrr",),
        grid=(count, heads, parts),
        products=_widths(operands.queries) + operands.values.shape[-1],
        interpret=interpret,
    )
    sums = sums.sum(axis=0)
    q_length, k_length = tiles.lengths
    if by_diagonal:
        return None, _sum_diagonals(sums, q_count * side, q_length, k_length)
    table = sums.reshape(q_count, k_count, heads, side, side).transpose(2, 0, 3, 1, 4)
    table = table.reshape(heads, q_count * side, k_count * side)[:, :q_length, :k_length]
    if operands.columns is None:
        return table, None
    transpose = jax.linear_transpose(lambda x: expand_diagonals(x, q_length), operands.columns)
    return table, transpose(table)[0]


def _sum_diagonals(sums: jax.Array, rows: int, q_length: int, k_length: int) -> jax.Array:
    """Returns the diagonals' sums ``[h, q + k - 1]`` of blocks ``[n, h, s, s]`` that lie s apart."""
    count, heads, side, _ = sums.shape
    columns, _ = match_varying_axes(jnp.zeros((count, heads, 2 * side - 1), sums.dtype), sums)
    lines = jax.linear_transpose(lambda columns: expand_diagonals(columns, side), columns)(sums)[0]
    total = jnp.zeros((heads, (count + 1) * side), sums.dtype)
    first, second = (
        x.transpose(1, 0, 2).reshape(heads, -1)
        for x in (lines[..., :side], jnp.pad(lines[..., side:], ((0, 0), (0, 0), (0, 1))))
    )
    total = total.at[:, : count * side].add(first).at[:, side:].add(second)
    # Column 0 is key - query = 1 - rows.
    return total[:, rows - q_length : rows + k_length - 1]


def _widths(factors: tuple[jax.Array, ...]) -> int:
    return sum(x.shape[-1] for x in factors)


def _divisor(number: int, wanted: int) -> int:
    """Returns the largest divisor that is at most `wanted`, or 1."""
    return max(n for n in range(1, max(wanted, 1) + 1) if number % n == 0)


def _load_residuals(residuals: _Residuals, example: Ref, block: Ref, tiles: _Tiles) -> _Residuals:
    dout, *rows = residuals
    args = example, block, tiles.blocks.q, tiles.lengths[0]
    loaded = _Residuals(_load_rows(dout, *args), *(_load_row(x, *args) for x in rows))
    # The weights of rows that are padding or beyond the length are exp(-∞), whatever their bias is.
    row_max = jnp.where(loaded.inverse_row_sum > 0.0, loaded.row_max, jnp.inf)
    return loaded._replace(row_max=row_max)


def _backward_tile(
    blocks: _Operands,
    queries: list[jax.Array],
    keys: list[jax.Array],
    values: jax.Array,
    rest: _Residuals,
    example: Ref,
    place: tuple[Ref, Ref],
    tiles: _Tiles,
    *,
    bias: jax.Array | None = None,
    transposed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights P and the cotangents dS of a tile of logits, keys first if `transposed`."""
    logits, allowed = _logits(
        blocks, queries, keys, example, place, tiles, bias=bias, transposed=transposed
    )
    across = (lambda x: x[None, :]) if transposed else (lambda x: x[:, None])
    weights = _exp(_forbid(logits, allowed) - across(rest.row_max))
    weights *= across(rest.inverse_row_sum)
    pair = (values, rest.dout) if transposed else (rest.dout, values)
    # dS = P ∘ (dO Vᵀ - delta)
    dlogits = weights * (_matmul_nt(*pair) - across(rest.delta))
    if tiles.soft_cap is not None:
        dlogits *= 1.0 - (logits / tiles.soft_cap) ** 2
    return weights, dlogits


def _logits(
    blocks: _Operands,
    queries: list[jax.Array],
    keys: list[jax.Array],
    example: Ref,
    place: tuple[Ref, Ref],
    tiles: _Tiles,
    *,
    bias: jax.Array | None = None,
    transposed: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns a tile of logits, and which of them the mask allows (None: all).

    `place` has the numbers of the blocks of queries and keys; `bias` is the `_bias_tile` if it is there.
    """
    (q_length, k_length), sizes = tiles.lengths, tiles.blocks
    pairs = [(k, q) if transposed else (q, k) for q, k in zip(queries, keys, strict=True)]
    parts = [_matmul_nt(x, y) for x, y in pairs]
    bias = _bias_tile(blocks, place, tiles, transposed=transposed) if bias is None else bias
    parts += [] if bias is None else [bias]
    logits = cap_logits(functools.reduce(operator.add, parts), tiles.soft_cap)

    query, key, inside = _positions(place, tiles, transposed=transposed)
    axes = (1, 0) if transposed else (0, 1)
    keys_of = lambda ref: _across(_load_row(ref, example, place[1], sizes.k, k_length), axes[1])
    queries_of = lambda ref: _across(_load_row(ref, example, place[0], sizes.q, q_length), axes[0])
    rules = tiles.mask.band_rules(query + tiles.mask.query_offset, key)
    if rules and blocks.prefix is not None:
        rules = [functools.reduce(operator.and_, rules) | (key < blocks.prefix[example])]
    if blocks.real is not None:
        rules.append(keys_of(blocks.real) != 0)
    elif blocks.ends is not None:
        rules.append(key < blocks.ends[example])
    elif k_length % sizes.k:
        rules.append(key < k_length)
    if blocks.query_segments is not None:
        rules.append(queries_of(blocks.query_segments) == keys_of(blocks.key_segments))
    if blocks.allowed is not None:
        one = jnp.zeros_like(query) + (example if blocks.allowed.shape[0] > 1 else 0)
        rules.append(_load(blocks.allowed.at[one, query, key], inside) != 0)
    if not rules:
        return logits, None
    return logits, jnp.broadcast_to(functools.reduce(operator.and_, rules), logits.shape)


def _positions(
    place: tuple[Ref, Ref], tiles: _Tiles, *, transposed: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns a tile's queries and keys, and which pairs of them exist (None: all)."""
    sizes, (q_length, k_length) = tiles.blocks, tiles.lengths
    shape, axes = ((sizes.k, sizes.q), (1, 0)) if transposed else ((sizes.q, sizes.k), (0, 1))
    query = place[0] * sizes.q + lax.broadcasted_iota(jnp.int32, shape, axes[0])
    key = place[1] * sizes.k + lax.broadcasted_iota(jnp.int32, shape, axes[1])
    inside = [query < q_length] if q_length % sizes.q else []
    inside += [key < k_length] if k_length % sizes.k else []
    return query, key, functools.reduce(operator.and_, inside) if inside else None


def _bias_tile(
    blocks: _Operands, place: tuple[Ref, Ref], tiles: _Tiles, *, transposed: bool = False
) -> jax.Array | None:
    """Returns what the bias adds to a tile, float32; None: there is no bias."""
    query, key, inside = _positions(place, tiles, transposed=transposed)
    parts = []
    if blocks.columns is not None:
        parts.append(_load(blocks.columns.at[key - query + (tiles.lengths[0] - 1)], inside))
    if blocks.table is not None:
        parts.append(_load(blocks.table.at[query, key], inside).astype(jnp.float32))
    return functools.reduce(operator.add, parts) if parts else None


def _load(ref: Ref, inside: jax.Array | None) -> jax.Array:
    return ref[...] if inside is None else plgpu.load(ref, mask=inside, other=0)


def _exp(x: jax.Array) -> jax.Array:
    """Returns exp; GPUs have an instruction for powers of two."""
    return jnp.exp2(x * math.log2(math.e))


def _across(x: jax.Array, axis: int) -> jax.Array:
    return x[:, None] if axis == 0 else x[None, :]


def _forbid(logits: jax.Array, allowed: jax.Array | None) -> jax.Array:
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def _rows(block: Ref, size: int, length: int) -> tuple[Ref, jax.Array | None]:
    """Returns the rows of a block, and which of them exist (None: all)."""
    first = block * size
    inside = first + jnp.arange(size) < length if length % size else None
    return pl.ds(first, size), inside


def _before_end(ends: Ref, example: Ref, block: Ref, size: int) -> jax.Array:
    """Returns which rows of a block ``[size]`` are before the example's end."""
    return jnp.less(block * size + jnp.arange(size), ends[example])


def _load_rows(ref: Ref, example: Ref, block: Ref, size: int, length: int, ends: Ref = None) -> jax.Array:
    """Returns a block of rows ``[size, r]`` of ``[b or 1, n, r]``, zeros from its length or end on."""
    rows, inside = _rows(block, size, length)
    inside = inside if ends is None else _before_end(ends, example, block, size)
    ref = ref.at[jnp.minimum(example, ref.shape[0] - 1), rows, :]
    return _load(ref, None if inside is None else inside[:, None])


def _load_row(ref: Ref, example: Ref, block: Ref, size: int, length: int) -> jax.Array:
    """Returns a block ``[size]`` of ``[b, n]`` likewise."""
    rows, inside = _rows(block, size, length)
    ref = ref.at[example, rows]
    return _load(ref, inside)


def _store_rows(ref: Ref, example: Ref, block: Ref, x: jax.Array, length: int) -> None:
    """Writes a block of rows ``[size, r]``."""
    rows, inside = _rows(block, x.shape[0], length)
    mask = None if inside is None else inside[:, None]
    plgpu.store(ref.at[example, rows, :], x.astype(ref.dtype), mask=mask)


def _store_row(ref: Ref, example: Ref, block: Ref, x: jax.Array, length: int) -> None:
    """Writes a block ``[size]`` likewise."""
    rows, inside = _rows(block, x.shape[0], length)
    plgpu.store(ref.at[example, rows], x, mask=inside)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return plgpu.dot(x, y)


def _matmul_nt(x: jax.Array, y: jax.Array) -> jax.Array:
    return plgpu.dot(x, y, trans_b=True)
