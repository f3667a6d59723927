"""Defines the tiles and the operands of the TPU kernels of the fused route.

The logits of one head and one example are a matrix ``[q, k]``. A program holds a *tile* of the
matrix in vector memory. The tile has some rows and all columns of the matrix. ::

              all keys
            ┌──────────────────────┐
            │                      │
    tile i  ├──────────────────────┤
    of      │  a tile              │   [queries of a tile, k]
    queries ├──────────────────────┤
            │                      │
            └──────────────────────┘

A tile contains all keys of a row, so the softmax needs no second pass and no rescaling. The grid is
``(heads, tiles of rows, examples)``. The axis of examples is innermost, so that a tile of the bias
is read only once for all examples.

One of the backward kernels has *transposed* tiles. The rows of a transposed tile belong to some of
the keys, and its columns belong to all queries.
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
"""The largest number of logits in a tile, which takes 1 MiB in float32.

A program holds about six arrays of this size at once. A core of TPU v4 has 16 MiB of vector memory.
"""


def choose_tile_rows(rows: int, columns: int) -> int:
    """Returns the number of rows of a tile, for a matrix of logits ``[rows, columns]``.

    A tile has all rows if they fit into `MAX_TILE` logits. Otherwise the number of rows is the
    largest multiple of `LANES` that fits, but at least `LANES` and at most `rows`.

    The last tile may reach beyond the last row of the matrix. A program reads undefined numbers
    there, and results that it writes there are dropped. Most results of a program depend on one row
    of the tile only, so the undefined numbers do not reach the real rows. Only `tpu.sum_diagonals`
    adds up several rows of such a tile, and it leaves out the rows beyond the last row.
    """
    columns = max(columns, LANES)  # a row takes at least one whole register
    if rows * columns <= MAX_TILE:
        return rows
    return min(rows, max(LANES, MAX_TILE // columns // LANES * LANES))


class Scratch(NamedTuple):
    """Vector memory that is kept from one example to the next, for one head and one tile of rows.

    Attributes:
      bias_tile: the tile of the bias, ``[tile_rows, columns]`` float32, or None without a bias.
      dlogits_sum: the sum of dS over the examples so far, ``[tile_rows, columns]`` float32, or None
        if the kernel does not compute the cotangent of diagonals.
    """

    bias_tile: Ref = None
    dlogits_sum: Ref = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles into which a kernel cuts the logits, and other options known at tracing time.

    Attributes:
      mask: the mask, from which kernels read only the band. Kernels read the arrays of the mask
        from `Operands`.
      offset: the position of the first query.
      batch: the number of examples.
      heads: the number of heads.
      rows: the number of queries, or the number of keys if `transposed`.
      columns: the number of keys, or the number of queries if `transposed`.
      soft_cap: the argument `soft_cap` of `attend`.
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
        """The number of rows in a tile."""
        return choose_tile_rows(self.rows, self.columns)

    @property
    def tile_shape(self) -> tuple[int, int]:
        """The shape of a tile, ``[tile_rows, columns]``."""
        return self.tile_rows, self.columns

    @property
    def query_axis(self) -> int:
        """The axis of queries in a tile, 0 or 1."""
        return 1 if self.transposed else 0

    @property
    def key_axis(self) -> int:
        """The axis of keys in a tile, 0 or 1."""
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
        """Returns the plan of a kernel that computes `multiply_adds` multiply-adds for each logit.

        Each program works on one head (axis ``h``) and one example (axis ``b``). The rows of its
        tile are queries (axis ``q``), or keys (axis ``k``) if the tile is transposed.
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
    """The arrays that every kernel reads to compute logits and outputs.

    In a kernel, the attributes are references to a program's tiles. Tiles have no axes b and h, so
    they are matrices. An attribute is None if the call has no such array.

    Attributes:
      products: the terms that are products of factors. Their arrays are ``[b or 1, h, n, r]``.
      values: the values, ``[b, h, k, e]``.
      bias: the bias, which all examples share.
      real_keys: an array ``[b, 1, k]`` int32 that is 1 for real keys, or None if no key is padding.
      query_segments: the segments of queries in packed rows, ``[b, 1, q]`` int32.
      key_segments: the segments of keys in packed rows, ``[b, 1, k]`` int32.
      allowed: `Mask.allowed`, ``[b or 1, q, k]`` int8.
    """

    products: Products
    values: Ref
    bias: Bias
    real_keys: Ref
    query_segments: Ref
    key_segments: Ref
    allowed: Ref

    def axes(self) -> Operands:
        """Returns the letters of every array's axes, in the form that `KernelPlan.spec` takes."""
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
        """Returns the number of multiply-adds that compute one logit."""
        low_rank = sum(term.keys.shape[-1] for term in self.products.low_rank)
        return low_rank + sum(term.a.shape[-1] + term.b.shape[-1] for term in self.products.outer)


def make_operands(inputs: FusedInputs, bias: Bias) -> Operands:
    """Returns the inputs of the fused route in the layout of the kernels."""
    products, _, values, mask, _ = inputs
    # In packed rows, padding has a separate segment number. The comparison of `query_segments` and
    # `key_segments` therefore already excludes padding.
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
    """Reshapes ``[b, n]`` to ``[b, 1, n]`` int32, so that the tile of one example is a matrix."""
    return None if x is None else x.astype(jnp.int32)[:, None]


def product_axes(products: Products) -> Products:
    """Returns the axis letters of every factor, which are ``bhq.`` or ``bhk.``.

    A factor that is None has no letters.
    """
    axes: Products = map_arrays(lambda a: f"bh{a.axes[1]}.", products)
    return axes


def heads_first(x: jax.Array) -> jax.Array:
    """Transposes ``[b, n, h, r]`` to ``[b, h, n, r]``, and back.

    Registers hold the last two axes of a tile. The last two axes must therefore be rows and width
    instead of heads and width.
    """
    return x.swapaxes(1, 2)


def without_queries(products: Products) -> Products:
    """Returns the products, with the queries of `LowRank` terms replaced by None."""
    absent: PyTree = None
    return products._replace(
        low_rank=tuple(dataclasses.replace(term, queries=absent) for term in products.low_rank)
    )


def without_keys(products: Products) -> Products:
    """Returns the products, with the keys of `LowRank` terms replaced by None."""
    absent: PyTree = None
    return products._replace(
        low_rank=tuple(dataclasses.replace(term, keys=absent) for term in products.low_rank)
    )
