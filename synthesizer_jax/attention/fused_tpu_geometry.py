"""How the TPU kernels of the fused route are cut into tiles, and what they read.

The logits of one head and example are a matrix ``[q, k]``. A program holds a *tile* of it in vector
memory: some of the rows and all columns. ::

              all keys
            ┌──────────────────────┐
            │                      │
    tile i  ├──────────────────────┤
    of      │  a tile              │   [queries of a tile, k]
    queries ├──────────────────────┤
            │                      │
            └──────────────────────┘

All keys of a row are there at once, so the softmax needs no second pass and no rescaling. The grid
is ``(heads, tiles of rows, examples)``. Examples are innermost: a tile of the bias, which they
share, is read once for all of them.

The tiles of one backward kernel are *transposed*: their rows are keys, and they hold all queries.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.fused_arrays import FusedInputs, Products
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import map_arrays
from synthesizer_jax.attention.tpu import BIAS_AXES, LANES, Bias, KernelPlan, Ref
from synthesizer_jax.base.typing import PyTree

MAX_TILE = 256 * 1024
"""The most logits in a tile, which are 1 MiB in float32.

About six arrays of this size live at once, and a core of TPU v4 has 16 MiB of vector memory.
"""


def choose_tile_rows(rows: int, columns: int) -> int:
    """Returns how many rows of a matrix of logits a tile has.

    That is all of them if they fit, and otherwise a multiple of `LANES`: a tile may be not much
    larger than `MAX_TILE`.
    """
    columns = max(columns, LANES)  # a row fills whole registers
    if rows * columns <= MAX_TILE:
        return rows
    return min(rows, max(LANES, MAX_TILE // columns // LANES * LANES))


class Scratch(NamedTuple):
    """Vector memory that programs of one head and tile of rows share, from example to example.

    Attributes:
      bias_tile: the bias, ``[tile_rows, columns]`` float32, or None if there is none.
      dlogits_sum: the sum of dS over the examples so far, ``[tile_rows, columns]`` float32, or None
        if no cotangent of diagonals is computed.
    """

    bias_tile: Ref = None
    dlogits_sum: Ref = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the logits are cut into tiles ``[tile_rows, columns]``, and what else is known when
    tracing.

    Attributes:
      mask: the mask. Kernels read its band here, and its arrays in `Operands`.
      offset: the position of the first query.
      batch: number of examples.
      heads: number of heads.
      rows: number of queries, or of keys if `transposed`.
      columns: number of keys, or of queries if `transposed`.
      soft_cap: as in `attend`.
      transposed: whether the rows of a tile are keys.
    """

    mask: Mask
    offset: int
    batch: int
    heads: int
    rows: int
    columns: int
    soft_cap: float | None
    transposed: bool = False

    def transpose(self) -> Tiling:
        """Returns the tiling of the transposed logits."""
        return dataclasses.replace(
            self, rows=self.columns, columns=self.rows, transposed=not self.transposed
        )

    @property
    def tile_rows(self) -> int:
        """Number of rows in a tile."""
        return choose_tile_rows(self.rows, self.columns)

    @property
    def tile_shape(self) -> tuple[int, int]:
        """The shape of a tile, ``[tile_rows, columns]``."""
        return self.tile_rows, self.columns

    @property
    def query_axis(self) -> int:
        """The axis of a tile along which queries lie."""
        return 1 if self.transposed else 0

    @property
    def key_axis(self) -> int:
        """The axis of a tile along which keys lie."""
        return 1 - self.query_axis

    def scratch(self, bias: Bias, *, sums_diagonals: bool = False) -> Scratch:
        """Returns the scratch memory of a kernel.

        Args:
          bias: the bias of the logits.
          sums_diagonals: whether the kernel computes the cotangent of `Bias.diagonals`.
        """
        tile = pltpu.VMEM(self.tile_shape, jnp.float32)
        has_bias = bool(jax.tree.leaves(bias))
        return Scratch(tile if has_bias else None, tile if sums_diagonals else None)

    def plan(self, multiply_adds: int, scratch: Scratch) -> KernelPlan:
        """Returns the plan of a kernel that makes so many multiply-adds for each logit.

        A program sees one head ``h``, one example ``b``, and a tile's queries ``q`` or keys ``k``.
        """
        row_axis = "k" if self.transposed else "q"
        num_logits = self.batch * self.heads * self.rows * self.columns
        return KernelPlan(
            tile_sizes={"b": None, "h": None, row_axis: self.tile_rows},
            grid=(self.heads, pl.cdiv(self.rows, self.tile_rows), self.batch),
            grid_letters=("h", row_axis, "b"),
            flops=2 * multiply_adds * num_logits,
            exponentials=num_logits,
            scratch=(scratch,),
        )


