"""What the TPU kernels of the fused and the static route share.

On a TPU core, programs of a kernel run one after another. Pallas copies the tiles of a program's
inputs from the chip's memory (HBM) to the core's vector memory (VMEM) while the program before
runs, and copies results back. If two programs in succession have the same tile, it stays where it
is. So the order of the grid's axes decides what is copied: the kernels here let examples go by
fastest, and keep what the examples share.

Arrays in vector memory lie in registers of 8 rows (sublanes) and 128 columns (lanes). Tiles that
do not fill registers waste memory, and tiles that begin inside a register are not allowed.

A relative bias has one number per diagonal of the logits. `roll_diagonals` expands it to a tile
inside a kernel, by rotations of registers, and `sum_diagonals` is the reverse for gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.fused_arrays import Biases, FusedInputs
from synthesizer_jax.attention.kernel_arrays import LabeledArrays, run_kernel
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.typing import PyTree

VMEM = 32 * 2**20
"""Bytes of vector memory that a program may take.

Cores after TPU v4 have at least as much. A core of TPU v4 has 16 MiB.
"""

LANES = 128
"""Columns of a register.

The last axis of a tile has the length of the array's axis, or a multiple of this.
"""

SUBLANES = 8
"""Rows of a register in float32."""

LOW = float(jnp.finfo(jnp.float32).min)
"""What takes the place of a forbidden logit. It is finite, so that differences are numbers."""

Ref: TypeAlias = Any
"""An array outside of kernels, and a Pallas reference to a tile in vector memory inside them."""


class Bias(NamedTuple):
    """What heads add to the logits of every example. In a kernel, these are references to tiles.

    Attributes:
      table: ``[h, q, k]``, or None if there is no table.
      diagonals: ``[h, 1, w]`` float32, or None: one number for each ``key - query``. Number j
        belongs to ``key - query = j + 1 - q``. Zeros fill the array up to a multiple of `LANES`.
    """

    table: Ref = None
    diagonals: Ref = None


BIAS_AXES = Bias(table="hqk", diagonals="h..")
"""The letters of the axes of `Bias`, as `KernelPlan.spec` reads them."""


def obstacle(inputs: FusedInputs) -> str | None:
    """Returns why no TPU kernel can take these inputs, or None if some may."""
    products, biases, values, mask, _ = inputs
    if mask.prefix_lengths is not None:
        return "The kernels do not support Mask.prefix_lengths."
    if not isinstance(mask.query_offset, int):
        return "Mask.query_offset is traced, but the kernels need to know its value."
    leaves = values, *jax.tree.leaves((products, biases))
    if any(x.dtype == jnp.float16 for x in leaves):
        return "The kernels do not support float16."
    if logits_dtype(*leaves) != jnp.float32:
        return "The kernels do not support 64-bit numbers."
    return None


def prepare_bias(biases: Biases) -> Bias:
    """Returns the biases as kernels read them: one table, and one line of diagonals."""
    table, line = biases.sums()
    if line is None:
        return Bias(table, None)
    line = jnp.pad(line, ((0, 0), (0, -line.shape[1] % LANES)))
    return Bias(table, line[:, None])  # [h, 1, w]


def roll_diagonals(tile: Ref, diagonals: jax.Array, first: int | jax.Array, *, rows: int) -> None:
    """Fills a tile with a bias that is constant along diagonals.

    Row r of the tile is row ``first + r`` of the logits. In its column 0, ``key - query`` is minus
    that, which is number ``rows - 1 - first - r`` of the diagonals. So each row is the row above,
    moved one to the right. Pallas can rotate rows by different amounts in one instruction, but not
    before TPU v5.

    Args:
      tile: a reference, ``[size, length]`` float32, which is written.
      diagonals: ``[1, count]``, see `Bias`.
      first: number of the tile's first row.
      rows: number of rows of all logits.
    """
    size, length = tile.shape
    count = diagonals.shape[-1]

    # Row r of these eight lines is rotated to the right by r: by 1, 2 and 4 if r has that bit.
    lines = jnp.broadcast_to(diagonals, (SUBLANES, count))
    row = lax.broadcasted_iota(jnp.int32, lines.shape, 0)
    for bit in (1, 2, 4):
        lines = jnp.where(row & bit != 0, pltpu.roll(lines, jnp.int32(bit), 1), lines)

    # All eight together, rotated once more, are eight rows of the tile.
    for begin in range(0, size, SUBLANES):
        end = min(begin + SUBLANES, size)
        shift = lax.rem(jnp.int32(first + (begin + count + 1 - rows)), jnp.int32(count))
        tile[begin:end] = pltpu.roll(lines, shift, 1)[: end - begin, :length]


def sum_diagonals(tile: Ref, first: int | jax.Array, *, rows: int, count: int) -> jax.Array:
    """Returns the sums along the diagonals of a tile, ``[1, count]``: the transpose of
    `roll_diagonals`.

    Args:
      tile: a reference, ``[size, length]`` float32.
      first: number of the tile's first row.
      rows: number of rows of all logits. Rows of the tile beyond it are left out.
      count: number of diagonals with the zeros that fill them up.
    """
    size, length = tile.shape
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, count), 0)

    # The steps of `roll_diagonals` in reverse: groups of eight rows are rotated back and added up.
    lines = jnp.zeros((SUBLANES, count), jnp.float32)
    for begin in range(0, size, SUBLANES):
        end = min(begin + SUBLANES, size)
        part = jnp.pad(tile[begin:end], ((0, begin + SUBLANES - end), (0, count - length)))
        part = jnp.where(row + (first + begin) < rows, part, 0.0)
        shift = lax.rem(jnp.int32(count + rows - 1 - begin - first), jnp.int32(count))
        lines += pltpu.roll(part, shift, 1)

    # Row r of the eight is still r to the right.
    for bit in (1, 2, 4):
        lines = jnp.where(row & bit != 0, pltpu.roll(lines, jnp.int32(count - bit), 1), lines)
    return lines.sum(axis=0, keepdims=True)


def matmul(x: jax.Array, y: jax.Array, *, axes: tuple[int, int], exact: bool = False) -> jax.Array:
    """Returns the product of two matrices in float32.

    Args:
      x: the left matrix.
      y: the right matrix.
      axes: the axis of x and the axis of y that are summed over: ``(1, 0)`` is ``x y``, ``(1, 1)``
        is ``x yᵀ``, and ``(0, 0)`` is ``xᵀ y``.
      exact: whether float32 factors are multiplied without rounding them to bfloat16.
    """
    dims = (((axes[0],), (axes[1],)), ((), ()))
    if 1 in (*x.shape, *y.shape):  # Mosaic cannot broadcast bfloat16 to float32
        x = x.astype(jnp.float32)
        y = y.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if exact and x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """How the work of a kernel is cut into programs, and what it costs.

    Attributes:
      tile_sizes: rows of a tile along the axes that are cut, by their letters. None cuts an axis
        into single rows, and the tile has no such axis. Other axes are not cut.
      grid: numbers of programs. The first axis is that of heads, and the last one runs fastest.
      grid_letters: for every axis of the grid, the letters of the array axes along which its
        programs lie.
      flops: FLOPs of all programs.
      exponentials: number of exponentials that all programs compute.
      scratch: a tuple of vector memory that a program keeps for the next one.
      memory: bytes of vector memory that a program may take, its scratch memory included.
    """

    tile_sizes: dict[str, int | None]
    grid: tuple[int, ...]
    grid_letters: tuple[str, ...]
    flops: int
    exponentials: int
    scratch: PyTree
    memory: int = VMEM

    def spec(self, x: Ref, letters: str) -> pl.BlockSpec | None:
        """Returns how an array is cut into the tiles of programs, or None if there is no array.

        Args:
          x: the array, or its shape and dtype.
          letters: one letter for each of its axes, and ``.`` for an axis that is never cut.
        """
        if x is None:
            return None
        axes = list(zip(letters, x.shape, strict=True))
        shape = tuple(self.tile_sizes.get(letter, n) for letter, n in axes)

        def index(*program: jax.Array) -> tuple[Ref, ...]:
            """Returns the number of a program's tile along every axis of the array."""
            program_along = {}
            for names, number in zip(self.grid_letters, program, strict=True):
                for letter in names:
                    program_along[letter] = number
            # An axis of size 1 is shared by all programs, and one that is not cut has one tile.
            return tuple(
                0 if n in (1, size) else program_along.get(letter, 0)
                for (letter, n), size in zip(axes, shape, strict=True)
            )

        return pl.BlockSpec(shape, index)


def call_kernel(
    kernel: Callable[..., None],
    inputs: LabeledArrays,
    outputs: LabeledArrays,
    plan: KernelPlan,
    *,
    interpret: bool,
) -> Any:
    """Runs a kernel and returns its results.

    Args:
      kernel: a function of references to the tiles of inputs, outputs and scratch memory.
      inputs: a tuple of trees of arrays.
      outputs: a tuple of trees of arrays or of `jax.ShapeDtypeStruct`, whose shapes the results
        have.
      plan: how the work is cut into programs.
      interpret: whether to run the kernel in Python, without a TPU.
    """
    # Only heads may be divided between the cores of a chip: along the other axes, programs add to
    # what the program before has left in vector memory.
    params = pltpu.CompilerParams(
        dimension_semantics=["arbitrary" if axis else "parallel" for axis in range(len(plan.grid))],
        vmem_limit_bytes=plan.memory,
    )
    return run_kernel(
        kernel,
        inputs,
        outputs,
        spec=plan.spec,
        grid=plan.grid,
        flops=plan.flops,
        exponentials=plan.exponentials,
        compiler_params=params,
        scratch=plan.scratch,
        interpret=interpret,
    )
