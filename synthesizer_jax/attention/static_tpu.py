"""The static route on TPUs: Pallas kernels for logits that all examples share.

A program holds the logits of some heads in vector memory, computes the numerators ``E = exp(S - max)``
once, and has nothing but matrix products left for the examples,

    out = E (m ∘ v) / E m,    dS = E ∘ (D (m ∘ v)ᵀ - δ mᵀ),    dv = m ∘ Eᵀ D,

with m the real keys, ``D = dout / E m`` and ``δ = Σ_e out · D``. Several examples lie side by side in the
columns of a product.

The grid goes over groups of heads and, inside, groups of examples; logits, and the sum of their
cotangents, stay in vector memory while the examples go by.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention import tpu
from synthesizer_jax.attention.fused import FusedInputs, Products
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.static import MIN_ROW_SUM
from synthesizer_jax.attention.tpu import (
    BIAS_AXES,
    LANES,
    LOW,
    VMEM,
    Bias,
    Blocks,
    Ref,
    call_kernel,
    matmul,
    prepare_bias,
    roll_diagonals,
    sum_diagonals,
)

MAX_HEADS = 8
"""Most heads of a program; their lanes fill whole registers together."""

TILES = 10
"""Tiles of logits in float32 that live at once: of the table, its cotangent, weights and temporaries."""

COLUMNS = 512
"""Columns that a program's examples fill in a matrix product, or a few more."""


def obstacle(q_length: int, inputs: FusedInputs) -> str | None:
    """Returns why the kernels cannot take such inputs; None: they can."""
    values = inputs.values
    if common := tpu.obstacle(inputs):
        return common
    heads = _heads_per_program(*values.shape[2:])
    if heads > MAX_HEADS:
        return (
            f"only {heads} heads of width {values.shape[3]} fill whole registers; at most {MAX_HEADS} "
            "are computed together"
        )
    if _examples_per_program(values, q_length) < 1:
        return f"{q_length} queries and {values.shape[1]} keys are too many for the vector memory"
    return None


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """How the work is cut into programs, and what all of them know.

    Attributes:
      heads: of a program.
      examples: of a program, c.
      width: of a head.
      shape: ``(b, h, q, k)`` of all logits.
      offset: position of the first query.
      mask: the mask, of which programs read the band.
    """

    heads: int
    examples: int
    width: int
    shape: tuple[int, int, int, int]
    offset: int
    mask: Mask

    @property
    def grid(self) -> tuple[int, int]:
        """Groups of heads and groups of examples."""
        return self.shape[1] // self.heads, self.shape[0] // self.examples

    def cost(self, products: int) -> dict[str, int]:
        """Returns FLOPs of so many products of weights and values, and exponentials."""
        batch, heads, q, k = self.shape
        logits = heads * q * k
        return {"flops": products * 2 * self.width * batch * logits, "exponentials": logits}

    def lanes_of(self, head: int) -> slice:
        """Where one of a program's heads lies."""
        return slice(head * self.width, (head + 1) * self.width)

    columns_of = lanes_of
    """Where one of a program's examples lies in the columns of a product."""

    @property
    def blocks(self) -> Blocks:
        """Blocks of examples ``b`` or one group ``g`` of them, of heads ``h`` or their lanes ``l``."""
        lanes = self.heads * self.width
        sizes = {"b": self.examples, "g": None, "h": self.heads, "l": lanes}
        return Blocks(sizes, ("hl", "bg"))


class _Operands(NamedTuple):
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


OPERAND_AXES = _Operands(BIAS_AXES, "b.l", "g..", "g..")


class _Residuals(NamedTuple):
    """What the backward kernel reads besides.

    Attributes:
      dout: the cotangent of the output, ``[b, q, h · e]``.
      out: the output, likewise; None where `_Operands.keys` is None.
      inverse_row_sum: the forward kernel's, ``[h, b / c, c, q]``, or None likewise.
    """

    dout: Ref
    out: Ref = None
    inverse_row_sum: Ref = None


