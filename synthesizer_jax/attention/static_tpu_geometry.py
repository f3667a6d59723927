"""Defines the programs and the operands of the TPU kernels of the static route.

A program computes a group of heads for a group of examples. All examples share the logits, which
are a matrix ``[q, k]`` for each head and stay in vector memory. One matrix product computes several
examples, whose values lie side by side in the columns of one factor::

    weights of one head      values of c examples      outputs of c examples
    [q, k]               ×   [k, c · e]            =   [q, c · e]

A single example has only e columns. With the common width e = 64, a single example would fill only
half of a register.

In memory, the heads also lie side by side, because the values have the shape ``[b, k, h · e]``. The
last axis of a tile must fill whole registers of 128 lanes, so a program computes as many heads as
are needed to fill whole registers. The grid is ``(groups of heads, groups of examples)``, and the
axis of examples is innermost. The first program of a group of heads computes the weights. The other
programs of the group read the weights from scratch memory.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.fused_arrays import FusedInputs
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.tpu import BIAS_AXES, LANES, VMEM, Bias, KernelPlan, Ref

FLOAT_MATRICES = 5
"""The number of float32 matrices ``[q, k]`` per head that are in vector memory at once.

Two of the matrices are copies of the table, and two are copies of its cotangent, because Pallas
copies the tiles of one program while it computes another. The last matrix is a reserve for the
compiler's temporary arrays. Without a table, the diagonals and the sum of dS take less.
"""

PRODUCT_COLUMNS = 512
"""The largest number of columns that the examples of a program fill in a matrix product.

If a single example has more columns, each program computes one example.
"""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The division of the work into programs, and other options known at tracing time.

    Attributes:
      heads: the number of heads that a program computes.
      examples: the number of examples that a program computes. In shapes, this number is c.
      width: the width e of a head.
      shape: the numbers of examples, heads, queries and keys, ``(b, h, q, k)``.
      offset: the position of the first query.
      mask: the mask, from which programs read only the band. Programs read the arrays of the mask
        from `Operands`.
    """

    heads: int
    examples: int
    width: int
    shape: tuple[int, int, int, int]
    offset: int
    mask: Mask

    @property
    def grid(self) -> tuple[int, int]:
        """The number of groups of heads, and the number of groups of examples."""
        batch, heads, _, _ = self.shape
        return heads // self.heads, batch // self.examples

    def lanes_of(self, head: int) -> slice:
        """Returns the slice of head number `head` in the last axis of ``[c, n, heads · e]``."""
        return slice(head * self.width, (head + 1) * self.width)

    def columns_of(self, example: int) -> slice:
        """Returns the slice of one example in the columns of a product ``[n, c · e]``."""
        return slice(example * self.width, (example + 1) * self.width)

    def plan(self, num_products: int, scratch: Scratch, memory: int) -> KernelPlan:
        """Returns the plan of a kernel.

        An array has an axis ``b`` of examples or an axis ``g`` of groups of examples, and the array
        is cut into tiles along this axis. It is also cut along its axis ``h`` of heads, or along
        its axis ``l`` with the lanes of all heads.

        Args:
          num_products: the number of products of weights and values that the kernel computes for
            each example.
          scratch: the scratch memory of the kernel.
          memory: the number of bytes of vector memory that a program may take.
        """
        batch, heads, q_length, k_length = self.shape
        num_logits = heads * q_length * k_length
        return KernelPlan(
            tile_sizes={
                "b": self.examples,
                "g": None,
                "h": self.heads,
                "l": self.heads * self.width,
            },
            grid=self.grid,
            grid_letters=("hl", "bg"),
            flops=num_products * 2 * self.width * batch * num_logits,
            exponentials=num_logits,
            scratch=(scratch,),
            memory=memory,
        )


