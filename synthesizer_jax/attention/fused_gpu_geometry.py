"""How the GPU kernels of the fused route are cut into tiles, and how they read and write them.

A *tile* is the piece of an array that a program holds in registers. The logits of one head and
example are a matrix ``[q, k]``. Each of its tiles belongs to a tile of queries and a tile of keys::

                 keys of tile j
              ┌───────┬───────┬───────┐
              │       │       │       │      tile (i, j) of the logits
      queries ├───────┼───────┼───────┤      = tile i of queries × tile j of keys
      of      │       │ (i,j) │       │      [queries of a tile, keys of a tile]
      tile i  ├───────┼───────┼───────┤
              │       │       │       │
              └───────┴───────┴───────┘

A *program* is what one thread block of the GPU runs: it works on one head, and goes over a row, a
column or a diagonal of tiles of the logits. Its arrays stay in global memory. A `pl.BlockSpec`
selects the head only, and programs load tiles of rows as they need them. That differs from TPUs,
where Pallas copies tiles before a program starts.

The sizes of Triton's tiles are powers of two, so the last tile may reach beyond its array. Loads
there are masked and give zeros; stores there are masked and write nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from synthesizer_jax.attention.fused_arrays import FusedInputs
from synthesizer_jax.attention.kernel_arrays import LabeledArrays, run_kernel
from synthesizer_jax.attention.masks import Mask

MIN_PRODUCT_SIZE = 16
"""The fewest rows and columns of a matrix that tensor cores multiply."""

Ref: TypeAlias = Any
"""An array outside of kernels, and a Pallas reference to an array in global memory inside them."""

Scalar: TypeAlias = Any
"""An int, or inside kernels a traced int32."""


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """How large the tiles of a kernel are, and how Triton runs its programs.

    Attributes:
      queries: number of queries in a tile, a power of two.
      keys: number of keys in a tile, a power of two.
      warps: number of warps that run a program together.
      stages: number of iterations of the loop over tiles whose loads are in flight at once.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def fit(self, q_length: int, k_length: int) -> TileSizes:
        """Returns smaller tiles if there are fewer queries or keys than a tile holds."""
        q_size = max(MIN_PRODUCT_SIZE, pl.next_power_of_2(q_length))
        k_size = max(MIN_PRODUCT_SIZE, pl.next_power_of_2(k_length))
        return dataclasses.replace(
            self,
            queries=min(self.queries, q_size),
            keys=min(self.keys, k_size),
        )


def choose_tile_sizes(kernel: str, row_bytes: int, *, has_bias: bool) -> TileSizes:
    """Returns the sizes of a kernel's tiles.

    For rows of up to 128 bytes, these were the fastest of about eight choices on an H200. Wider
    rows need smaller tiles or more warps, because a program keeps its queries and sums in
    registers.

    Args:
      kernel: ``forward``, ``queries``, ``keys`` or ``bias``.
      row_bytes: size of one key, the keys of all terms together.
      has_bias: whether the logits have a bias, whose tile takes registers too.
    """
    if row_bytes <= 128:
        forward = TileSizes(64, 32, 4, 3) if has_bias else TileSizes(128, 64, 4, 3)
        sizes = {
            "forward": forward,
            "queries": TileSizes(64, 32, 4, 3),
            "keys": TileSizes(64, 64, 4, 3),
            "bias": TileSizes(64, 64, 4, 2),
        }
        return sizes[kernel]
    if row_bytes <= 256:
        return TileSizes(128, 64, 8, 2) if kernel == "forward" else TileSizes(64, 64, 4, 2)
    return TileSizes(64, 32, 4, 2) if kernel == "forward" else TileSizes(32, 32, 4, 1)


