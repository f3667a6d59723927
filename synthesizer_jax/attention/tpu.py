"""What the TPU kernels share: how they are called, their blocks, and the bias of a tile of logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.fused import Biases, FusedInputs
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.typing import PyTree

VMEM = 32 * 2**20
"""What a program may take of a core's vector memory, which is that large after TPU v4, which has 16 MiB."""

LANES = 128
"""A block's last axis is all of an array's, or a multiple of this."""

SUBLANES = 8
"""Rows of a register in float32."""

LOW = float(jnp.finfo(jnp.float32).min)
"""In the place of a forbidden logit; finite, so that differences are numbers."""

Ref: TypeAlias = Any
"""An array, or in a kernel a Pallas reference to a block of it, or the specification of the block."""


class Bias(NamedTuple):
    """What heads add to the logits of every example; in a kernel, references to blocks.

    Attributes:
      table: ``[h, q, k]``, or None.
      columns: ``[h, 1, w]`` float32, or None: what depends on ``key - query`` alone. Column j belongs
        to ``j + 1 - q``; zeros fill up to a multiple of 128. A tile is made of it in place.
    """

    table: Ref = None
    columns: Ref = None


BIAS_AXES = Bias("hqk", "h..")
"""Axes of `Bias`, as `Blocks.spec` reads them."""


def obstacle(inputs: FusedInputs) -> str | None:
    """Returns why no kernel can take such inputs; None: some may."""
    products, biases, values, mask, _ = inputs
    if mask.prefix_lengths is not None:
        return "the kernels do not read Mask.prefix_lengths"
    if not isinstance(mask.query_offset, int):
        return "Mask.query_offset is not known when the function is traced"
    leaves = values, *jax.tree.leaves((products, biases))
    if any(x.dtype == jnp.float16 for x in leaves):
        return "the kernels have no float16 numbers"
    if logits_dtype(*leaves) != jnp.float32:
        return "the kernels have no 64-bit numbers"
    return None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How arrays are cut into the blocks of programs.

    Attributes:
      sizes: rows of a block along axes that are cut; None: one, and the block has no such axis.
      programs: for every axis of the grid, the axes of arrays along which its programs lie.
    """

    sizes: dict[str, int | None]
    programs: tuple[str, ...]

    def spec(self, x: Ref, axes: str) -> pl.BlockSpec | None:
        """Returns the blocks of an array, if there is one; `axes` names its axes by one letter each."""
        if x is None:
            return None
        shape = tuple(self.sizes.get(a, n) for a, n in zip(axes, x.shape, strict=True))

        def index(*program: jax.Array) -> tuple[Ref, ...]:
            at = {a: i for names, i in zip(self.programs, program, strict=True) for a in names}
            return tuple(
                0 if n in (1, size) else at.get(a, 0)
                for a, n, size in zip(axes, x.shape, shape, strict=True)
            )

        return pl.BlockSpec(shape, index)


def prepare_bias(biases: Biases) -> Bias:
    """Returns the sum of the tables, one alone as it is, and that of the diagonals."""
    table, line = biases.sums()
    return Bias(
        table, None if line is None else jnp.pad(line, ((0, 0), (0, -line.shape[1] % LANES)))[:, None]
    )


def roll_diagonals(tile: Ref, columns: jax.Array, first: int | jax.Array, *, rows: int) -> None:
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
        shift = lax.rem(jnp.int32(first + (begin + count + 1 - rows)), jnp.int32(count))
        tile[begin:end] = pltpu.roll(lines, shift, 1)[: end - begin, :length]


def sum_diagonals(tile: Ref, first: int | jax.Array, *, rows: int, count: int) -> jax.Array:
    """Returns the sums along a tile's diagonals, ``[1, count]``: the transpose of `roll_diagonals`."""
    size, length = tile.shape
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, count), 0)
    lines = jnp.zeros((SUBLANES, count), jnp.float32)
    for begin in range(0, size, SUBLANES):
        end = min(begin + SUBLANES, size)
        part = jnp.pad(tile[begin:end], ((0, begin + SUBLANES - end), (0, count - length)))
        part = jnp.where(row + (first + begin) < rows, part, 0.0)
        shift = lax.rem(jnp.int32(count + rows - 1 - begin - first), jnp.int32(count))
        lines += pltpu.roll(part, shift, 1)
    for bit in (1, 2, 4):
        lines = jnp.where(row & bit != 0, pltpu.roll(lines, jnp.int32(count - bit), 1), lines)
    return lines.sum(axis=0, keepdims=True)


def matmul(x: jax.Array, y: jax.Array, *, axes: tuple[int, int], exact: bool = False) -> jax.Array:
    """Sums products of matrices over an axis of each, in float32; `exact`: factors are not rounded."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    if 1 in (*x.shape, *y.shape):  # Mosaic cannot broadcast bfloat16 to float32
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if exact and x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def call_kernel(
    kernel: Callable[..., None],
    arguments: PyTree,
    shapes: PyTree,
    *,
    blocks: Blocks,
    axes: PyTree,
    out_axes: PyTree,
    grid: tuple[int, ...],
    flops: int,
    exponentials: int,
    scratch: PyTree,
    memory: int = VMEM,
    interpret: bool,
) -> Any:
    """Calls `pl.pallas_call` with blocks of arguments and results, whose axes are trees like them.

    The first axis of the grid is that of heads. `shapes` are arrays or `jax.ShapeDtypeStruct`; `memory` is
    what a program may take of the vector memory, in bytes, its `scratch` included.
    """
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((arguments, shapes)))
    varying = jax.typeof(jax.tree.leaves(arguments)[0]).mat
    specs, out_specs = (
        jax.tree.map(blocks.spec, tree, names, is_leaf=lambda x: x is None)
        for tree, names in ((arguments, axes), (shapes, out_axes))
    )
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying), shapes
    )
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=grid,
        in_specs=specs,
        out_specs=out_specs,
        scratch_shapes=scratch,
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=exponentials, bytes_accessed=moved),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=["arbitrary" if axis else "parallel" for axis in range(len(grid))],
            vmem_limit_bytes=memory,
        ),
        interpret=interpret,
    )(*arguments)