def make_tiling(inputs: FusedInputs, q_length: int, query_offset: int) -> Tiling:
    """Returns the tiling for the given inputs."""
    batch, k_length, heads, width = inputs.values.shape
    fitting = min(examples_per_program(inputs.values, q_length), PRODUCT_COLUMNS // width)
    # All programs have the same number of examples, so this number divides the batch size.
    examples = max(n for n in range(1, max(fitting, 1) + 1) if batch % n == 0)
    return Tiling(
        heads=heads_per_program(heads, width),
        examples=examples,
        width=width,
        shape=(batch, heads, q_length, k_length),
        offset=query_offset,
        mask=inputs.mask,
    )


def heads_per_program(heads: int, width: int) -> int:
    """Returns the smallest number of heads that fills whole registers and divides `heads`.

    The result is `heads` if no smaller number fills whole registers.
    """
    fitting = (n for n in range(1, heads) if heads % n == 0 and n * width % LANES == 0)
    return next(fitting, heads)


def _tile_bytes(values: jax.Array, q_length: int) -> int:
    """Returns the number of bytes of vector memory that a program's matrices of logits take.

    In addition to the `FLOAT_MATRICES`, the backward kernel holds the weights in two layouts, in
    the dtype of the values.
    """
    _, k_length, heads, width = values.shape
    logit_bytes = FLOAT_MATRICES * 4 + 2 * values.dtype.itemsize
    return logit_bytes * heads_per_program(heads, width) * q_length * k_length


def program_memory(values: jax.Array, q_length: int) -> int:
    """Returns the number of bytes of vector memory that a program may take.

    `VMEM` bytes are enough if the matrices of logits fill at most two thirds of `VMEM`. Otherwise a
    program may take seven eighths of the chip's vector memory. The remaining memory is left to the
    compiler. If the chip is unknown, the result is `VMEM`, because all chips after TPU v4 have this
    much vector memory.
    """
    if not pltpu.is_tpu_device():
        return VMEM
    capacity = int(pltpu.get_tpu_info().vmem_capacity_bytes)
    if 3 * _tile_bytes(values, q_length) <= 2 * VMEM:
        return min(VMEM, capacity)
    return capacity // 8 * 7


def examples_per_program(values: jax.Array, q_length: int) -> int:
    """Returns the number of examples that fit into vector memory along with the logits.

    The result is less than 1 if the matrices of logits leave no memory for an example. An eighth of
    the program's memory is left to the compiler, which needed a quarter of a MiB more than the sum
    of these sizes for rows of 512 tokens on TPU v4.
    """
    _, k_length, heads, width = values.shape
    lanes = max(heads_per_program(heads, width) * width, LANES)
    # An example has values, an output, and the cotangents of both. Vector memory holds two copies
    # of each tile, because Pallas loads the next tile while a program computes the current tile.
    example_bytes = 8 * values.dtype.itemsize * max(q_length, k_length) * lanes
    usable = program_memory(values, q_length) // 8 * 7
    return (usable - _tile_bytes(values, q_length)) // example_bytes


class Operands(NamedTuple):
    """The arrays that both the forward kernel and the backward kernel read.

    In a kernel, the attributes are references to the tiles of a program.

    Attributes:
      bias: the logits of every head.
      values: the values ``[b, k, h · e]``. If `real_keys` is not None, the values of padding keys
        are zero.
      real_keys: an array ``[b / c, c, k]`` float32 that is 1 for real keys, or None if the real
        queries at a position may attend to the same keys in all examples.
      real_queries: an array ``[b / c, c, q]`` float32 that is 1 for real queries and 0 for padding
        queries. If `real_keys` is not None, the array is also 0 for queries that may attend to no
        key. The attribute is None if all queries are real and `real_keys` is None.
    """

    bias: Bias
    values: Ref
    real_keys: Ref
    real_queries: Ref


OPERAND_AXES = Operands(bias=BIAS_AXES, values="b.l", real_keys="g..", real_queries="g..")
"""The letters of the axes of `Operands`, in the form that `KernelPlan.spec` takes."""


def make_operands(tiling: Tiling, bias: Bias, inputs: FusedInputs, *, same_keys: bool) -> Operands:
    """Returns the inputs in the layout of the kernels.

    Args:
      tiling: the division of the work into programs.
      bias: the logits, from `prepare_bias`.
      inputs: the inputs, whose values and mask are used.
      same_keys: whether the real queries at a position may attend to the same keys in all examples.
    """
    values = inputs.values
    mask = inputs.mask
    batch, _, q_length, k_length = tiling.shape

    def in_groups(x: jax.Array) -> jax.Array:
        """Groups the examples of each program: reshapes ``[b, n]`` to ``[b / c, c, n]`` float32."""
        return x.astype(jnp.float32).reshape(-1, tiling.examples, x.shape[-1])

    real_queries = mask.queries(q_length)
    if real_queries is not None:
        real_queries = jnp.broadcast_to(real_queries, (batch, q_length))
    if same_keys:
        seeing = None if real_queries is None else in_groups(real_queries)
        return Operands(bias, flatten_heads(values), None, seeing)

    real_keys = mask.keys(k_length)
    assert real_keys is not None
    real_keys = jnp.broadcast_to(real_keys, (batch, k_length))

    # `seeing` has the shape [b, q] and says whether the band of a query contains a real key.
    band = mask.band_pairs(q_length, k_length)
    if band is None:
        seeing = jnp.broadcast_to(real_keys.any(axis=1, keepdims=True), (batch, q_length))
    else:
        seeing = jnp.matmul(real_keys.astype(jnp.bfloat16), band.T.astype(jnp.bfloat16)) > 0
    seeing = seeing if real_queries is None else seeing & real_queries

    cleared = jnp.where(real_keys[..., None, None], values, 0)
    return Operands(bias, flatten_heads(cleared), in_groups(real_keys), in_groups(seeing))


def flatten_heads(x: jax.Array) -> jax.Array:
    """Reshapes ``[b, n, h, e]`` to ``[b, n, h · e]``."""
    return x.reshape(*x.shape[:2], -1)


class Residuals(NamedTuple):
    """The arrays that the backward kernel reads in addition to the operands.

    Attributes:
      dout: the cotangent of the output, ``[b, q, h · e]``.
      out: the output, ``[b, q, h · e]``, or None if `Operands.real_keys` is None.
      inverse_row_sum: the inverse denominators, ``[h, b / c, c, q]``, or None if
        `Operands.real_keys` is None.
    """

    dout: Ref
    out: Ref = None
    inverse_row_sum: Ref = None


RESIDUAL_AXES = Residuals(dout="b.l", out="b.l", inverse_row_sum="hg..")
"""The letters of the axes of `Residuals`, in the form that `KernelPlan.spec` takes."""


class Scratch(NamedTuple):
    """Vector memory that the programs of a group of heads share.

    The memory is kept from one group of examples to the next.

    Attributes:
      weights: the weights E, or the normalized weights P if `Operands.real_keys` is None. The shape
        is ``[heads, q, k]``, and the dtype is the dtype of the values.
      tile: memory in which the forward kernel expands the diagonals of one head, ``[q, k]``
        float32. It is None if the bias has no diagonals, and in the backward kernel.
      transposed: the transposed weights, ``[heads, k, q]``, or None in the forward kernel.
      dlogits_sum: the sum of the logits' cotangents over the examples so far, ``[heads, q, k]``
        float32. It is None in the forward kernel. It is also None if the bias has a table, because
        the cotangent of the table is then the sum.
    """

    weights: Ref
    tile: Ref = None
    transposed: Ref = None
    dlogits_sum: Ref = None


def make_scratch(tiling: Tiling, operands: Operands, *, backward: bool) -> Scratch:
    """Returns the scratch memory of the backward kernel if `backward`, or of the forward kernel."""
    _, _, q_length, k_length = tiling.shape
    heads = tiling.heads
    dtype = operands.values.dtype
    weights = pltpu.VMEM((heads, q_length, k_length), dtype)
    if not backward:
        has_diagonals = operands.bias.diagonals is not None
        tile = pltpu.VMEM((q_length, k_length), jnp.float32) if has_diagonals else None
        return Scratch(weights, tile)
    has_table = operands.bias.table is not None
    dlogits_sum = None if has_table else pltpu.VMEM((heads, q_length, k_length), jnp.float32)
    transposed = pltpu.VMEM((heads, k_length, q_length), dtype)
    return Scratch(weights, transposed=transposed, dlogits_sum=dlogits_sum)
