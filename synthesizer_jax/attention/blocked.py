"""The fused route in plain JAX: a loop over heads and, inside, over examples.

Logits exist for one head of one example at a time. Heads are the outer loop, so that what examples
share, logits of parameters above all, is made once per head and its gradient summed over the batch in
place. `forward_at_once` and `backward_at_once` take all heads of an example together: a GPU's batched
product, which one head does not fill.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.packed import segment_lengths
from synthesizer_jax.attention.parts import Inputs, Rows, shared_bias
from synthesizer_jax.attention.products import plain_product, product, transposed_product
from synthesizer_jax.attention.reference import softmax
from synthesizer_jax.attention.terms import LowRank, Outer, Terms, wide


def forward(q_length: int, inputs: Inputs) -> tuple[jax.Array, Rows]:
    """The attention output ``[b, q, h, e]``, and what `backward` needs."""
    products, biases, values, mask, places = vectorised(q_length, inputs)
    batch, k_length, heads, width = values.shape
    dtype = wide(values, *jax.tree.leaves((products, biases)))

    def head(j: jax.Array, results: Any):
        bias = shared_bias(_block(biases, 0, j), q_length=bias_length(inputs, q_length))

        def example(i: jax.Array, results: Any):
            own_mask = mask.block(i, j)
            own_places = _example(places, i)
            logits = _logits(
                bias, _block(products, i, j), lengths=(q_length, k_length), places=own_places
            )
            logits = _masked(logits, own_mask)
            top = jnp.max(logits, axis=-1, keepdims=True)
            top = jnp.where(top == -jnp.inf, 0, top)
            weights = jnp.exp(logits - top).astype(values.dtype)
            total = jnp.sum(weights, axis=-1, keepdims=True, dtype=dtype)
            some = total > 0
            real = own_mask.queries(q_length)
            some = some if real is None else some & real.T
            inverse = jnp.where(some, 1 / jnp.where(some, total, 1), 0)
            out = jnp.matmul(weights, _block(values, i, j), preferred_element_type=dtype)
            return _put(results, (out * inverse, Rows(top, inverse)), i, j)

        return lax.fori_loop(0, batch, example, results)

    out = jnp.zeros_like(values, shape=(batch, q_length, heads, width))
    row = jnp.zeros_like(values, shape=(batch, q_length, heads, 1), dtype=dtype)
    return lax.fori_loop(0, heads, head, (out, Rows(row, row)))


def backward(inputs: Inputs, rows: Rows, delta: jax.Array, g: jax.Array) -> Inputs:
    """The cotangents of the inputs.

    Args:
      inputs: what `forward` was given.
      rows: what it returned.
      delta: `inner` of its output and `g`.
      g: the cotangent of its output.
    """
    q_length = g.shape[1]
    products, biases, values, mask, places = vectorised(q_length, inputs)
    batch, k_length, heads, _ = values.shape
    make_bias = functools.partial(shared_bias, q_length=bias_length(inputs, q_length))

    def head(j: jax.Array, carry: Any):
        bias, back_bias = jax.vjp(make_bias, _block(biases, 0, j))

        def example(i: jax.Array, carry: Any):
            dproducts, dvalues, dbias = carry
            make_logits = functools.partial(
                _logits, lengths=(q_length, k_length), places=_example(places, i)
            )
            logits, back = jax.vjp(make_logits, bias, _block(products, i, j))
            (top, inverse), own_delta, g_block = _block((rows, delta, g), i, j)
            weights = jnp.exp(_masked(logits, mask.block(i, j)) - top) * inverse
            slope = weights * (product(g_block, _block(values, i, j)) - own_delta)
            dbias_block, dproducts_block = back(slope)
            dvalues_block = transposed_product(weights.astype(g.dtype), g_block)
            return (
                _put(dproducts, dproducts_block, i, j, add=True),
                _put(dvalues, dvalues_block, i, j),
                jax.tree.map(jnp.add, dbias, dbias_block),
            )

        dproducts, dbiases, dvalues = carry
        start = dproducts, dvalues, jax.tree.map(jnp.zeros_like, bias)
        dproducts, dvalues, dbias = lax.fori_loop(0, batch, example, start)
        return dproducts, _put(dbiases, back_bias(dbias)[0], 0, j), dvalues

    def room(x: jax.Array) -> jax.Array:
        """Zeros for a cotangent, in the logits' precision where it is a sum over the batch."""
        return jnp.zeros_like(x, dtype=wide(x) if x.shape[0] == 1 else x.dtype)

    start = jax.tree.map(room, products), *jax.tree.map(jnp.zeros_like, (biases, values))
    dproducts, dbiases, dvalues = lax.fori_loop(0, heads, head, start)
    dproducts = jax.tree.map(lambda d, x: d.astype(x.dtype), dproducts, products)
    return inputs.cotangents(dproducts, dbiases, dvalues)