class Operands(NamedTuple):
    """What logits are made of.

    In a kernel, these are references to the arrays of one head, and axis h is absent.

    Attributes:
      queries: the queries of each `LowRank` term, ``[b or 1, q, h, r]``, r a power of two.
      keys: the keys of each `LowRank` term, ``[b or 1, k, h, r]``.
      values: ``[b, k, h, e]``, e a power of two.
      table: ``[h, q, k]``, the sum of all `Static` terms, or None if there are none.
      diagonals: ``[h, q + k - 1]`` float32, the sum of all `Relative` terms, or None if there are
        none. Number d belongs to all pairs with ``key - query = d - (q - 1)``.
      key_ends: ``[b]`` int32; keys from there on are padding. None if no key is.
      query_ends: ``[b]`` int32; queries from there on are padding. None if no query is, or if the
        queries are zero there already.
      real_keys: ``[b, k]`` int8, 1 for real keys, or None if `key_ends` says it all.
      prefix_lengths: ``[b]`` int32, `Mask.prefix_lengths`.
      query_segments: ``[b, q]`` int32, in packed rows.
      key_segments: ``[b, k]`` int32, in packed rows.
      allowed: ``[b or 1, h or 1, q, k]`` int8, `Mask.allowed`.
    """

    queries: tuple[Ref, ...]
    keys: tuple[Ref, ...]
    values: Ref
    table: Ref
    diagonals: Ref
    key_ends: Ref
    query_ends: Ref
    real_keys: Ref
    prefix_lengths: Ref
    query_segments: Ref
    key_segments: Ref
    allowed: Ref

    def axes(self) -> Operands:
        """Returns the letters of the axes of every array, as `Tiling.spec` reads them."""
        return Operands(
            queries=("bqhr",) * len(self.queries),
            keys=("bkhr",) * len(self.keys),
            values="bkhr",
            table="hqk",
            diagonals="hr",
            key_ends="b",
            query_ends="b",
            real_keys="bk",
            prefix_lengths="b",
            query_segments="bq",
            key_segments="bk",
            allowed="bhqk",
        )

    @property
    def has_bias(self) -> bool:
        """Whether examples share a part of the logits."""
        return self.table is not None or self.diagonals is not None

    @property
    def rank(self) -> int:
        """Number of multiply-adds that make one logit."""
        return sum(x.shape[-1] for x in self.queries)


def make_operands(inputs: FusedInputs, q_length: int) -> Operands:
    """Returns the inputs of the fused route as the kernels read them.

    Padding may hold NaN, which a weight of zero does not erase. If all padding is at the end of its
    row, the kernels load zeros in its place. Otherwise the arrays are copied here, with zeros for
    padding.
    """
    mask = inputs.mask
    holes = (mask.query_valid, mask.key_valid, mask.query_segments, mask.key_segments)
    is_at_end = all(x is None for x in holes)
    products, biases, values, *_ = inputs if is_at_end else inputs.cleared(q_length)

    real_keys = mask.keys(values.shape[1])
    real_queries = mask.queries(q_length) if is_at_end else None

    # Both factors of a product must have one dtype.
    low_rank = []
    for term in products.low_rank:
        dtype = jnp.result_type(term.queries, term.keys)
        low_rank.append((term.queries, term.keys, dtype))
    table, diagonals = biases.sums()
    return Operands(
        queries=tuple(fill_width(queries.astype(dtype)) for queries, _, dtype in low_rank),
        keys=tuple(fill_width(keys.astype(dtype)) for _, keys, dtype in low_rank),
        values=fill_width(values),
        table=table,
        diagonals=diagonals,
        key_ends=_ends(real_keys),
        query_ends=_ends(real_queries),
        real_keys=None if is_at_end else _cast(real_keys, jnp.int8),
        prefix_lengths=_cast(mask.prefix_lengths, jnp.int32),
        query_segments=_cast(mask.query_segments, jnp.int32),
        key_segments=_cast(mask.key_segments, jnp.int32),
        allowed=_cast(mask.allowed, jnp.int8),
    )


def _cast(x: jax.Array | None, dtype: Any) -> jax.Array | None:
    """Returns the array in another dtype, or None if there is none."""
    return None if x is None else x.astype(dtype)


