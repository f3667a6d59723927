"""Defines the tiles of the GPU kernels of the fused route, and functions to load and store tiles.

A *tile* is the piece of an array that a program holds in registers. The logits of one head and one
example are a matrix ``[q, k]``. Each tile of the matrix belongs to a tile of queries and a tile of
keys::

                 keys of tile j
              ┌───────┬───────┬───────┐
              │       │       │       │      tile (i, j) of the logits
      queries ├───────┼───────┼───────┤      = tile i of queries × tile j of keys
      of      │       │ (i,j) │       │      [queries of a tile, keys of a tile]
      tile i  ├───────┼───────┼───────┤
              │       │       │       │
              └───────┴───────┴───────┘

A *program* runs on one thread block of the GPU. Each program works on one head, and loops over the
tiles in a row, a column or a diagonal of the logits. Inputs and outputs stay in global memory. A
`pl.BlockSpec` only selects the head, and each program loads tiles when it needs them. On TPUs, in
contrast, Pallas copies tiles before a program starts.

The sizes of Triton's tiles are powers of two, so the last tile may reach beyond the end of its
array. Beyond the end, masked loads return zeros, and masked stores write nothing.
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
"""The smallest number of rows and columns that tensor cores can multiply."""

Ref: TypeAlias = Any
"""A Pallas reference to an array in global memory. Outside of kernels, a `Ref` is an array."""

Scalar: TypeAlias = Any
"""A Python int, or a traced int32 inside of a kernel."""


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """The sizes of a kernel's tiles, and the options with which Triton compiles the kernel.

    Attributes:
      queries: the number of queries in a tile, a power of two.
      keys: the number of keys in a tile, a power of two.
      warps: the number of warps that run a program together.
      stages: the number of loop iterations whose loads are in flight at once.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def fit(self, q_length: int, k_length: int) -> TileSizes:
        """Returns smaller tile sizes if the call has only few queries or few keys."""
        q_size = max(MIN_PRODUCT_SIZE, pl.next_power_of_2(q_length))
        k_size = max(MIN_PRODUCT_SIZE, pl.next_power_of_2(k_length))
        return dataclasses.replace(
            self,
            queries=min(self.queries, q_size),
            keys=min(self.keys, k_size),
        )