class _Scratch(NamedTuple):
    """Vector memory of a kernel.

    Attributes:
      weights: numerators, normalized where `_Operands.keys` is None, ``[heads, q, k]`` in the values'
        dtype.
      tile: logits of one head, ``[q, k]``, if they are made of `Bias.columns`.
      transposed: the weights, ``[heads, k, q]``.
      dlogits_sum: the sum of the logits' cotangents over the examples, ``[heads, q, k]`` float32.
    """

    weights: Ref
    tile: Ref
    transposed: Ref = None
    dlogits_sum: Ref = None


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("same_keys", "interpret"))
def forward(
    q_length: int, query_offset: int, inputs: FusedInputs, *, same_keys: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the attention output ``[b, q, h, e]``, and one over the denominators, ``[h, q, b]``.

    That is 0 where a query is padding or sees no key, and None if `same_keys`: if the real queries of one
    position see the same keys in every example.
    """
    values = inputs.values
    tiling = _make_tiling(inputs, q_length, query_offset)
    blocks = _operands(tiling, prepare_bias(inputs.biases), inputs, same_keys=same_keys)
    batch, heads, *_ = tiling.shape
    out = jax.ShapeDtypeStruct((batch, q_length, blocks.values.shape[2]), values.dtype)
    rows = jax.ShapeDtypeStruct((heads, tiling.grid[1], tiling.examples, q_length), jnp.float32)
    shapes = out, None if same_keys else rows
    out, inverse_row_sum = call_kernel(
        functools.partial(_forward_kernel, tiling),
        (blocks,),
        shapes,
        blocks=tiling.blocks,
        axes=(OPERAND_AXES,),
        out_axes=("b.l", "hg.."),
        grid=tiling.grid,
        **tiling.cost(1),
        scratch=(_make_scratch(tiling, blocks, backward=False),),
        memory=_memory(values, q_length),
        interpret=interpret,
    )
    if inverse_row_sum is not None:
        inverse_row_sum = inverse_row_sum.reshape(heads, batch, q_length).swapaxes(1, 2)
    return out.reshape(batch, q_length, heads, tiling.width), inverse_row_sum


@functools.partial(jax.jit, static_argnums=0, static_argnames="interpret")
def backward(
    query_offset: int,
    inputs: FusedInputs,
    out: jax.Array,
    inverse_row_sum: jax.Array | None,
    dout: jax.Array,
    *,
    interpret: bool = False,
) -> FusedInputs:
    """Returns the cotangents of the inputs of `forward`, from its results and the output's cotangent."""
    values, q_length = inputs.values, dout.shape[1]
    tiling = _make_tiling(inputs, q_length, query_offset)
    bias, bias_vjp = jax.vjp(prepare_bias, inputs.biases)
    blocks = _operands(tiling, bias, inputs, same_keys=inverse_row_sum is None)
    residuals = _Residuals(_flatten_heads(dout))
    if inverse_row_sum is not None:
        rows = inverse_row_sum.swapaxes(1, 2).reshape(values.shape[2], -1, tiling.examples, q_length)
        residuals = _Residuals(_flatten_heads(dout), _flatten_heads(out), rows)
    dbias, dvalues = call_kernel(
        functools.partial(_backward_kernel, tiling),
        (blocks, residuals),
        (bias, blocks.values),
        blocks=tiling.blocks,
        axes=(OPERAND_AXES, _Residuals("b.l", "b.l", "hg..")),
        out_axes=(BIAS_AXES, "b.l"),
        grid=tiling.grid,
        **tiling.cost(2),
        scratch=(_make_scratch(tiling, blocks, backward=True),),
        memory=_memory(values, q_length),
        interpret=interpret,
    )
    dvalues = dvalues.reshape(values.shape)
    if inverse_row_sum is not None:
        keys: Any = inputs.mask.keys(values.shape[1])
        dvalues = jnp.where(keys[..., None, None], dvalues, 0)
    (dbiases,) = bias_vjp(dbias)
    return inputs.cotangents(Products(), dbiases, dvalues)


def _heads_per_program(heads: int, width: int) -> int:
    """Returns the smallest number of heads whose lanes are whole registers, or the number of all heads."""
    fits = (n for n in range(1, heads) if heads % n == 0 and n * width % LANES == 0)
    return next(fits, heads)


def _make_tiling(inputs: FusedInputs, q_length: int, query_offset: int) -> _Tiling:
    batch, k_length, heads, width = inputs.values.shape
    most = min(_examples_per_program(inputs.values, q_length), COLUMNS // width)
    return _Tiling(
        heads=_heads_per_program(heads, width),
        examples=max(n for n in range(1, max(most, 1) + 1) if batch % n == 0),
        width=width,
        shape=(batch, heads, q_length, k_length),
        offset=query_offset,
        mask=inputs.mask,
    )


def _tile_bytes(values: jax.Array, q_length: int) -> int:
    """Returns the vector memory of a program's tiles of logits."""
    _, k_length, heads, width = values.shape
    return TILES * 4 * _heads_per_program(heads, width) * q_length * k_length


def _memory(values: jax.Array, q_length: int) -> int:
    """Returns the bytes of vector memory that a program may take.

    That is most of the chip's if the tiles need it. The compiler keeps arrays in the rest. Where the chip
    is not known, it is what all chips after TPU v4 have.
    """
    if not pltpu.is_tpu_device():
        return VMEM
    capacity = int(pltpu.get_tpu_info().vmem_capacity_bytes)
    return min(VMEM, capacity) if 3 * _tile_bytes(values, q_length) <= 2 * VMEM else capacity // 8 * 7


def _examples_per_program(values: jax.Array, q_length: int) -> int:
    """Returns how many examples' values, outputs and cotangents fit in beside a program's tiles.

    A third of the vector memory is left to the compiler. Values, output and their cotangents are there
    twice.
    """
    _, k_length, heads, width = values.shape
    lanes = max(_heads_per_program(heads, width) * width, LANES)
    line = 8 * values.dtype.itemsize * max(q_length, k_length) * lanes
    memory, tiles = _memory(values, q_length), _tile_bytes(values, q_length)
    if 3 * tiles > 2 * memory:
        return 0
    return 2 * (memory - tiles) // (3 * line)


def _operands(tiling: _Tiling, bias: Bias, inputs: FusedInputs, *, same_keys: bool) -> _Operands:
    """Returns the inputs in the layout of the kernels; `same_keys` as in `forward`."""
    values, mask = inputs.values, inputs.mask
    batch, _, q_length, k_length = tiling.shape
    in_groups = lambda x: x.astype(jnp.float32).reshape(-1, tiling.examples, x.shape[-1])
    queries = mask.queries(q_length)
    queries = None if queries is None else jnp.broadcast_to(queries, (batch, q_length))
    if same_keys:
        seen = None if queries is None else in_groups(queries)
        return _Operands(bias, _flatten_heads(values), None, seen)
    keys: Any = mask.keys(k_length)
    keys = jnp.broadcast_to(keys, (batch, k_length))
    pairs = mask.band_pairs(q_length, k_length)
    if pairs is None:
        seen = jnp.broadcast_to(keys.any(axis=1, keepdims=True), (batch, q_length))
    else:
        seen = jnp.matmul(keys.astype(jnp.bfloat16), pairs.T.astype(jnp.bfloat16)) > 0
    seen = seen if queries is None else seen & queries
    real = jnp.where(keys[..., None, None], values, 0)
    return _Operands(bias, _flatten_heads(real), in_groups(keys), in_groups(seen))


def _flatten_heads(x: jax.Array) -> jax.Array:
    """Reshapes ``[b, n, h, e]`` to ``[b, n, h · e]``."""
    return x.reshape(*x.shape[:2], -1)


def _make_scratch(tiling: _Tiling, blocks: _Operands, *, backward: bool) -> _Scratch:
    *_, q, k = tiling.shape
    heads, dtype = tiling.heads, blocks.values.dtype
    return _Scratch(
        weights=pltpu.VMEM((heads, q, k), dtype),
        tile=None if blocks.bias.columns is None else pltpu.VMEM((q, k), jnp.float32),
        transposed=pltpu.VMEM((heads, k, q), dtype) if backward else None,
        dlogits_sum=pltpu.VMEM((heads, q, k), jnp.float32) if backward else None,
    )


def _fill_scratch(tiling: _Tiling, blocks: _Operands, scratch: _Scratch) -> None:
    """Computes a head's shared weights in the first program of the examples, and clears the sum."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for j in range(tiling.heads):
            weights = _shared_weights(tiling, blocks, j, tile=scratch.tile)
            scratch.weights[j] = weights.astype(scratch.weights.dtype)
            if scratch.transposed is not None:
                scratch.transposed[j] = weights.T.astype(scratch.transposed.dtype)
                scratch.dlogits_sum[j] = jnp.zeros_like(weights)


def _forward_kernel(
    tiling: _Tiling, blocks: _Operands, out: Ref, inverse_row_sum: Ref, scratch: _Scratch
) -> None:
    """Computes the output of a program's examples, and one over its denominators."""
    _fill_scratch(tiling, blocks, scratch)
    seen: Ref = None if blocks.queries is None else blocks.queries[...].T

    def write_result(j: int, inverse_sum: jax.Array | None) -> None:
        values = _examples_in_columns(tiling, blocks.values, j)
        weighted_sum = matmul(scratch.weights[j], values, axes=(1, 0))
        for i in range(tiling.examples):
            part = weighted_sum[:, tiling.columns_of(i)]
            part = part if inverse_sum is None else part * inverse_sum[:, i : i + 1]
            out[i, :, tiling.lanes_of(j)] = part.astype(out.dtype)

    if blocks.keys is None:
        for j in range(tiling.heads):
            write_result(j, seen)
        return

    real = blocks.keys[...].astype(out.dtype)
    for j in range(tiling.heads):
        total = matmul(scratch.weights[j], real, axes=(1, 1))
        inverse_sum = seen / jnp.maximum(total, MIN_ROW_SUM)
        write_result(j, inverse_sum)
        inverse_row_sum[j] = inverse_sum.T


def _backward_kernel(
    tiling: _Tiling, blocks: _Operands, residuals: _Residuals, dbias: Bias, dvalues: Ref, scratch: _Scratch
) -> None:
    """Adds a program's examples to the bias' cotangent, and computes the values' cotangent."""
    _fill_scratch(tiling, blocks, scratch)

    for j in range(tiling.heads):
        all_dvalues = _add_all_examples(tiling, blocks, residuals, head=j, scratch=scratch)
        for i in range(tiling.examples):
            part = all_dvalues[:, tiling.columns_of(i)]
            dvalues[i, :, tiling.lanes_of(j)] = part.astype(dvalues.dtype)

    @pl.when(pl.program_id(1) == tiling.grid[1] - 1)
    def _() -> None:
        for j in range(tiling.heads):
            if blocks.keys is None:  # the weights are normalized; their sums are not subtracted yet
                dweights = scratch.dlogits_sum[j]
                weights = scratch.weights[j].astype(jnp.float32)
                scratch.dlogits_sum[j] -= weights * jnp.sum(dweights, axis=1, keepdims=True)
            dlogits = scratch.dlogits_sum.at[j]
            if dbias.table is not None:
                dbias.table[j] = dlogits[...].astype(dbias.table.dtype)
            if dbias.columns is not None:
                rows, count = tiling.shape[2], dbias.columns.shape[2]
                dbias.columns[j] = sum_diagonals(dlogits, 0, rows=rows, count=count)


def _add_all_examples(
    tiling: _Tiling, blocks: _Operands, residuals: _Residuals, *, head: int, scratch: _Scratch
) -> jax.Array:
    """Adds the examples' cotangents of a head's logits; returns those of its values, side by side."""
    lanes, columns = tiling.lanes_of(head), range(tiling.examples)
    inverse_sum: Ref = None
    if residuals.inverse_row_sum is not None:
        inverse_sum = residuals.inverse_row_sum[head].T
    elif blocks.queries is not None:
        inverse_sum = blocks.queries[...].T
    # D = dout / E m
    parts = [residuals.dout[i, :, lanes].astype(jnp.float32) for i in columns]
    if inverse_sum is not None:
        parts = [part * inverse_sum[:, i : i + 1] for i, part in enumerate(parts)]
    scaled = jnp.concatenate(parts, axis=1)
    cast = scaled.astype(blocks.values.dtype)
    # dE = D (m ∘ v)ᵀ − δ mᵀ
    dweights = matmul(cast, _examples_in_columns(tiling, blocks.values, head), axes=(1, 1))
    if residuals.inverse_row_sum is not None:
        products = scaled * _examples_in_columns(tiling, residuals.out, head).astype(jnp.float32)
        deltas = [products[:, tiling.columns_of(i)].sum(axis=1, keepdims=True) for i in columns]
        dweights -= matmul(jnp.concatenate(deltas, axis=1), blocks.keys[...], axes=(1, 0))
    # dS = E ∘ dE
    scratch.dlogits_sum[head] += scratch.weights[head].astype(jnp.float32) * dweights
    return matmul(scratch.transposed[head], cast, axes=(1, 0))  # dv = Eᵀ D


def _shared_weights(tiling: _Tiling, blocks: _Operands, head: int, *, tile: Ref) -> jax.Array:
    """Returns the weights of a head for all examples, float32; see `_Scratch.weights`."""
    bias, shape = blocks.bias, tiling.shape[2:]
    parts = [] if bias.table is None else [bias.table[head].astype(jnp.float32)]
    if bias.columns is not None:
        roll_diagonals(tile, bias.columns[head], 0, rows=shape[0])
        parts.append(tile[...])
    logits = functools.reduce(jnp.add, parts)  # [q, k]
    query = lax.broadcasted_iota(jnp.int32, shape, 0) + tiling.offset
    if rules := tiling.mask.band_rules(query, lax.broadcasted_iota(jnp.int32, shape, 1)):
        logits = jnp.where(functools.reduce(jnp.logical_and, rules), logits, -jnp.inf)
    row_max = jnp.max(logits, axis=1, keepdims=True)
    weights = jnp.exp(logits - jnp.maximum(row_max, LOW))
    if blocks.keys is None:
        weights /= jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), MIN_ROW_SUM)
    return weights


def _examples_in_columns(tiling: _Tiling, x: Ref, head: int) -> jax.Array:
    """Returns one head of a block ``[c, n, lanes]``, the examples in columns, ``[n, c · e]``."""
    lanes = tiling.lanes_of(head)
    return jnp.concatenate([x[i, :, lanes] for i in range(tiling.examples)], axis=1)
