"""The fused route in plain JAX: a loop over heads and, inside it, a loop over examples.

The logits of only one head of one example exist at a time. The loop over heads is the outer one, so that
a bias that the examples share is computed once per head, and its gradient is summed over the batch in
place. `forward_all_heads` and `backward_all_heads` process all heads of an example at once, as batched
matrix products: one head is not enough work for a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.packed import segment_lengths
from synthesizer_jax.attention.parts import Biases, FusedInputs, Products, SoftmaxStats, sum_biases
from synthesizer_jax.attention.products import matmul_nt, matmul_tn
from synthesizer_jax.attention.terms import logits_dtype

_Tree = TypeVar("_Tree")
_Result = TypeVar("_Result")
_Output: TypeAlias = tuple[jax.Array, SoftmaxStats]
_Cotangents: TypeAlias = tuple[Products, Biases, jax.Array]


def forward(q_length: int, inputs: FusedInputs) -> tuple[jax.Array, SoftmaxStats]:
    """Returns the attention output ``[b, q, h, e]`` and the row statistics that `backward` needs."""
    products, biases, values, mask, positions = _with_pairwise_mask(q_length, inputs)
    batch, k_length, heads, width = values.shape
    dtype = logits_dtype(values, *jax.tree.leaves((products, biases)))

    def update_head(j: jax.Array, output: _Output) -> _Output:
        bias = sum_biases(_select_block(biases, 0, j), q_length=_num_bias_rows(inputs, q_length))

        def update_example(i: jax.Array, output: _Output) -> _Output:
            block_mask = mask.block(i, j)
            block_positions = _select_example(positions, i)
            # S = Σ terms, and -inf where the mask forbids a key
            logits = _logits(
                bias,
                _select_block(products, i, j),
                lengths=(q_length, k_length),
                positions=block_positions,
            )
            logits = _mask_logits(logits, block_mask)
            # c = max_k S
            row_max = jnp.max(logits, axis=-1, keepdims=True)
            row_max = jnp.where(row_max == -jnp.inf, 0, row_max)
            # E = exp(S - c),  l = Σ_k E
            weights = jnp.exp(logits - row_max).astype(values.dtype)
            row_sum = jnp.sum(weights, axis=-1, keepdims=True, dtype=dtype)
            is_nonzero = row_sum > 0
            queries = block_mask.queries(q_length)
            is_nonzero = is_nonzero if queries is None else is_nonzero & queries.T
            inverse_row_sum = jnp.where(is_nonzero, 1 / jnp.where(is_nonzero, row_sum, 1), 0)
            # O = (E V) / l
            out = jnp.matmul(weights, _select_block(values, i, j), preferred_element_type=dtype)
            block = out * inverse_row_sum, SoftmaxStats(row_max, inverse_row_sum)
            return _update_block(output, block, i=i, j=j)

        return _fori_loop(batch, update_example, output)

    out = jnp.zeros_like(values, shape=(batch, q_length, heads, width))
    zeros = jnp.zeros_like(values, shape=(batch, q_length, heads, 1), dtype=dtype)
    return _fori_loop(heads, update_head, (out, SoftmaxStats(zeros, zeros)))


def backward(
    inputs: FusedInputs, stats: SoftmaxStats, delta: jax.Array, dout: jax.Array
) -> FusedInputs:
    """Returns the cotangents of the inputs.

    With the weights ``P = exp(S - c) / l``, recomputed from the statistics, and the output ``O = P V``::

      dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P ∘ (dP - delta),  delta = Σ_e dO ∘ O = Σ_k P ∘ dP

    Args:
      inputs: the inputs of `forward`.
      stats: the row statistics that it returned: c and 1 / l.
      delta: `softmax_vjp_delta` of its output and `dout`.
      dout: the cotangent of its output.
    """
    q_length = dout.shape[1]
    products, biases, values, mask, positions = _with_pairwise_mask(q_length, inputs)
    batch, k_length, heads, _ = values.shape
    make_bias = functools.partial(sum_biases, q_length=_num_bias_rows(inputs, q_length))

    def update_head(j: jax.Array, cotangents: _Cotangents) -> _Cotangents:
        bias, bias_vjp = jax.vjp(make_bias, _select_block(biases, 0, j))

        def update_example(
            i: jax.Array, cotangents: tuple[Products, jax.Array, jax.Array | None]
        ) -> tuple[Products, jax.Array, jax.Array | None]:
            dproducts, dvalues, dbias = cotangents
            make_logits = functools.partial(
                _logits, lengths=(q_length, k_length), positions=_select_example(positions, i)
            )
            logits, logits_vjp = jax.vjp(make_logits, bias, _select_block(products, i, j))
            block_stats, block_delta, block_dout = _select_block((stats, delta, dout), i, j)
            row_max, inverse_row_sum = block_stats
            # P = exp(S - c) / l
            weights = jnp.exp(_mask_logits(logits, mask.block(i, j)) - row_max) * inverse_row_sum
            # dP = dO Vᵀ,  dS = P ∘ (dP - delta)
            dlogits = weights * (matmul_nt(block_dout, _select_block(values, i, j)) - block_delta)
            dbias_block, dproducts_block = logits_vjp(dlogits)
            # dV = Pᵀ dO
            dvalues_block = matmul_tn(weights.astype(dout.dtype), block_dout)
            return (
                _update_block(dproducts, dproducts_block, i=i, j=j, add=True),
                _update_block(dvalues, dvalues_block, i=i, j=j),
                jax.tree.map(jnp.add, dbias, dbias_block),
            )

        dproducts, dbiases, dvalues = cotangents
        init = dproducts, dvalues, jax.tree.map(jnp.zeros_like, bias)
        dproducts, dvalues, dbias = _fori_loop(batch, update_example, init)
        return dproducts, _update_block(dbiases, bias_vjp(dbias)[0], i=0, j=j), dvalues

    def make_accumulator(x: jax.Array) -> jax.Array:
        """Zeros, in the precision of the logits where examples share `x` and cotangents are summed."""
        return jnp.zeros_like(x, dtype=logits_dtype(x) if x.shape[0] == 1 else x.dtype)

    init = jax.tree.map(make_accumulator, products), *jax.tree.map(jnp.zeros_like, (biases, values))
    dproducts, dbiases, dvalues = _fori_loop(heads, update_head, init)
    dproducts = jax.tree.map(lambda d, x: d.astype(x.dtype), dproducts, products)
    return inputs.cotangents(dproducts, dbiases, dvalues)


def forward_all_heads(q_length: int, inputs: FusedInputs) -> tuple[jax.Array, SoftmaxStats]:
    """Returns the same as `forward`; computes all heads of an example at a time."""

    def forward_head(inputs: FusedInputs) -> tuple[jax.Array, SoftmaxStats]:
        return _squeeze(forward(q_length, inputs), 2)

    return _map_heads(forward_head, inputs, (), out_axes=2)


def backward_all_heads(
    inputs: FusedInputs, stats: SoftmaxStats, delta: jax.Array, dout: jax.Array
) -> FusedInputs:
    """Returns the same as `backward`; computes all heads of an example at a time."""

    def backward_head(
        inputs: FusedInputs, stats: SoftmaxStats, delta: jax.Array, dout: jax.Array
    ) -> _Cotangents:
        products, biases, values, *_ = backward(inputs, stats, delta, dout)
        return _squeeze(products, 2), _squeeze(biases, 0), _squeeze(values, 2)

    products, biases, values = _map_heads(
        backward_head, inputs, (stats, delta, dout), out_axes=(2, 0, 2)
    )
    return inputs.cotangents(products, biases, values)


def _map_heads(
    function: Callable[..., _Result],
    inputs: FusedInputs,
    extra_args: tuple[jax.Array | SoftmaxStats, ...],
    *,
    out_axes: int | tuple[int, ...],
) -> _Result:
    """Maps a function of the inputs of one head over all heads, by `jax.vmap`."""
    allowed, shared_mask = inputs.mask.allowed, inputs.mask
    if allowed is not None and allowed.shape[1] > 1:
        shared_mask = dataclasses.replace(shared_mask, allowed=None)
    else:
        allowed = None

    def call(
        products: Products,
        biases: Biases,
        values: jax.Array,
        allowed: jax.Array | None,
        extra_args: tuple[jax.Array | SoftmaxStats, ...],
    ) -> _Result:
        mask = shared_mask
        if allowed is not None:
            mask = dataclasses.replace(shared_mask, allowed=allowed[:, None])
        products, values, extra_args = _expand_dims((products, values, extra_args), 2)
        biases = _expand_dims(biases, 0)
        return function(FusedInputs(products, biases, values, mask, inputs.positions), *extra_args)

    mapped = jax.vmap(call, in_axes=(2, 0, 2, 1, 2), out_axes=out_axes)
    return mapped(inputs.products, inputs.biases, inputs.values, allowed, extra_args)


def _fori_loop(
    length: int, body: Callable[[jax.Array, _Result], _Result], init: _Result
) -> _Result:
    result: _Result = lax.fori_loop(0, length, body, init)
    return result


def _expand_dims(tree: _Tree, axis: int) -> _Tree:
    expanded: _Tree = jax.tree.map(lambda x: jnp.expand_dims(x, axis), tree)
    return expanded


def _squeeze(tree: _Tree, axis: int) -> _Tree:
    squeezed: _Tree = jax.tree.map(lambda x: jnp.squeeze(x, axis), tree)
    return squeezed


def _with_pairwise_mask(q_length: int, inputs: FusedInputs) -> FusedInputs:
    """Returns the inputs with segments replaced by a mask of pairs, ``[b, 1, q, k]``.

    Comparing the two vectors of segments inside the loop would keep XLA's CPU backend from vectorizing
    the exponential.
    """
    if inputs.mask.query_segments is None:
        return inputs
    return inputs._replace(mask=Mask(allowed=inputs.mask.pairs(q_length, inputs.values.shape[1])))


def _logits(
    bias: jax.Array | None,
    products: Products,
    *,
    lengths: tuple[int, int],
    positions: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Returns the logits ``[q, k]`` of one head and example."""
    key = jnp.arange(lengths[1]) if positions is None else positions[1]
    if bias is not None and positions is not None:
        bias = jnp.take(jnp.take(bias, positions[0], axis=0), key, axis=1)
    summands = [] if bias is None else [bias]
    if products.low_rank:
        queries = jnp.concatenate([term.queries for term in products.low_rank], axis=-1)
        keys = jnp.concatenate([term.keys for term in products.low_rank], axis=-1)
        summands.append(matmul_nt(queries, keys))
    for term in products.outer:
        size = term.b.shape[-1]
        # Products with zeros and ones are exact only if the hardware does not round the factors.
        exact = lax.Precision.HIGHEST
        a_one_hot = jax.nn.one_hot(key // size, term.a.shape[-1], dtype=term.a.dtype)
        b_one_hot = jax.nn.one_hot(key % size, size, dtype=term.b.dtype)
        summands.append(matmul_nt(term.a, a_one_hot, exact) * matmul_nt(term.b, b_one_hot, exact))
    return functools.reduce(operator.add, summands)


def _num_bias_rows(inputs: FusedInputs, q_length: int) -> int:
    """Returns the number of rows of the biases: queries, or positions in a segment if rows are packed."""
    if inputs.positions is None:
        return q_length
    return segment_lengths(inputs.mask, q_length, inputs.values.shape[1])[0]


def _select_example(tree: _Tree, i: jax.Array | int) -> _Tree:
    """Returns example i of arrays ``[b, n]``."""
    example: _Tree = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)
    return example