def forward_at_once(q_length: int, inputs: Inputs) -> tuple[jax.Array, Rows]:
    """`forward` of all heads of an example at a time."""

    def one(inputs: Inputs) -> Any:
        return _without_axis(forward(q_length, inputs), 2)

    return _over_heads(one, inputs, (), out_axes=2)


def backward_at_once(inputs: Inputs, rows: Rows, delta: jax.Array, g: jax.Array) -> Inputs:
    """`backward` of all heads of an example at a time."""

    def one(inputs: Inputs, *rest: Any) -> Any:
        products, biases, values, *_ = backward(inputs, *rest)
        return _without_axis(products, 2), _without_axis(biases, 0), _without_axis(values, 2)

    products, biases, values = _over_heads(one, inputs, (rows, delta, g), out_axes=(2, 0, 2))
    return inputs.cotangents(products, biases, values)


def plain(q_length: int, inputs: Inputs) -> jax.Array:
    """The attention output ``[b, q, h, e]`` as code that JAX differentiates, in every order and mode.

    One head of one example at a time, nothing of which is kept.
    """
    shared = functools.partial(jax.tree.map, lambda _: SHARED)
    mask, allowed = shared(inputs.mask), inputs.mask.allowed
    if allowed is not None and allowed.shape[1] > 1:
        mask = dataclasses.replace(mask, allowed=1)
    by_head: Any = inputs
    by_head = by_head._replace(
        products=jax.tree.map(lambda _: 2, inputs.products),
        biases=jax.tree.map(lambda _: 0, inputs.biases),
        values=2,
        mask=mask,
        places=shared(inputs.places),
    )

    def head(inputs: Any) -> jax.Array:
        axes = jax.tree.map(lambda x: SHARED if jnp.ndim(x) == 0 or x.shape[0] == 1 else 0, inputs)
        axes = axes._replace(biases=shared(inputs.biases), values=0)
        return _one_by_one(functools.partial(_plain_block, q_length), inputs, axes)

    out = _one_by_one(head, inputs, by_head)
    return out.transpose(1, 2, 0, 3).astype(inputs.values.dtype)


def _plain_block(q_length: int, inputs: Inputs) -> jax.Array:
    """The output ``[q, e]`` of inputs with one example and one head."""
    products, biases, values, mask, places = inputs
    first = jnp.zeros((), jnp.int32)
    bias = shared_bias(_block(biases, 0, first), q_length=bias_length(inputs, q_length))
    logits = _logits(
        bias,
        _block(products, 0, first),
        lengths=(q_length, values.shape[1]),
        places=_example(places, 0),
        product=plain_product,
    )
    weights = softmax(_masked(logits, mask), None)
    real = mask.queries(q_length)
    weights = weights if real is None else jnp.where(real.T, weights, 0)
    values = values[0, :, 0]
    return jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=weights.dtype)


SHARED = -1
"""In the place of an axis: what all calls of `_one_by_one` share."""