class Operands(NamedTuple):
    """What logits are made of, heads first. In a kernel, these are references to a program's
    tiles.

    Tiles have no axes b and h, so a kernel sees matrices.

    Attributes:
      products: terms whose arrays are ``[b or 1, h, n, r]``.
      values: ``[b, h, k, e]``.
      bias: what the examples share.
      real_keys: ``[b, 1, k]`` int32, 1 for real keys, or None if all are.
      query_segments: ``[b, 1, q]`` int32, in packed rows.
      key_segments: ``[b, 1, k]`` int32, in packed rows.
      allowed: ``[b or 1, q, k]`` int8, `Mask.allowed`.
    """

    products: Products
    values: Ref
    bias: Bias
    real_keys: Ref
    query_segments: Ref
    key_segments: Ref
    allowed: Ref

    def axes(self) -> Operands:
        """Returns the letters of the axes of every array, as `KernelPlan.spec` reads them."""
        return Operands(
            products=product_axes(self.products),
            values="bhk.",
            bias=BIAS_AXES,
            real_keys="b.k",
            query_segments="b.q",
            key_segments="b.k",
            allowed="bqk",
        )

    def multiply_adds(self) -> int:
        """Returns the number of multiply-adds that make one logit."""
        low_rank = sum(term.keys.shape[-1] for term in self.products.low_rank)
        return low_rank + sum(term.a.shape[-1] + term.b.shape[-1] for term in self.products.outer)


def make_operands(inputs: FusedInputs, bias: Bias) -> Operands:
    """Returns the inputs of the fused route in the layout of the kernels."""
    products, _, values, mask, _ = inputs
    # Segments tell padding by themselves: it has a segment of its own.
    has_padding = mask.key_lengths is not None or mask.key_valid is not None
    real_keys = mask.keys(values.shape[1]) if has_padding else None
    return Operands(
        products=jax.tree.map(heads_first, products),
        values=heads_first(values),
        bias=bias,
        real_keys=_as_row(real_keys),
        query_segments=_as_row(mask.query_segments),
        key_segments=_as_row(mask.key_segments),
        allowed=None if mask.allowed is None else mask.allowed[:, 0].astype(jnp.int8),
    )


def _as_row(x: jax.Array | None) -> jax.Array | None:
    """Returns ``[b, n]`` as ``[b, 1, n]`` int32: a tile of one example is then a matrix."""
    return None if x is None else x.astype(jnp.int32)[:, None]


def product_axes(products: Products) -> Products:
    """Returns the letters of the axes of every factor that is not None, ``bhq.`` or ``bhk.``."""
    axes: Products = map_arrays(lambda a: f"bh{a.axes[1]}.", products)
    return axes


def heads_first(x: jax.Array) -> jax.Array:
    """Transposes ``[b, n, h, r]`` to ``[b, h, n, r]``, and back.

    The last two axes of a tile fill registers. They must be rows and width, not heads and width.
    """
    return x.swapaxes(1, 2)


def without_queries(products: Products) -> Products:
    """Returns the products with None for the queries of `LowRank` terms."""
    absent: PyTree = None
    return products._replace(
        low_rank=tuple(dataclasses.replace(term, queries=absent) for term in products.low_rank)
    )


def without_keys(products: Products) -> Products:
    """Returns the products with None for the keys of `LowRank` terms."""
    absent: PyTree = None
    return products._replace(
        low_rank=tuple(dataclasses.replace(term, keys=absent) for term in products.low_rank)
    )