def choose_tile_sizes(kernel: str, row_bytes: int, *, has_bias: bool) -> TileSizes:
    """Returns the sizes of a kernel's tiles.

    For rows of up to 128 bytes, the returned sizes were the fastest of about eight choices on an
    H200. Wider rows need smaller tiles or more warps, because a program keeps its queries and sums
    in registers.

    Args:
      kernel: ``forward``, ``queries``, ``keys`` or ``bias``.
      row_bytes: the number of bytes of one key, summed over all terms. If a value is larger than
        the key, `row_bytes` is the number of bytes of one value.
      has_bias: whether the logits have a bias. A tile of the bias also takes up registers.
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
    """The arrays that every kernel reads to compute logits and outputs.

    In a kernel, the attributes are references to the arrays of one head, so axis h is absent. An
    attribute is None if the call has no such array.

    Attributes:
      queries: the queries of each `LowRank` term, ``[b or 1, q, h, r]``. The width r is a power of
        two.
      keys: the keys of each `LowRank` term, ``[b or 1, k, h, r]``.
      values: the values, ``[b, k, h, e]``. The width e is a power of two.
      table: the sum of all `Static` terms, ``[h, q, k]``.
      diagonals: the sum of all `Relative` terms, ``[h, q + k - 1]`` float32. Entry d is added to
        the logits of all pairs with ``key - query = d - (q - 1)``.
      key_ends: the position after the last real key of each example, ``[b]`` int32, or None if no
        key is padding.
      query_ends: the position after the last real query of each example, ``[b]`` int32, or None if
        no query is padding, or if padding queries have already been set to zero.
      real_keys: an array ``[b, k]`` int8 that is 1 for real keys, or None if all padding is at the
        end of rows, because `key_ends` is then enough.
      prefix_lengths: `Mask.prefix_lengths`, ``[b]`` int32.
      query_segments: the segments of queries in packed rows, ``[b, q]`` int32.
      key_segments: the segments of keys in packed rows, ``[b, k]`` int32.
      allowed: `Mask.allowed`, ``[b or 1, h or 1, q, k]`` int8.
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
        """Returns the letters of the axes of every array, in the form that `Tiling.spec` takes."""
        return Operands(
            queries=("bqh.",) * len(self.queries),
            keys=("bkh.",) * len(self.keys),
            values="bkh.",
            table="hqk",
            diagonals="h.",
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
        """Whether the logits contain a bias, which is the same for all examples."""
        return self.table is not None or self.diagonals is not None

    @property
    def rank(self) -> int:
        """The number of multiply-adds that compute one logit."""
        return sum(x.shape[-1] for x in self.queries)


def make_operands(inputs: FusedInputs, q_length: int) -> Operands:
    """Returns the inputs of the fused route in the layout that the kernels read.

    Padding may contain NaN, and even a weight of zero multiplied by NaN is NaN. If all padding is
    at the end of rows, the kernels load zeros instead of the padding. Otherwise this function
    copies the arrays, and sets padding to zero in the copies.
    """
    mask = inputs.mask
    holes = (mask.query_valid, mask.key_valid, mask.query_segments, mask.key_segments)
    is_at_end = all(x is None for x in holes)
    products, biases, values, *_ = inputs if is_at_end else inputs.cleared(q_length)

    real_keys = mask.keys(values.shape[1])
    real_queries = mask.queries(q_length) if is_at_end else None

    # Both factors of a product must have the same dtype.
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
    """Casts an array to a dtype. Returns None if the array is None."""
    return None if x is None else x.astype(dtype)


def _ends(is_real: jax.Array | None) -> jax.Array | None:
    """Returns the position after the last true entry in each row of ``[b, n]``, ``[b]`` int32.

    All entries from the returned position on are padding. For an example without real entries, the
    position is 0.
    """
    if is_real is None:
        return None
    last = is_real.shape[1] - jnp.argmax(is_real[:, ::-1], axis=1)
    return jnp.where(is_real.any(axis=1), last, 0).astype(jnp.int32)


def fill_width(x: jax.Array) -> jax.Array:
    """Pads the last axis of ``[b, n, h, r]`` with zeros to a power of two that is at least 16.

    The zeros do not change a matrix product. Callers remove the added columns from the results.
    """
    width = max(MIN_PRODUCT_SIZE, pl.next_power_of_2(x.shape[-1]))
    return x if width == x.shape[-1] else jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),))


@dataclasses.dataclass(frozen=True)
class RowTile:
    """A tile of an array whose rows are queries or keys.

    Attributes:
      index: the number of the tile.
      size: the number of rows in a tile.
      length: the number of rows in the array. The last tile may reach beyond the array.
    """

    index: Scalar
    size: int
    length: int

    def slice(self) -> tuple[Ref, jax.Array | None]:
        """Returns the slice of the tile's rows, and a mask of the rows that exist in the array.

        The mask is ``[size]`` bool, or None if every row of every tile exists in the array.
        """
        first = self.index * self.size
        exists = first + jnp.arange(self.size) < self.length if self.length % self.size else None
        return pl.ds(first, self.size), exists

    def is_before(self, ends: Ref, example: Scalar) -> jax.Array:
        """Returns whether each row of the tile is before the end of an example, ``[size]`` bool.

        `ends` contains the position after the last real row of every example, ``[b]``.
        """
        return jnp.less(self.index * self.size + jnp.arange(self.size), ends[example])