def _one_by_one(function: Callable[..., Any], tree: Any, axes: Any) -> Any:
    """As `jax.vmap` with axes kept at a length of 1, one call after another, each rematerialised."""
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    places = structure.flatten_up_to(axes)
    mapped = [jnp.moveaxis(x, a, 0) for x, a in zip(leaves, places, strict=True) if a != SHARED]

    @jax.checkpoint
    def call(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        own = [
            x if a == SHARED else jnp.expand_dims(next(rest), a)
            for x, a in zip(leaves, places, strict=True)
        ]
        return function(structure.unflatten(own))

    return lax.map(call, mapped)


def _over_heads(
    function: Callable[..., Any], inputs: Inputs, rest: tuple[Any, ...], *, out_axes: Any
) -> Any:
    """A function of inputs with one head, mapped over the heads; `rest` holds ``[b, q, h, r]``."""
    allowed, shared = inputs.mask.allowed, inputs.mask
    if allowed is not None and allowed.shape[1] > 1:
        shared = dataclasses.replace(shared, allowed=None)
    else:
        allowed = None

    def one(products: Any, biases: Any, values: Any, allowed: Any, rest: Any) -> Any:
        mask = shared
        if allowed is not None:
            mask = dataclasses.replace(shared, allowed=allowed[:, None])
        products, values, rest = _with_axis((products, values, rest), 2)
        biases = _with_axis(biases, 0)
        return function(Inputs(products, biases, values, mask, inputs.places), *rest)

    mapped = jax.vmap(one, in_axes=(2, 0, 2, 1, 2), out_axes=out_axes)
    return mapped(inputs.products, inputs.biases, inputs.values, allowed, rest)


def _with_axis(tree: Any, axis: int) -> Any:
    return jax.tree.map(lambda x: jnp.expand_dims(x, axis), tree)


def _without_axis(tree: Any, axis: int) -> Any:
    return jax.tree.map(lambda x: jnp.squeeze(x, axis), tree)


def vectorised(q_length: int, inputs: Inputs) -> Inputs:
    """The inputs with segments as a pattern of pairs.

    Comparing two vectors inside the loop would keep XLA's CPU from vectorising the exponential.
    """
    if inputs.mask.query_segments is None:
        return inputs
    return inputs._replace(mask=Mask(allowed=inputs.mask.pairs(q_length, inputs.values.shape[1])))


def _logits(
    bias: jax.Array | None,
    products: Terms,
    *,
    lengths: tuple[int, int],
    places: tuple[jax.Array, jax.Array] | None,
    product: Callable[..., jax.Array] = product,
) -> jax.Array:
    """The logits ``[q, k]`` of one head and example.

    Args:
      bias: what the head adds, ``[q, k]``, or by position where there are `places`.
      products: `LowRank` and `Outer` terms of arrays ``[n, r]``.
      lengths: q and k.
      places: positions ``[q]`` and ``[k]`` inside packed segments.
      product: ``x yᵀ``.
    """
    key = jnp.arange(lengths[1]) if places is None else places[1]
    if bias is not None and places is not None:
        bias = jnp.take(jnp.take(bias, places[0], axis=0), key, axis=1)
    parts = [] if bias is None else [bias]
    low_rank = [t for t in products if isinstance(t, LowRank)]
    if low_rank:
        queries = jnp.concatenate([t.queries for t in low_rank], axis=-1)
        keys = jnp.concatenate([t.keys for t in low_rank], axis=-1)
        parts.append(product(queries, keys))
    for term in products:
        if isinstance(term, Outer):
            size = term.b.shape[-1]
            # Products with zeros and ones are exact, where the hardware does not round the factors.
            exact = lax.Precision.HIGHEST
            a_places = jax.nn.one_hot(key // size, term.a.shape[-1], dtype=term.a.dtype)
            b_places = jax.nn.one_hot(key % size, size, dtype=term.b.dtype)
            parts.append(product(term.a, a_places, exact) * product(term.b, b_places, exact))
    return functools.reduce(operator.add, parts)


def bias_length(inputs: Inputs, q_length: int) -> int:
    """The number of rows of the biases: of queries, or of positions where there are `places`."""
    if inputs.places is None:
        return q_length
    return segment_lengths(inputs.mask, q_length, inputs.values.shape[1])[0]


def _example(places: Any, i: jax.Array | int) -> Any:
    """Example i of arrays ``[b, n]``."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), places)


def _masked(logits: jax.Array, mask: Mask) -> jax.Array:
    """The logits ``[q, k]``, -inf where the mask of this block forbids real queries a key."""
    pairs = dataclasses.replace(mask, query_lengths=None, query_valid=None).pairs(*logits.shape)
    if pairs is None:
        return logits
    return jnp.where(pairs.reshape(pairs.shape[-2:]), logits, -jnp.inf)


def _block(tree: Any, i: jax.Array | int, j: jax.Array) -> Any:
    """Example i and head j of arrays ``[b or 1, n, h, r]``, head j of arrays ``[h, ...]``."""

    def one(x: jax.Array) -> jax.Array:
        if x.ndim < 4:
            return lax.dynamic_index_in_dim(x, j, keepdims=False)
        size = (1, x.shape[1], 1, x.shape[3])
        return lax.dynamic_slice(x, _corner(x, i, j), size).reshape(x.shape[1], x.shape[3])

    return jax.tree.map(one, tree)


def _put(tree: Any, blocks: Any, i: jax.Array | int, j: jax.Array, *, add: bool = False) -> Any:
    """The arrays with the blocks written, or added, where `_block` reads them."""

    def one(x: jax.Array, block: jax.Array) -> jax.Array:
        if x.ndim < 4:
            return lax.dynamic_update_index_in_dim(x, block.astype(x.dtype), j, axis=0)
        block = block[None, :, None].astype(x.dtype)
        if add:
            block += lax.dynamic_slice(x, _corner(x, i, j), block.shape)
        return lax.dynamic_update_slice(x, block, _corner(x, i, j))

    return jax.tree.map(one, tree, blocks)


def _corner(x: jax.Array, i: jax.Array | int, j: jax.Array) -> tuple[Any, ...]:
    return (0 if x.shape[0] == 1 else i, 0, j, 0)