def _mask_logits(logits: jax.Array, mask: Mask) -> jax.Array:
    """Returns the logits ``[q, k]``, -inf where the mask of this block forbids a key.

    Padding queries are not masked here: their weights vanish by ``SoftmaxStats.inverse_row_sum``.
    """
    pairs = dataclasses.replace(mask, query_lengths=None, query_valid=None).pairs(*logits.shape)
    if pairs is None:
        return logits
    return jnp.where(pairs.reshape(pairs.shape[-2:]), logits, -jnp.inf)


def _select_block(tree: _Tree, i: jax.Array | int, j: jax.Array) -> _Tree:
    """Returns example i and head j of arrays ``[b or 1, n, h, r]``, head j of arrays ``[h, ...]``."""

    def select(x: jax.Array) -> jax.Array:
        if x.ndim < 4:
            return lax.dynamic_index_in_dim(x, j, keepdims=False)
        size = (1, x.shape[1], 1, x.shape[3])
        return lax.dynamic_slice(x, _block_start(x, i, j), size).reshape(x.shape[1], x.shape[3])

    block: _Tree = jax.tree.map(select, tree)
    return block


def _update_block(
    tree: _Tree, blocks: _Tree, *, i: jax.Array | int, j: jax.Array, add: bool = False
) -> _Tree:
    """Returns the arrays with the blocks written, or added, where `_select_block` reads them."""

    def update(x: jax.Array, block: jax.Array) -> jax.Array:
        if x.ndim < 4:
            return lax.dynamic_update_index_in_dim(x, block.astype(x.dtype), j, axis=0)
        block = block[None, :, None].astype(x.dtype)
        if add:
            block += lax.dynamic_slice(x, _block_start(x, i, j), block.shape)
        return lax.dynamic_update_slice(x, block, _block_start(x, i, j))

    updated: _Tree = jax.tree.map(update, tree, blocks)
    return updated


def _block_start(x: jax.Array, i: jax.Array | int, j: jax.Array) -> tuple[jax.Array | int, ...]:
    return (0 if x.shape[0] == 1 else i, 0, j, 0)