def _ends(is_real: jax.Array | None) -> jax.Array | None:
    """Returns where the padding after the last real row of ``[b, n]`` begins, ``[b]`` int32."""
    if is_real is None:
        return None
    last = is_real.shape[1] - jnp.argmax(is_real[:, ::-1], axis=1)
    return jnp.where(is_real.any(axis=1), last, 0).astype(jnp.int32)


def fill_width(x: jax.Array) -> jax.Array:
    """Returns ``[b, n, h, r]`` with zeros up to a width that is a power of two, at least 16.

    Zeros add nothing to a product, and the columns that they add to results are cut off.
    """
    width = max(MIN_PRODUCT_SIZE, pl.next_power_of_2(x.shape[-1]))
    return x if width == x.shape[-1] else jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),))


@dataclasses.dataclass(frozen=True)
class RowTile:
    """A tile of an array whose rows are queries or keys.

    Attributes:
      index: number of the tile.
      size: number of rows in a tile.
      length: number of rows in the array. The last tile may have rows beyond it.
    """

    index: Scalar
    size: int
    length: int

    def slice(self) -> tuple[Ref, jax.Array | None]:
        """Returns the rows as a slice, and which of them exist, ``[size]`` bool or None for all."""
        first = self.index * self.size
        exists = first + jnp.arange(self.size) < self.length if self.length % self.size else None
        return pl.ds(first, self.size), exists

    def is_before(self, ends: Ref, example: Scalar) -> jax.Array:
        """Returns which rows are before an example's end, ``[size]`` bool; `ends` is ``[b]``."""
        return jnp.less(self.index * self.size + jnp.arange(self.size), ends[example])