class Tile(NamedTuple):
    """The position of a tile of logits.

    Attributes:
      queries: the tile of queries.
      keys: the tile of keys.
      transposed: whether the rows of the tile of logits are keys instead of queries.
    """

    queries: RowTile
    keys: RowTile
    transposed: bool = False

    @property
    def query_axis(self) -> int:
        """The axis of queries in the tile, 0 or 1."""
        return 1 if self.transposed else 0

    @property
    def key_axis(self) -> int:
        """The axis of keys in the tile, 0 or 1."""
        return 1 - self.query_axis

    def positions(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the positions of the query and the key of every logit, and a mask.

        The mask says which pairs of a query and a key exist in the arrays, and is None if all pairs
        exist. The positions and the mask have the shape of the tile.
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
    """The tiles into which a kernel cuts the logits, and other options known at tracing time.

    Attributes:
      mask: the mask, from which kernels read only the band. Kernels read the arrays of the mask
        from `Operands`.
      lengths: the numbers of queries and keys.
      sizes: the sizes of the tiles.
      soft_cap: the argument `soft_cap` of `attend`.
    """

    mask: Mask
    lengths: tuple[int, int]
    sizes: TileSizes
    soft_cap: float | None

    @property
    def counts(self) -> tuple[int, int]:
        """The number of query tiles, and the number of key tiles."""
        q_length, k_length = self.lengths
        return pl.cdiv(q_length, self.sizes.queries), pl.cdiv(k_length, self.sizes.keys)

    def query_tile(self, i: Scalar) -> RowTile:
        """Returns the tile of queries with number i."""
        return RowTile(i, self.sizes.queries, self.lengths[0])

    def key_tile(self, j: Scalar) -> RowTile:
        """Returns the tile of keys with number j."""
        return RowTile(j, self.sizes.keys, self.lengths[1])

    def tile(self, i: Scalar, j: Scalar, *, transposed: bool = False) -> Tile:
        """Returns the tile of logits that belongs to tile i of queries and tile j of keys."""
        return Tile(self.query_tile(i), self.key_tile(j), transposed)

    @property
    def _band(self) -> tuple[int | None, int | None]:
        """The numbers of keys that a query may attend to before and after its own position.

        A number is None if the query may attend to all keys on this side. If the mask has a prefix,
        both numbers are None, because a query may attend to keys of the prefix outside of the band.
        """
        return (None, None) if self.mask.prefix_lengths is not None else self.mask.band

    def visible_keys(self, i: Scalar, end: Scalar | None) -> tuple[Scalar, Scalar]:
        """Returns the range of key tiles to which the queries of tile i may attend.

        Kernels skip key tiles outside the range. With a causal mask, kernels skip about half of the
        tiles of logits. With a window, kernels skip most tiles.

        Args:
          i: the number of the tile of queries.
          end: the position at which the padding keys begin, or None if there is no padding.

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
            # The last query of the tile is `query + size - 1`, and may attend to `after` more keys.
            # The range ends one position later.
            last = jnp.clip(query + self.sizes.queries + after, 0, last)
        return _floor_divide(first, size), _floor_divide(last + size - 1, size)

    def seeing_queries(self, j: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the range of query tiles that may attend to the keys of tile j.

        The range has the same form as the result of `visible_keys`.
        """
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
        """Returns the block specification that selects one head of an array, with all rows.

        Axes q and k of the block are rounded up to whole tiles, so that the slice of the last tile
        lies inside the block. The block has one entry of axis h, and all entries of every other
        axis. If the array is absent, the result is None.

        Args:
          x: the array, or a `jax.ShapeDtypeStruct`.
          letters: one letter for each axis of the array. The letters q, k, h and b stand for
            queries, keys, heads and examples, and ``.`` stands for any other axis.
        """
        if x is None:
            return None
        q_count, k_count = self.counts
        sizes = {"q": q_count * self.sizes.queries, "k": k_count * self.sizes.keys, "h": None}
        shape = tuple(sizes.get(letter, n) for letter, n in zip(letters, x.shape, strict=True))
        # If the axis of heads has the size 1, all heads share the array.
        is_head = [letter == "h" and n > 1 for letter, n in zip(letters, x.shape, strict=True)]

        def index(_: Scalar, head: Scalar, __: Scalar) -> tuple[Scalar, ...]:
            """Returns the index of the program's block along every axis of the array."""
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
          kernel: a function of references to the inputs and the outputs of one head.
          inputs: a tuple of pytrees of arrays. The first pytree is `Operands`.
          outputs: a tuple of pytrees of shapes.
          grid: the numbers of programs along each axis of the grid. The second axis is for heads.
          multiply_adds: the number of multiply-adds that the kernel computes for each logit.
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
    """Returns ``x // y`` for x ≥ 0, without the extra operations for negative numbers."""
    return x // y if isinstance(x, int) else lax.div(x, jnp.int32(y))


def make_tiling(
    kernel: str, operands: Operands, mask: Mask, q_length: int, soft_cap: float | None
) -> Tiling:
    """Returns the tiling of a kernel. `choose_tile_sizes` lists the names of the kernels."""
    row_bytes = sum(x.shape[-1] * x.dtype.itemsize for x in operands.keys)
    row_bytes = max(row_bytes, operands.values.shape[-1] * operands.values.dtype.itemsize)
    lengths = (q_length, operands.values.shape[1])
    sizes = choose_tile_sizes(kernel, row_bytes, has_bias=operands.has_bias)
    return Tiling(mask, lengths, sizes.fit(*lengths), soft_cap)


class TileRows(NamedTuple):
    """The queries, keys and values of a tile, after they have been loaded.

    Attributes:
      queries: the queries of every term, ``[queries of the tile, r]``.
      keys: the keys of every term, ``[keys of the tile, r]``.
      values: the values, ``[keys of the tile, e]``.
    """

    queries: list[jax.Array]
    keys: list[jax.Array]
    values: jax.Array


class Program(NamedTuple):
    """The state of a program that computes one head and one example.

    Attributes:
      tiling: the tiling of the logits.
      refs: references to the operands.
      example: the number of the example.
    """

    tiling: Tiling
    refs: Operands
    example: Scalar

    def load_queries(self, tile: RowTile) -> list[jax.Array]:
        """Returns the queries of every term, ``[size, r]``, with zeros for padding."""
        ends = self.refs.query_ends
        return [load_rows(ref, self.example, tile, ends) for ref in self.refs.queries]

    def load_keys(self, tile: RowTile) -> tuple[list[jax.Array], jax.Array]:
        """Returns the keys of every term ``[size, r]`` and the values ``[size, e]``.

        Padding keys and their values are loaded as zeros.
        """
        ends = self.refs.key_ends
        keys = [load_rows(ref, self.example, tile, ends) for ref in self.refs.keys]
        return keys, load_rows(self.refs.values, self.example, tile, ends)

    def visible_keys(self, i: Scalar) -> tuple[Scalar, Scalar]:
        """Calls `Tiling.visible_keys` for query tile i and the padding of the program's example."""
        ends = self.refs.key_ends
        return self.tiling.visible_keys(i, None if ends is None else ends[self.example])


def load(ref: Ref, exists: jax.Array | None) -> jax.Array:
    """Loads the array behind a reference, with zeros where `exists` is false."""
    return ref[...] if exists is None else plgpu.load(ref, mask=exists, other=0)


def load_rows(ref: Ref, example: Scalar, tile: RowTile, ends: Ref = None) -> jax.Array:
    """Loads a tile ``[size, r]`` of one example of an array ``[b or 1, n, r]``.

    Rows beyond the length of the array are zero. If `ends` is given, the padding rows at the end of
    the example are also zero.
    """
    rows, exists = tile.slice()
    if ends is not None:
        exists = tile.is_before(ends, example)
    # If the first axis of the array has the size 1, all examples share the array.
    ref = ref.at[jnp.minimum(example, ref.shape[0] - 1), rows, :]
    return load(ref, None if exists is None else exists[:, None])


def load_vector(ref: Ref, example: Scalar, tile: RowTile) -> jax.Array:
    """Loads a tile ``[size]`` of one example of an array ``[b, n]``.

    Entries beyond the length of the array are zero.
    """
    rows, exists = tile.slice()
    ref = ref.at[example, rows]
    return load(ref, exists)


def store_rows(ref: Ref, example: Scalar, tile: RowTile, x: jax.Array) -> None:
    """Stores a tile ``[size, r]`` in an array ``[b, n, r]``, except rows beyond the array."""
    rows, exists = tile.slice()
    mask = None if exists is None else exists[:, None]
    plgpu.store(ref.at[example, rows, :], x.astype(ref.dtype), mask=mask)


def store_vector(ref: Ref, example: Scalar, tile: RowTile, x: jax.Array) -> None:
    """Stores a tile ``[size]`` in an array ``[b, n]``, except entries beyond the array."""
    rows, exists = tile.slice()
    plgpu.store(ref.at[example, rows], x, mask=exists)
