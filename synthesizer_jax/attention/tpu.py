"""Functions that the TPU kernels of the fused route and of the static route share.

On a TPU core, the programs of a kernel run one after another. While one program runs, Pallas copies
the input tiles of the next program from the chip's memory (HBM) to the core's vector memory (VMEM).
Pallas also copies results back to the chip's memory. If two successive programs have the same tile,
Pallas does not copy the tile again. The order of the grid's axes therefore determines which tiles
are copied. In the attention kernels, the innermost axis of the grid is the axis of examples. Tiles
that all examples share therefore stay in vector memory.

Arrays in vector memory are stored in registers of 8 rows (sublanes) and 128 columns (lanes). Tiles
that do not fill registers waste memory, and tiles that begin inside a register are not allowed.

A relative bias has one number for each diagonal of the logits. Inside a kernel, `roll_diagonals`
expands the bias to a tile by rotating registers. The backward kernels use the transpose of
`roll_diagonals`, which is `sum_diagonals`.
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
"""The number of bytes of vector memory that a program may take.

Chips after TPU v4 have at least this much vector memory per core. A core of TPU v4 has 16 MiB.
"""

LANES = 128
"""The number of columns of a register.

The last axis of a tile must be as long as the axis of the array, or a multiple of `LANES`.
"""

SUBLANES = 8
"""The number of rows of a register in float32."""

LOW = float(jnp.finfo(jnp.float32).min)
"""The number that replaces a forbidden logit. `LOW` is finite, so that differences are not NaN."""

Ref: TypeAlias = Any
"""A Pallas reference to a tile in vector memory. Outside of kernels, a `Ref` is an array."""


class Bias(NamedTuple):
    """The bias of each head, which is added to the logits of every example.

    In a kernel, the attributes are references to tiles.

    Attributes:
      table: one number for each query and key, ``[h, q, k]``, or None without a table.
      diagonals: one number for each distance ``key - query``, ``[h, 1, w]`` float32, or None
        without diagonals. Entry j belongs to the distance ``key - query = j + 1 - q``. The array is
        padded with zeros to a multiple of `LANES`.
    """

    table: Ref = None
    diagonals: Ref = None


BIAS_AXES = Bias(table="hqk", diagonals="h..")
"""The letters of the axes of `Bias`, in the form that `KernelPlan.spec` takes."""


def obstacle(inputs: FusedInputs) -> str | None:
    """Explains why no TPU kernel can take the inputs, or returns None if a kernel may take them."""
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
    """Returns the sum of all tables and the sum of all diagonals, in the layout of the kernels."""
    table, diagonals = biases.sums()
    if diagonals is None:
        return Bias(table, None)
    diagonals = jnp.pad(diagonals, ((0, 0), (0, -diagonals.shape[1] % LANES)))
    return Bias(table, diagonals[:, None])  # [h, 1, w]


def roll_diagonals(tile: Ref, diagonals: jax.Array, first: int | jax.Array, *, rows: int) -> None:
    """Fills a tile with a bias that is constant along diagonals.

    Row r of the tile is row ``first + r`` of the logits. In column 0 of row r, the distance
    ``key - query`` is ``-(first + r)``, so column 0 contains entry ``rows - 1 - first - r`` of the
    diagonals. Each row of the tile is therefore equal to the row above, shifted to the right by one
    column. In other words, row r is the vector of diagonals, rotated to the right by
    ``first + r + 1 - rows`` entries. If ``first + r + 1 - rows`` is negative, the vector is rotated
    to the left.

    Pallas can rotate rows by different amounts in one instruction, but only on TPU v5 and later.
    This function therefore splits the rotation into two parts. The first part rotates row r by
    ``r % 8`` entries. It is the same for every group of eight rows, which fill a register, so it is
    computed only once per tile. The second part is the same for all eight rows of a group, so it
    takes only one instruction per group.

    Args:
      tile: a reference to the tile ``[size, length]`` float32, which the function writes.
      diagonals: the diagonals ``[1, count]`` of one head; see `Bias`.
      first: the number of the tile's first row in the logits.
      rows: the number of rows of the logits.
    """
    size, length = tile.shape
    count = diagonals.shape[-1]

    # Rotate copy r of the diagonals to the right by r entries, for r from 0 to 7. A rotation by r
    # is a sequence of rotations by 1, 2 and 4, one for each bit of r that is set.
    copies = jnp.broadcast_to(diagonals, (SUBLANES, count))
    row = lax.broadcasted_iota(jnp.int32, copies.shape, 0)
    for bit in (1, 2, 4):
        copies = jnp.where(row & bit != 0, pltpu.roll(copies, jnp.int32(bit), 1), copies)

    # Rotate all eight copies to the right by first + begin + 1 - rows entries. This number may be
    # negative, but `roll` needs a shift from 0 to count - 1. A rotation by `count` entries changes
    # nothing, so the shift is taken modulo `count`. Only the first `length` columns belong to keys,
    # so the other columns are left out.
    for begin in range(0, size, SUBLANES):
        end = min(begin + SUBLANES, size)
        shift = lax.rem(jnp.int32(first + (begin + count + 1 - rows)), jnp.int32(count))
        tile[begin:end] = pltpu.roll(copies, shift, 1)[: end - begin, :length]


def sum_diagonals(tile: Ref, first: int | jax.Array, *, rows: int, count: int) -> jax.Array:
    """Returns the sums along the diagonals of a tile, ``[1, count]``.

    This function is the transpose of `roll_diagonals`.

    Args:
      tile: a reference to the tile, ``[size, length]`` float32.
      first: the number of the tile's first row in the logits.
      rows: the number of rows of the logits. Rows of the tile that lie beyond the last row of the
        logits are left out.
      count: the number of diagonals, including the zeros at the end of the array.
    """
    size, length = tile.shape
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, count), 0)

    # The function reverses the steps of `roll_diagonals`. The loop rotates each group of eight rows
    # to the left by first + begin + 1 - rows entries, and adds up the groups. A rotation to the
    # left by n entries is the same as a rotation to the right by count - n entries.
    sums = jnp.zeros((SUBLANES, count), jnp.float32)
    for begin in range(0, size, SUBLANES):
        end = min(begin + SUBLANES, size)
        part = jnp.pad(tile[begin:end], ((0, begin + SUBLANES - end), (0, count - length)))
        part = jnp.where(row + (first + begin) < rows, part, 0.0)
        shift = lax.rem(jnp.int32(count + rows - 1 - begin - first), jnp.int32(count))
        sums += pltpu.roll(part, shift, 1)

    # Each row r of `sums` is still r entries too far to the right, so it is rotated to the left.
    # After that, entry j of every row belongs to the same diagonal, so the rows can be added up.
    for bit in (1, 2, 4):
        sums = jnp.where(row & bit != 0, pltpu.roll(sums, jnp.int32(count - bit), 1), sums)
    return sums.sum(axis=0, keepdims=True)


def matmul(x: jax.Array, y: jax.Array, *, axes: tuple[int, int], exact: bool = False) -> jax.Array:
    """Returns the product of two matrices in float32.

    Args:
      x: the left matrix.
      y: the right matrix.
      axes: the axis of x and the axis of y that are summed over. ``(1, 0)`` computes ``x y``,
        ``(1, 1)`` computes ``x yᵀ``, and ``(0, 0)`` computes ``xᵀ y``.
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
    """The grid of programs of a kernel, the tiles of each program, and the cost of the kernel.

    Attributes:
      tile_sizes: maps the letter of each axis that is cut to the size of a tile along the axis. If
        the size is None, the axis is cut into single entries, and the tile lacks the axis. Axes
        whose letters are not in `tile_sizes` are not cut.
      grid: the numbers of programs along each axis of the grid. The first axis is for heads, and
        the last axis is innermost.
      grid_letters: the letters of the array axes that each axis of the grid divides.
      flops: the number of FLOPs of all programs together.
      exponentials: the number of exponentials that all programs compute.
      scratch: a tuple of scratch memory, whose contents are kept from one program to the next.
      memory: the number of bytes of vector memory that a program may take, including scratch
        memory.
    """

    tile_sizes: dict[str, int | None]
    grid: tuple[int, ...]
    grid_letters: tuple[str, ...]
    flops: int
    exponentials: int
    scratch: PyTree
    memory: int = VMEM

    def spec(self, x: Ref, letters: str) -> pl.BlockSpec | None:
        """Returns the block specification that cuts an array into the tiles of programs.

        The result is None if the array is None.

        Args:
          x: the array, or a `jax.ShapeDtypeStruct`.
          letters: one letter for each axis of the array, or ``.`` for an axis that is never cut.
        """
        if x is None:
            return None
        axes = list(zip(letters, x.shape, strict=True))
        shape = tuple(self.tile_sizes.get(letter, n) for letter, n in axes)

        def index(*program: jax.Array) -> tuple[Ref, ...]:
            """Returns the index of a program's tile along every axis of the array."""
            program_along = {}
            for names, number in zip(self.grid_letters, program, strict=True):
                for letter in names:
                    program_along[letter] = number
            # All programs share the entry of an axis of size 1. An axis that is not cut has only
            # one tile.
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
      inputs: a tuple of pytrees of arrays.
      outputs: a tuple of pytrees of arrays or of `jax.ShapeDtypeStruct`, which have the shapes and
        dtypes of the results.
      plan: the grid of programs and the tiles of each program.
      interpret: whether to run the kernel in Python, without a TPU.
    """
    # Only the axis of heads may be divided between the cores of a chip. Along the other axes, each
    # program adds to sums that the previous program left in vector memory.
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
