"""The fused route on TPUs: Pallas kernels.

A program holds the logits of a block of queries and all keys in vector memory. Examples are the
innermost axis of the grid, so that a stripe of the bias is read once for all of them, and its gradient,
like that of parameters that act as queries or keys, is summed over the batch in the place where it
stays.

The backward pass is a kernel over blocks of queries, which also makes the keys' and values' cotangents
where one block holds all queries; otherwise a second kernel goes over blocks of keys, its tiles turned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.parts import Inputs, Rows
from synthesizer_jax.attention.terms import LowRank, Outer, wide
from synthesizer_jax.attention.tiles_tpu import (
    LOW,
    SUBLANES,
    Bias,
    Operands,
    arrays,
    bias_of,
    bias_spec,
    block_size,
    call,
    dot,
    fill,
    heads_first,
    only,
    operand_specs,
    operands,
    places,
    row_spec,
    spec,
    tile,
    turned,
    width,
)


def obstacle(inputs: Inputs) -> str:
    """Why these kernels do not take such inputs; empty where they do."""
    products, biases, values, mask, places = inputs
    if not isinstance(mask.query_offset, int):
        return "Mask.query_offset is not known when the function is traced"
    if mask.allowed is not None or mask.prefix_lengths is not None:
        return "Mask.allowed and Mask.prefix_lengths are not read by the kernels"
    if places is not None or (mask.counts_in_segments and mask.has_band):
        return "positions inside packed segments are not looked up by the kernels"
    if wide(values, *jax.tree.leaves((products, biases))) != jnp.float32:
        return "the kernels have no 64-bit numbers"
    return ""


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("interpret",))
def forward(
    q_length: int, query_offset: int, inputs: Inputs, *, interpret: bool = False
) -> tuple[jax.Array, Rows]:
    """The attention output ``[b, q, h, e]`` and what `backward` needs.

    Args:
      q_length: number of queries.
      query_offset: the mask's, which has to be known.
      inputs: see `supported`.
      interpret: run on any device, slowly.
    """
    batch, k_length, heads, e = inputs.values.shape
    given, bias = operands(inputs), bias_of(inputs.biases)
    size = block_size(q_length, k_length)
    make_tile = functools.partial(
        tile, mask=inputs.mask, offset=query_offset, size=size, length=k_length
    )

    def kernel(
        given: Operands, bias: Bias, out: Any, top: Any, inverse: Any, own_bias: Any = None
    ) -> None:
        fill(own_bias, bias, q_length)
        logits, allowed = make_tile(given, own_bias)
        if allowed is not None:
            logits = jnp.where(allowed, logits, LOW)
        peak = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), LOW)
        weights = only(allowed, jnp.exp(logits - peak)).astype(given.values.dtype)
        total = jnp.sum(weights.astype(jnp.float32), axis=1, keepdims=True)
        some = total > 0.0
        share = jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
        out[...] = (dot(weights, given.values[...], 1, 0) * share).astype(out.dtype)
        top[...] = jnp.where(some, peak, 0.0).T
        inverse[...] = share.T

    row = jax.ShapeDtypeStruct((batch, heads, 1, q_length), jnp.float32)
    whole = jax.ShapeDtypeStruct((batch, heads, q_length, e), inputs.values.dtype)
    out, top, inverse = call(
        kernel,
        (given, bias),
        (whole, row, row),
        specs=(operand_specs(given, queries=size, keys=k_length), bias_spec(bias, size)),
        out_specs=(spec(whole, size), row_spec(row, size), row_spec(row, size)),
        grid=(heads, pl.cdiv(q_length, size), batch),
        work=width(given.products) + e,
        tile_shape=(size, k_length),
        interpret=interpret,
    )
    real = inputs.mask.queries(q_length)
    if real is not None:
        out = jnp.where(real[:, None, :, None], out, 0)
        inverse = jnp.where(real[:, None, None], inverse, 0.0)
    return heads_first(out), Rows(*(x.transpose(0, 3, 1, 2) for x in (top, inverse)))


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("interpret",))
def backward(
    query_offset: int,
    inputs: Inputs,
    rows: Rows,
    delta: jax.Array,
    g: jax.Array,
    *,
    interpret: bool = False,
) -> Inputs:
    """The cotangents of the inputs.

    Args:
      query_offset: as in `forward`.
      inputs: what `forward` was given.
      rows: what it returned.
      delta: `parts.inner` of its output and `g`.
      g: the cotangent of its output.
      interpret: as in `forward`.
    """
    q_length, k_length = g.shape[1], inputs.values.shape[1]
    bias, back_bias = jax.vjp(bias_of, inputs.biases)
    top, inverse, delta = (x.transpose(0, 2, 3, 1) for x in (*rows, delta))
    given = Cotangent(operands(inputs), heads_first(g), top, inverse, delta)
    size = block_size(q_length, k_length)
    options: Any = {"mask": inputs.mask, "offset": query_offset, "interpret": interpret}
    found, dbias = by_queries(given, bias, size, whole=size == q_length, **options)
    if size < q_length:
        found |= by_keys(
            given, turned(bias, q_length + k_length), block_size(k_length, q_length), **options
        )
    cotangents = {name: heads_first(x) for name, x in found.items()}
    products: Any = tuple(
        dataclasses.replace(
            term, **{name: cotangents[f"{name} {i}"].astype(x.dtype) for name, x in arrays(term)}
        )
        for i, term in enumerate(given.operands.products)
    )
    (biases,) = back_bias(dbias)
    return inputs.cotangents(products, biases, cotangents["values"].astype(inputs.values.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cotangent:
    """What the backward kernels read beside the bias.

    Attributes:
      operands: the forward's.
      g: the cotangent of the output, ``[b, h, q, e]``.
      top: `Rows`, ``[b, h, 1, q]`` float32.
      inverse: likewise.
      delta: `parts.inner` likewise.
    """

    operands: Operands
    g: Any
    top: Any
    inverse: Any
    delta: Any


def by_queries(
    given: Cotangent,
    bias: Bias,
    size: int,
    *,
    whole: bool,
    mask: Mask,
    offset: int,
    interpret: bool,
) -> tuple[dict[str, jax.Array], Bias]:
    """The cotangents of the queries and the bias, and of keys and values where `whole`."""
    own = given.operands
    batch, heads, k_length, e = own.values.shape
    q_length = given.g.shape[2]
    wanted: dict[str, Any] = {
        f"{name} {i}": x
        for i, term in enumerate(own.products)
        for name, x in arrays(term)
        if whole or name != "keys"
    }
    wanted |= {"values": own.values} if whole else {}
    shared = {name: x.shape[0] == 1 for name, x in wanted.items()}
    make_tile = functools.partial(tile, mask=mask, offset=offset, size=size, length=k_length)

    def kernel(
        given: Cotangent,
        bias: Bias,
        found: dict[str, Any],
        dbias: Bias,
        own_bias: Any = None,
        slopes: Any = None,
    ) -> None:
        own, g = given.operands, given.g[...]
        fill(own_bias, bias, q_length)
        logits, allowed = make_tile(own, own_bias)
        weights = only(allowed, jnp.exp(logits - given.top[...].T)) * given.inverse[...].T
        slope = weights * (dot(g, own.values[...], 1, 1) - given.delta[...].T)
        for i, term in enumerate(own.products):
            if isinstance(term, Outer):
                for name, da in outer_back(term, slope, k_length):
                    put(found[f"{name} {i}"], da, shared=shared[f"{name} {i}"])
                continue
            keys, queries = term.keys[...], term.queries[...]
            dqueries = dot(slope.astype(keys.dtype), keys, 1, 0)
            put(found[f"queries {i}"], dqueries, shared=shared[f"queries {i}"])
            if whole:
                dkeys = dot(slope.astype(queries.dtype), queries, 0, 0)
                put(found[f"keys {i}"], dkeys, shared=shared[f"keys {i}"])
        if whole:
            put(found["values"], dot(weights.astype(g.dtype), g, 0, 0), shared=shared["values"])
        if dbias.table is not None:
            put(dbias.table, slope, shared=True)
        if dbias.columns is not None:
            add_diagonals(dbias.columns, slopes, slope, q_length, batch)

    products = width(own.products)
    places = {
        name: spec(x, k_length if name.startswith(("values", "keys")) else size)
        for name, x in wanted.items()
    }
    return call(
        kernel,
        (given, bias),
        ({name: cotangent(x) for name, x in wanted.items()}, shapes_of(bias)),
        specs=(cotangent_specs(given, queries=size, keys=k_length), bias_spec(bias, size)),
        out_specs=(places, bias_spec(bias, size)),
        grid=(heads, pl.cdiv(q_length, size), batch),
        work=3 * products + 2 * e if whole else 2 * products + e,
        tile_shape=(size, k_length),
        scratch=() if bias.columns is None else (size + -size % SUBLANES, bias.columns.shape[2]),
        interpret=interpret,
    )


def by_keys(
    given: Cotangent,
    bias: Bias,
    size: int,
    *,
    mask: Mask,
    offset: int,
    interpret: bool,
) -> dict[str, jax.Array]:
    """The cotangents of keys and values, from tiles ``[keys of a block, queries]``."""
    own = given.operands
    batch, heads, k_length, e = own.values.shape
    q_length = given.g.shape[2]
    wanted: dict[str, Any] = {
        f"keys {i}": term.keys for i, term in enumerate(own.products) if isinstance(term, LowRank)
    }
    wanted["values"] = own.values
    shared = {name: x.shape[0] == 1 for name, x in wanted.items()}
    make_tile = functools.partial(
        tile, mask=mask, offset=offset, size=size, length=q_length, turned=True
    )

    def kernel(given: Cotangent, bias: Bias, found: dict[str, Any], own_bias: Any = None) -> None:
        own, g = given.operands, given.g[...]
        fill(own_bias, bias, k_length, turned=True)
        logits, allowed = make_tile(own, own_bias)
        weights = only(allowed, jnp.exp(logits - given.top[...])) * given.inverse[...]
        slope = weights * (dot(own.values[...], g, 1, 1) - given.delta[...])
        for i, term in enumerate(own.products):
            if isinstance(term, LowRank):
                queries = term.queries[...]
                dkeys = dot(slope.astype(queries.dtype), queries, 1, 0)
                put(found[f"keys {i}"], dkeys, shared=shared[f"keys {i}"])
        put(found["values"], dot(weights.astype(g.dtype), g, 1, 0), shared=shared["values"])

    return call(
        kernel,
        (given, bias),
        {name: cotangent(x) for name, x in wanted.items()},
        specs=(
            cotangent_specs(given, queries=q_length, keys=size),
            bias_spec(bias, size, turned=True),
        ),
        out_specs={name: spec(x, size) for name, x in wanted.items()},
        grid=(heads, pl.cdiv(k_length, size), batch),
        work=2 * width(own.products) + 2 * e,
        tile_shape=(size, q_length),
        interpret=interpret,
    )


def add_diagonals(total: Any, slopes: Any, slope: jax.Array, q_length: int, batch: int) -> None:
    """Adds a tile's sums along its diagonals, those of all examples together.

    Args:
      total: the cotangent of `Bias.columns`, ``[1, w]``, which all blocks of queries share.
      slopes: room for the sum over the examples, ``[size, w]`` with rows up to a multiple of eight.
      slope: ``[size, k]``.
      q_length: number of queries.
      batch: number of examples.
    """
    size, length = slope.shape
    count = total.shape[-1]
    block, example = pl.program_id(1), pl.program_id(2)

    @pl.when(example == 0)
    def _() -> None:
        slopes[...] = jnp.zeros_like(slopes)

    slopes[:size, :length] += slope

    @pl.when(example == batch - 1)
    def _() -> None:
        # `roll_out` the other way round: all eights of rows onto one, and its rows onto another.
        row = lax.broadcasted_iota(jnp.int32, (SUBLANES, count), 0)
        lines = jnp.zeros((SUBLANES, count), jnp.float32)
        for begin in range(0, size, SUBLANES):
            first = block * size + begin
            own = jnp.where(row + first < q_length, slopes[begin : begin + SUBLANES], 0.0)
            lines += pltpu.roll(own, lax.rem(count + q_length - 1 - first, jnp.int32(count)), 1)
        for bit in (1, 2, 4):
            lines = jnp.where(row & bit != 0, pltpu.roll(lines, jnp.int32(count - bit), 1), lines)
        sums = lines.sum(axis=0, keepdims=True)

        @pl.when(block == 0)
        def _() -> None:
            total[...] = sums

        @pl.when(block > 0)
        def _() -> None:
            total[...] += sums


def outer_back(term: Outer, slope: jax.Array, k_length: int) -> Iterator[tuple[str, jax.Array]]:
    """The cotangents of an `Outer` term's factors."""
    at = {name: places(term, name, 0, k_length) for name in ("a", "b")}
    for name, other in (("a", "b"), ("b", "a")):
        rest = dot(getattr(term, other)[...], at[other], 1, 1, exact=True)
        yield name, dot((slope * rest).astype(at[name].dtype), at[name], 1, 0, exact=True)


def put(place: Any, value: jax.Array, *, shared: bool = False) -> None:
    """Writes a result; one that all examples share stays in place while they go by, and grows."""
    value = value.astype(place.dtype)
    if not shared:
        place[...] = value
        return

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        place[...] = value

    @pl.when(pl.program_id(2) > 0)
    def _() -> None:
        place[...] += value


def cotangent(x: Any) -> jax.ShapeDtypeStruct:
    """What a kernel returns for an operand: float32 where it is a sum over the batch."""
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if x.shape[0] == 1 else x.dtype)


def cotangent_specs(given: Cotangent, *, queries: int, keys: int) -> Cotangent:
    """The same for the backward kernels."""
    own = operand_specs(given.operands, queries=queries, keys=keys)
    return Cotangent(own, spec(given.g, queries), *(row_spec(given.top, queries),) * 3)


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
