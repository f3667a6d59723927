"""How the TPU kernels of the static route are cut into programs, and what they read.

A program computes some heads of some examples. The logits, which all examples share, are a matrix
``[q, k]`` per head and stay in vector memory. The rows of several examples lie side by side in one
matrix product::

    weights of one head      values of c examples      outputs of c examples
    [q, k]               ×   [k, c · e]            =   [q, c · e]

One example alone has e columns, often 64, and would leave half of a register empty.

In memory, the heads lie side by side too: values are ``[b, k, h · e]``. A tile of the last axis
must be whole registers of 128 lanes, so a program takes as many heads as fill them. The grid is
``(groups of heads, groups of examples)``. Examples are innermost: the first program of a group of
heads computes the weights, and the others find them in scratch memory.
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

LIVE_TILES = 10
"""How many matrices of a head's logits, in float32, live at once.

They are the table, its cotangent, the weights in two layouts, sums, and temporary arrays.
"""

PRODUCT_COLUMNS = 512
"""The most columns that the examples of a program fill in a matrix product.

If one example has more columns, a program has one example.
"""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut into programs, and what else is known when it is traced.

    Attributes:
      heads: number of heads of a program.
      examples: number of examples of a program, c.
      width: width of a head, e.
      shape: ``(b, h, q, k)``, the numbers of examples, heads, queries and keys.
      offset: the position of the first query.
      mask: the mask. Programs read its band here, and its arrays in `Operands`.
    """

    heads: int
    examples: int
    width: int
    shape: tuple[int, int, int, int]
    offset: int
    mask: Mask

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of groups of heads and of groups of examples."""
        batch, heads, _, _ = self.shape
        return heads // self.heads, batch // self.examples

    def lanes_of(self, head: int) -> slice:
        """Returns where a program's head number `head` lies in a tile ``[c, n, heads · e]``."""
        return slice(head * self.width, (head + 1) * self.width)

    def columns_of(self, example: int) -> slice:
        """Returns where a program's example lies in the columns ``[n, c · e]`` of a product."""
        return slice(example * self.width, (example + 1) * self.width)

    def plan(self, num_products: int, scratch: Scratch, memory: int) -> KernelPlan:
        """Returns the plan of a kernel.

        Its tiles are those of a program's examples ``b``, or of their group ``g``, and of its
        heads ``h``, or of their lanes ``l``.

        Args:
          num_products: how many products of weights and values the kernel computes for each
            example.
          scratch: its scratch memory.
          memory: bytes of vector memory that a program may take.
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
    """Returns the tiling for some inputs."""
    batch, k_length, heads, width = inputs.values.shape
    fitting = min(examples_per_program(inputs.values, q_length), PRODUCT_COLUMNS // width)
    # All programs have as many examples, so that is a divisor of the batch.
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
    """Returns the smallest number of heads that fill whole registers, or all heads."""
    fitting = (n for n in range(1, heads) if heads % n == 0 and n * width % LANES == 0)
    return next(fitting, heads)


def _tile_bytes(values: jax.Array, q_length: int) -> int:
    """Returns how much vector memory a program's matrices of logits take, in bytes."""
    _, k_length, heads, width = values.shape
    return LIVE_TILES * 4 * heads_per_program(heads, width) * q_length * k_length


def program_memory(values: jax.Array, q_length: int) -> int:
    """Returns how many bytes of vector memory a program may take.

    `VMEM` is enough if matrices of logits fill at most two thirds of it. Otherwise a program takes
    seven eighths of the chip's, and the compiler keeps its arrays in the rest. If the chip is not
    known, this is `VMEM`, which all chips after TPU v4 have.
    """
    if not pltpu.is_tpu_device():
        return VMEM
    capacity = int(pltpu.get_tpu_info().vmem_capacity_bytes)
    if 3 * _tile_bytes(values, q_length) <= 2 * VMEM:
        return min(VMEM, capacity)
    return capacity // 8 * 7