class Tile(NamedTuple):
    """Where a tile of logits is.

    Attributes:
      queries: the tile of its queries.
      keys: the tile of its keys.
      transposed: whether the rows of the tile are keys. Otherwise they are queries.
    """

    queries: RowTile
    keys: RowTile
    transposed: bool = False

    @property
    def query_axis(self) -> int:
        """The axis of the tile along which queries lie."""
        return 1 if self.transposed else 0

    @property
    def key_axis(self) -> int:
        """The axis of the tile along which keys lie."""
        return 1 - self.query_axis

    def positions(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the query and the key of every logit, and which pairs exist (None for all).

        All have the shape of the tile. Positions are those in the arrays.
        """
        shape = (self.queries.size, self.keys.size)
        if self.transposed:
            shape = shape[::-1]
        first_query = self.queries.index * self.queries.size
        query = first_query + lax.broadcasted_iota(jnp.int32, shape, self.query_axis)
        first_key = self.keys.index * self.keys.size
        key = first_key + lax.broadcasted_iota(jnp.int32, shape, self.key_axis)

        exists = None
        if self.queries.length % self.queries.size:
            exists = query < self.queries.length
        if self.keys.length % self.keys.size:
            key_exists = key < self.keys.length
            exists = key_exists if exists is None else exists & key_exists
        return query, key, exists


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel cuts the logits into tiles, and what else is known when it is traced.

    Attributes:
      mask: the mask. Kernels read its band here, and its arrays in `Operands`.
      lengths: the numbers of queries and keys.
      sizes: the sizes of the tiles.
      soft_cap: as in `attend`.
    """

    mask: Mask
    lengths: tuple[int, int]
    sizes: TileSizes
    soft_cap: float | None

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of tiles of queries and of keys."""
        q_length, k_length = self.lengths
        return pl.cdiv(q_length, self.sizes.queries), pl.cdiv(k_length, self.sizes.keys)

    def query_tile(self, i: Scalar) -> RowTile:
        """Returns the tile of queries with number i."""
        return RowTile(i, self.sizes.queries, self.lengths[0])

    def key_tile(self, j: Scalar) -> RowTile:
        """Returns the tile of keys with number j."""
        return RowTile(j, self.sizes.keys, self.lengths[1])

    def tile(self, i: Scalar, j: Scalar, *, transposed: bool = False) -> Tile:
        """Returns the tile of logits of tile i of queries and tile j of keys."""
        return Tile(self.query_tile(i), self.key_tile(j), transposed)

    @property
    def _band(self) -> tuple[int | None, int | None]:
        """How many keys before and after its own position a query may see; None for all.

        With a prefix, a query may see keys outside of the band.
        """
        return (None, None) if self.mask.prefix_lengths is not None else self.mask.band

    def visible_keys(self, i: Scalar, end: Scalar | None) -> tuple[Scalar, Scalar]:
        """Returns the range of tiles of keys that the queries of tile i may see.

        A causal mask saves half of the logits' tiles by this, and a window saves most.

        Args:
          i: number of the tile of queries.
          end: where the padding of the keys begins, or None if there is none.

        Returns:
          The number of the first tile, and one more than the number of the last tile.
        """
        before, after = self._band
        size = self.sizes.keys
        query = i * self.sizes.queries + self.mask.query_offset
        first: Scalar = 0
        last: Scalar = self.lengths[1] if end is None else end
        if before is not None:
            first = jnp.maximum(query - before, 0)
        if after is not None:
            last = jnp.clip(query + self.sizes.queries + after, 0, last)
        return _floor_divide(first, size), _floor_divide(last + size - 1, size)

    def seeing_queries(self, j: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the range of tiles of queries that may see the keys of tile j."""
        before, after = self._band
        size = self.sizes.queries
        key = j * self.sizes.keys - self.mask.query_offset
        first: Scalar = 0
        last: Scalar = self.lengths[0]
        if after is not None:
            first = jnp.maximum(key - after, 0)
        if before is not None:
            last = jnp.clip(key + self.sizes.keys + before, 0, last)
        return _floor_divide(first, size), _floor_divide(last + size - 1, size)

    def spec(self, x: Ref, letters: str) -> pl.BlockSpec | None:
        """Returns what a program sees of an array, which is one head with all its rows.

        Axes q and k are as long as whole tiles, so that the slice of the last tile is inside.
        """
        if x is None:
            return None
        q_count, k_count = self.counts
        sizes = {"q": q_count * self.sizes.queries, "k": k_count * self.sizes.keys, "h": None}
        shape = tuple(sizes.get(letter, n) for letter, n in zip(letters, x.shape, strict=True))
        # Heads share an array with one head.
        is_head = [letter == "h" and n > 1 for letter, n in zip(letters, x.shape, strict=True)]

        def index(_: Scalar, head: Scalar, __: Scalar) -> tuple[Scalar, ...]:
            """Returns the index of a program's piece along every axis of the array."""
            return tuple(head if along_heads else 0 for along_heads in is_head)

        return pl.BlockSpec(shape, index)

    def call(
        self,
        kernel: Callable[..., None],
        inputs: LabeledArrays,
        outputs: LabeledArrays,
        *,
        grid: tuple[int, int, int],
        multiply_adds: int,
        interpret: bool,
    ) -> Any:
        """Runs a kernel and returns its results.

        Args:
          kernel: a function of references to the inputs and the outputs, of one head.
          inputs: a tuple of trees of arrays. The first of them is `Operands`.
          outputs: a tuple of trees of shapes.
          grid: numbers of programs. The second axis is that of heads.
          multiply_adds: number of multiply-adds that the kernel makes for each logit.
          interpret: whether to run the kernel in Python, without a GPU.
        """
        batch, _, heads, _ = inputs.arrays[0].values.shape
        num_logits = batch * heads * math.prod(self.lengths)
        params = plgpu.CompilerParams(num_warps=self.sizes.warps, num_stages=self.sizes.stages)
        return run_kernel(
            kernel,
            inputs,
            outputs,
            spec=self.spec,
            grid=grid,
            flops=2 * multiply_adds * num_logits,
            exponentials=num_logits,
            compiler_params=params,
            interpret=interpret,
        )


def _floor_divide(x: Scalar, y: int) -> Scalar:
    """Returns ``x // y`` of a number that is not negative, without the correction for signs."""
    return x // y if isinstance(x, int) else lax.div(x, jnp.int32(y))


def make_tiling(
    kernel: str, operands: Operands, mask: Mask, q_length: int, soft_cap: float | None
) -> Tiling:
    """Returns the tiling of a kernel, named as in `choose_tile_sizes`."""
    row_bytes = sum(x.shape[-1] * x.dtype.itemsize for x in operands.keys)
    row_bytes = max(row_bytes, operands.values.shape[-1] * operands.values.dtype.itemsize)
    lengths = (q_length, operands.values.shape[1])
    sizes = choose_tile_sizes(kernel, row_bytes, has_bias=operands.has_bias)
    return Tiling(mask, lengths, sizes.fit(*lengths), soft_cap)


class TileRows(NamedTuple):
    """The rows of a tile's queries and keys, after they were loaded.

    Attributes:
      queries: those of every term, ``[queries of the tile, r]``.
      keys: those of every term, ``[keys of the tile, r]``.
      values: ``[keys of the tile, e]``.
    """

    queries: list[jax.Array]
    keys: list[jax.Array]
    values: jax.Array


class Program(NamedTuple):
    """What a program knows while it works on one head and example.

    Attributes:
      tiling: how the logits are cut.
      refs: references to the operands.
      example: number of the example.
    """

    tiling: Tiling
    refs: Operands
    example: Scalar

    def load_queries(self, tile: RowTile) -> list[jax.Array]:
        """Returns the queries of every term, ``[size, r]`` each, and zeros for padding."""
        ends = self.refs.query_ends
        return [load_rows(ref, self.example, tile, ends) for ref in self.refs.queries]

    def load_keys(self, tile: RowTile) -> tuple[list[jax.Array], jax.Array]:
        """Returns the keys of every term, ``[size, r]``, and the values, with zeros for padding."""
        ends = self.refs.key_ends
        keys = [load_rows(ref, self.example, tile, ends) for ref in self.refs.keys]
        return keys, load_rows(self.refs.values, self.example, tile, ends)

    def visible_keys(self, i: Scalar) -> tuple[Scalar, Scalar]:
        """Returns `Tiling.visible_keys` of tile i of queries in this example."""
        ends = self.refs.key_ends
        return self.tiling.visible_keys(i, None if ends is None else ends[self.example])


def load(ref: Ref, exists: jax.Array | None) -> jax.Array:
    """Returns what a reference points to, and zeros where it does not exist."""
    return ref[...] if exists is None else plgpu.load(ref, mask=exists, other=0)


def load_rows(ref: Ref, example: Scalar, tile: RowTile, ends: Ref = None) -> jax.Array:
    """Returns a tile of ``[b or 1, n, r]``, ``[size, r]``; zeros from `ends` or the length on."""
    rows, exists = tile.slice()
    if ends is not None:
        exists = tile.is_before(ends, example)
    # Examples share an array whose first axis has the size 1.
    ref = ref.at[jnp.minimum(example, ref.shape[0] - 1), rows, :]
    return load(ref, None if exists is None else exists[:, None])


def load_vector(ref: Ref, example: Scalar, tile: RowTile) -> jax.Array:
    """Returns a tile of ``[b, n]``, ``[size]``; zeros from the length on."""
    rows, exists = tile.slice()
    ref = ref.at[example, rows]
    return load(ref, exists)


def store_rows(ref: Ref, example: Scalar, tile: RowTile, x: jax.Array) -> None:
    """Writes a tile ``[size, r]`` of ``[b, n, r]``, except rows beyond the length."""
    rows, exists = tile.slice()
    mask = None if exists is None else exists[:, None]
    plgpu.store(ref.at[example, rows, :], x.astype(ref.dtype), mask=mask)


def store_vector(ref: Ref, example: Scalar, tile: RowTile, x: jax.Array) -> None:
    """Writes a tile ``[size]`` of ``[b, n]``, except numbers beyond the length."""
    rows, exists = tile.slice()
    plgpu.store(ref.at[example, rows], x, mask=exists)