def examples_per_program(values: jax.Array, q_length: int) -> int:
    """Returns how many examples fit into vector memory beside a program's matrices of logits.

    Returns 0 if the matrices alone do not fit. A third of the vector memory is left to the
    compiler.
    """
    _, k_length, heads, width = values.shape
    lanes = max(heads_per_program(heads, width) * width, LANES)
    # An example has values, an output, and the cotangents of both. Each tile is there twice:
    # Pallas copies the next one while a program works on the first.
    example_bytes = 8 * values.dtype.itemsize * max(q_length, k_length) * lanes
    memory = program_memory(values, q_length)
    tiles = _tile_bytes(values, q_length)
    if 3 * tiles > 2 * memory:
        return 0
    return 2 * (memory - tiles) // (3 * example_bytes)


class Operands(NamedTuple):
    """What both kernels read. In a kernel, these are references to the tiles of a program.

    Attributes:
      bias: the logits of every head.
      values: ``[b, k, h · e]``, zero where keys are padding.
      real_keys: ``[b / c, c, k]`` float32, 1 for real keys. None if real queries of one position
        see the same keys in every example.
      real_queries: ``[b / c, c, q]`` float32, 1 for real queries that see a key, or None if all do.
    """

    bias: Bias
    values: Ref
    real_keys: Ref
    real_queries: Ref


OPERAND_AXES = Operands(bias=BIAS_AXES, values="b.l", real_keys="g..", real_queries="g..")
"""The letters of the axes of `Operands`, as `KernelPlan.spec` reads them."""


def make_operands(tiling: Tiling, bias: Bias, inputs: FusedInputs, *, same_keys: bool) -> Operands:
    """Returns the inputs in the layout of the kernels.

    Args:
      tiling: how the work is cut.
      bias: the logits, from `prepare_bias`.
      inputs: values and mask.
      same_keys: whether the real queries of one position see the same keys in every example.
    """
    values = inputs.values
    mask = inputs.mask
    batch, _, q_length, k_length = tiling.shape

    def in_groups(x: jax.Array) -> jax.Array:
        """Returns ``[b, n]`` as groups of a program's examples, ``[b / c, c, n]`` float32."""
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

    # Whether a query sees any key, [b, q]: whether the band has a real key for it.
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
    """What the backward kernel reads besides the operands.

    Attributes:
      dout: the cotangent of the output, ``[b, q, h · e]``.
      out: the output, ``[b, q, h · e]``. None if `Operands.real_keys` is None.
      inverse_row_sum: 1 over the denominators, ``[h, b / c, c, q]``. None likewise.
    """

    dout: Ref
    out: Ref = None
    inverse_row_sum: Ref = None


RESIDUAL_AXES = Residuals(dout="b.l", out="b.l", inverse_row_sum="hg..")
"""The letters of the axes of `Residuals`."""


class Scratch(NamedTuple):
    """Vector memory that the programs of a group of heads share, from one group of examples to the
    next.

    Attributes:
      weights: E, ``[heads, q, k]`` in the values' dtype. If `Operands.real_keys` is None, they are
        normalized: the weights P.
      tile: the logits of one head, ``[q, k]`` float32, if they have diagonals.
      transposed: the transposed weights, ``[heads, k, q]``. Only the backward kernel has them.
      dlogits_sum: the sum of the logits' cotangents over the examples so far, ``[heads, q, k]``
        float32. Only the backward kernel has it.
    """

    weights: Ref
    tile: Ref
    transposed: Ref = None
    dlogits_sum: Ref = None


def make_scratch(tiling: Tiling, operands: Operands, *, backward: bool) -> Scratch:
    """Returns the scratch memory of the backward or the forward kernel."""
    _, _, q_length, k_length = tiling.shape
    heads = tiling.heads
    dtype = operands.values.dtype
    has_diagonals = operands.bias.diagonals is not None
    weights = pltpu.VMEM((heads, q_length, k_length), dtype)
    tile = pltpu.VMEM((q_length, k_length), jnp.float32) if has_diagonals else None
    if not backward:
        return Scratch(weights, tile)
    return Scratch(
        weights,
        tile,
        transposed=pltpu.VMEM((heads, k_length, q_length), dtype),
        dlogits_sum=pltpu.VMEM((heads, q_length, k_length), jnp.float32),
    )
