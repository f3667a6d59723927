"""The loop of the fused route, which computes attention without a Pallas kernel.

CPUs run this loop. Other devices run it if no kernel can take the inputs. The outer loop runs over
the heads, and the inner loop runs over the examples. A bias that the examples share is therefore
computed once per head, and the gradient of the bias is summed over the batch in place. GPUs do not
loop over the heads, but compute all heads of an example at once, as batched matrix products.

`fused_route` explains the method and its formulas.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from synthesizer_jax.attention.fused_arrays import Biases, FusedInputs, Products, SoftmaxStats
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.mesh_axes import match_varying_axes
from synthesizer_jax.attention.terms import (
    cap_logits,
    clear_padding,
    expand_diagonals,
    logits_dtype,
)
from synthesizer_jax.base.typing import PyTree

_Tree = TypeVar("_Tree")


def map_heads(
    function: Callable[..., PyTree],
    heads: int,
    args: tuple[PyTree, ...],
    axes: tuple[int, ...],
    out_axes: tuple[int, ...],
    *,
    parallel: bool,
) -> Any:
    """Applies a function of one head to all heads.

    Args:
      function: a function of one head, whose arguments and results lack the axis of heads.
      heads: the number of heads.
      args: the arguments, pytrees of arrays with an axis of heads.
      axes: the axis of heads of each argument.
      out_axes: the axis of heads of each result.
      parallel: whether to compute all heads at once with `jax.vmap`. If `parallel` is false, a loop
        computes one head after another.
    """
    if parallel:
        return jax.vmap(function, axes, out_axes)(*args)

    def head(j: int | jax.Array) -> PyTree:
        """Returns the results for head j."""

        def take(axis: int, x: jax.Array) -> jax.Array:
            """Returns the part of an array that belongs to head j, without the axis of heads."""
            return lax.dynamic_index_in_dim(x, j, axis, keepdims=False)

        return function(*_map_with_axis(take, axes, args))

    def add_head(j: jax.Array, totals: PyTree) -> PyTree:
        """Writes the results for head j into the arrays of all heads."""

        def put(axis: int, total: jax.Array, x: jax.Array) -> jax.Array:
            """Returns the array of all heads after writing the result for head j into it."""
            return lax.dynamic_update_index_in_dim(total, x, j, axis)

        return _map_with_axis(put, out_axes, totals, head(j))

    def empty(axis: int, x: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns an array with room for the results of all heads, given the shape for one head."""
        return jnp.empty((*x.shape[:axis], heads, *x.shape[axis:]), x.dtype)

    # The loop writes the results in place. `lax.map` would stack the heads along the first axis,
    # and moving the axis of heads to its position would copy all results.
    totals = _map_with_axis(empty, out_axes, jax.eval_shape(head, 0))
    return lax.fori_loop(0, heads, add_head, match_varying_axes(totals, args)[0])


def _map_with_axis(
    function: Callable[..., PyTree], axes: tuple[int, ...], *trees: PyTree
) -> PyTree:
    """Applies ``function(axis, *leaves)`` to the leaves of pytrees.

    Each pytree is a tuple with one entry for each element of `axes`. The function gets the axis of
    the entry that contains the leaves.
    """

    def map_tree(axis: int, *parts: PyTree) -> PyTree:
        """Applies the function with one axis to the leaves of one entry of each pytree."""
        return jax.tree.map(functools.partial(function, axis), *parts)

    return jax.tree.map(map_tree, axes, *trees)


class _LoopContext(NamedTuple):
    """The arrays and options that all tiles of `loop_forward` or `loop_backward` share.

    Attributes:
      mask: the mask of all heads; see `_mask_of_heads`.
      real: a bool array ``[b, q]`` that is true for real queries, and a bool array ``[b, k]`` that
        is true for real keys. An array is None if no padding has to be set to zero. Padding is set
        to zero because a NaN in padding must not affect real tokens.
      positions: `FusedInputs.positions`.
      lengths: the numbers of queries and keys.
      soft_cap: the argument `soft_cap` of `attend`.
    """

    mask: Mask
    real: tuple[jax.Array | None, jax.Array | None]
    positions: tuple[jax.Array, jax.Array] | None
    lengths: tuple[int, int]
    soft_cap: float | None


def _make_context(
    q_length: int, inputs: FusedInputs, soft_cap: float | None
) -> tuple[_LoopContext, jax.Array | None]:
    """Returns the context of all tiles, and the mask's patterns if they differ between heads."""
    k_length = inputs.values.shape[1]
    mask, allowed = _mask_of_heads(q_length, inputs)
    real = inputs.mask.clearing_masks(q_length, k_length)
    lengths = (q_length, k_length)
    return _LoopContext(mask, real, inputs.positions, lengths, soft_cap), allowed


def loop_forward(
    q_length: int, inputs: FusedInputs, *, soft_cap: float | None = None, parallel: bool = False
) -> tuple[jax.Array, SoftmaxStats]:
    """Computes the output and the row statistics, in tiles of one head and one example.

    Args:
      q_length: the number of queries.
      inputs: the inputs of the fused route.
      soft_cap: the argument `soft_cap` of `attend`.
      parallel: whether all heads of an example are computed at once.

    Returns:
      The output ``[b, q, h, e]``, and the statistics that `loop_backward` needs.
    """
    products, biases, values, *_ = inputs
    batch, _, heads, _ = values.shape
    dtype = logits_dtype(values, *jax.tree.leaves((products, biases)))
    context, allowed = _make_context(q_length, inputs, soft_cap)

    def head(
        products: Products, biases: Biases, values: jax.Array, allowed: jax.Array | None
    ) -> tuple[jax.Array, SoftmaxStats]:
        """Returns the output ``[b, q, e]`` and the statistics ``[b, q, 1]`` of one head."""
        # The sum of the biases has the shape [q, k]. The examples share the sum, so it is computed
        # once per head.
        bias = _sum_biases(biases, q_length=_num_bias_rows(inputs, q_length))

        def example(i: jax.Array) -> tuple[jax.Array, SoftmaxStats]:
            """Returns the output ``[q, e]`` and the statistics ``[q, 1]`` of example i."""
            return _tile_forward(context, bias, products, values, allowed, i, dtype)

        results: tuple[jax.Array, SoftmaxStats] = lax.map(example, jnp.arange(batch))
        return results

    args = (products, biases, values, allowed)
    out, stats = map_heads(head, heads, args, (2, 0, 2, 1), (2, 2), parallel=parallel)
    return out, stats


def _tile_forward(
    context: _LoopContext,
    bias: jax.Array | None,
    products: Products,
    values: jax.Array,
    allowed: jax.Array | None,
    i: jax.Array,
    dtype: jnp.dtype,
) -> tuple[jax.Array, SoftmaxStats]:
    """Computes one tile of `loop_forward`.

    Args:
      context: the arrays and options that all tiles share.
      bias: the sum of the head's biases, ``[q, k]``, or None.
      products: the head's products, with an axis of examples.
      values: the head's values, ``[b, k, e]``.
      allowed: the pattern of allowed pairs for this head, ``[b or 1, q, k]``, or None if all heads
        share the mask.
      i: the number of the example.
      dtype: the dtype of logits and sums.

    Returns:
      The output ``[q, e]``, and the statistics ``[q, 1]`` of each row.
    """
    tile_products, tile_values, positions = _select((products, values, context.positions), i)
    queries, keys = _select(context.real, i)
    tile_products, tile_values = clear_padding(tile_products, tile_values, queries, keys)
    mask = _select_mask(context.mask, allowed, i)

    # The logits S are the sum of the terms, [q, k], and -inf for the keys that the mask forbids.
    logits = _logits(
        bias,
        tile_products,
        lengths=context.lengths,
        positions=positions,
        soft_cap=context.soft_cap,
    )
    logits = _mask_logits(logits, mask)

    # The maximum of each row is c = max_k S. If the mask allows no key in a row, c is set to 0,
    # because -inf - (-inf) would be NaN.
    row_max = jnp.max(logits, axis=-1, keepdims=True)
    row_max = jnp.where(row_max == -jnp.inf, 0, row_max)

    # The unnormalized weights are E = exp(S - c), and their sum is l = Σ_k E. Because E is rounded
    # to the dtype of V before the sum, the weights that are multiplied by V sum to one after the
    # division by l.
    weights = jnp.exp(logits - row_max).astype(values.dtype)
    row_sum = jnp.sum(weights, axis=-1, keepdims=True, dtype=dtype)
    is_nonzero = row_sum > 0
    if queries is not None:
        is_nonzero = is_nonzero & queries[:, None]
    inverse_row_sum = jnp.where(is_nonzero, 1 / jnp.where(is_nonzero, row_sum, 1), 0)

    # O = (E V) / l
    out = jnp.matmul(weights, tile_values, preferred_element_type=dtype) * inverse_row_sum
    stats = SoftmaxStats(row_max.astype(dtype), inverse_row_sum.astype(dtype))
    return out.astype(values.dtype), stats


def loop_backward(
    inputs: FusedInputs,
    stats: SoftmaxStats,
    delta: jax.Array,
    dout: jax.Array,
    *,
    soft_cap: float | None = None,
    parallel: bool = False,
) -> FusedInputs:
    """Computes the cotangents of the inputs, in tiles of one head and one example.

    The weights ``P = exp(S - c) / l`` are recomputed from the statistics. The output is
    ``O = P V``, so the cotangents are::

      dV = Pᵀ dO
      dP = dO Vᵀ
      δ = Σ_e dO ∘ O = Σ_k P ∘ dP
      dS = P ∘ (dP - δ)

    Args:
      inputs: the inputs of the forward pass.
      stats: the statistics c and 1 / l that `loop_forward` returned.
      delta: δ, ``[b, q, h, 1]``, from `softmax_vjp_delta`.
      dout: the cotangent dO of the output, ``[b, q, h, e]``.
      soft_cap: the argument `soft_cap` of `attend`.
      parallel: whether all heads of an example are computed at once.
    """
    q_length = dout.shape[1]
    products, biases, values, *_ = inputs
    batch, _, heads, _ = values.shape
    context, allowed = _make_context(q_length, inputs, soft_cap)
    make_bias = functools.partial(_sum_biases, q_length=_num_bias_rows(inputs, q_length))

    # All examples share a factor if its batch axis has size 1. The scan adds up the cotangents of
    # shared factors, in the dtype of the logits, and stacks the cotangents of all other factors.
    is_shared = [x.shape[0] == 1 for x in jax.tree.leaves(products)]

    def head(
        products: Products, biases: Biases, allowed: jax.Array | None, *operands: PyTree
    ) -> tuple[Products, Biases, jax.Array]:
        """Returns the cotangents of one head's products, biases and values.

        `operands` contains the values, the statistics, δ and dO of the head.
        """
        # For `Relative` terms, `bias_vjp` sums the cotangent of the logits along the diagonals.
        bias, bias_vjp = jax.vjp(make_bias, biases)  # [q, k]
        leaves, treedef = jax.tree.flatten(products)

        def add_example(sums: PyTree, i: jax.Array) -> tuple[PyTree, PyTree]:
            """Adds the cotangents of example i to the sums over the examples.

            The second result contains the cotangents of the arrays that differ between examples.
            """
            dbias, dproducts, dvalues = _tile_backward(
                context, bias, products, operands, allowed, i
            )
            shared, unshared = _split_by_flag(jax.tree.leaves(dproducts), is_shared)
            return jax.tree.map(_add_to, sums, (dbias, shared)), (unshared, dvalues)

        zeros = [jnp.zeros_like(x[0], dtype=logits_dtype(x)) for x in leaves]
        init = jax.tree.map(jnp.zeros_like, bias), _split_by_flag(zeros, is_shared)[0]
        (dbias, shared), (unshared, dvalues) = lax.scan(add_example, init, jnp.arange(batch))

        # A summed cotangent has no batch axis, so a batch axis of size 1 is added. A stacked
        # cotangent has a batch axis already.
        dleaves = [
            d if total is None else total[None].astype(x.dtype)
            for total, d, x in zip(shared, unshared, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, dleaves), bias_vjp(dbias)[0], dvalues

    args = products, biases, allowed, values, stats, delta, dout
    cotangents = map_heads(head, heads, args, (2, 0, 1, 2, 2, 2, 2), (2, 0, 2), parallel=parallel)
    return inputs.cotangents(*cotangents)


def _tile_backward(
    context: _LoopContext,
    bias: jax.Array | None,
    products: Products,
    operands: PyTree,
    allowed: jax.Array | None,
    i: jax.Array,
) -> tuple[jax.Array | None, Products, jax.Array]:
    """Computes one tile of `loop_backward`, whose docstring contains the formulas.

    Args:
      context: the arrays and options that all tiles share.
      bias: the sum of the head's biases, ``[q, k]``, or None.
      products: the head's products, with an axis of examples.
      operands: the head's values ``[b, k, e]``, statistics and δ ``[b, q, 1]``, and dO
        ``[b, q, e]``.
      allowed: the pattern of allowed pairs for this head, ``[b or 1, q, k]``, or None if all heads
        share the mask.
      i: the number of the example.

    Returns:
      The cotangents of the bias, of the example's products, and of the example's values ``[k, e]``.
    """
    make_logits = functools.partial(
        _logits,
        lengths=context.lengths,
        positions=_select(context.positions, i),
        soft_cap=context.soft_cap,
    )
    values, (row_max, inverse_row_sum), delta, dout = _select(operands, i)
    tile_products, values = clear_padding(_select(products, i), values, *_select(context.real, i))
    logits, logits_vjp = jax.vjp(make_logits, bias, tile_products)

    # The weights are P = exp(S - c) / l, [q, k]. In the rows of padding queries, P is zero because
    # 1 / l is zero.
    logits = _mask_logits(logits, _select_mask(context.mask, allowed, i))
    weights = jnp.exp(logits - row_max) * inverse_row_sum

    # dP = dO Vᵀ
    # dS = P ∘ (dP - δ)
    dlogits = weights * (_matmul_nt(dout, values) - delta)

    # `logits_vjp` applies the derivative of the soft cap, and returns the cotangents of the bias
    # [q, k] and of the example's factors.
    dbias, dproducts = logits_vjp(dlogits.astype(logits.dtype))

    # dV = Pᵀ dO
    dvalues = _matmul_tn(weights.astype(dout.dtype), dout).astype(values.dtype)
    return dbias, dproducts, dvalues


def _add_to(total: jax.Array, x: jax.Array) -> jax.Array:
    """Adds an array to a total, in the dtype of the total."""
    return total + x.astype(total.dtype)


def _split_by_flag(xs: list[jax.Array], flags: list[bool]) -> tuple[list[PyTree], list[PyTree]]:
    """Splits arrays into two lists: one for arrays whose flag is true, and one for the others.

    Both lists have one entry for each array. In the list to which an array does not belong, its
    entry is None.
    """
    pairs = list(zip(xs, flags, strict=True))
    return [x if flag else None for x, flag in pairs], [None if flag else x for x, flag in pairs]


def _select(tree: _Tree, i: jax.Array) -> _Tree:
    """Returns example i of arrays ``[b or 1, ...]``, without the batch axis."""
    example: _Tree = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, 0 if x.shape[0] == 1 else i, keepdims=False), tree
    )
    return example


def _select_mask(mask: Mask, allowed: jax.Array | None, i: jax.Array) -> Mask:
    """Returns the mask of example i, with the pattern of the head if `allowed` is not None."""
    if allowed is not None:
        mask = dataclasses.replace(mask, allowed=allowed)
    return mask.map_arrays(lambda _, x: _select(x, i))


def _mask_of_heads(q_length: int, inputs: FusedInputs) -> tuple[Mask, jax.Array | None]:
    """Returns the mask that all heads share, and the patterns if they differ between heads.

    If the patterns differ between heads, the second result is ``[b or 1, h, q, k]``, and otherwise
    None. The segments of packed rows are converted to a pattern before the loop. If the loop itself
    compared the segments of queries and keys, XLA's CPU backend could not vectorize the
    exponential.
    """
    mask = inputs.mask
    if mask.query_segments is not None:
        mask = Mask(allowed=mask.pairs(q_length, inputs.values.shape[1]))
    if mask.allowed is None:
        return mask, None
    shared = mask.allowed.shape[1] == 1
    rest = dataclasses.replace(mask, allowed=mask.allowed[:, 0] if shared else None)
    return rest, None if shared else mask.allowed


def _sum_biases(biases: Biases, *, q_length: int) -> jax.Array | None:
    """Returns the sum of a head's biases, ``[q, k]``, or None if the head has no biases.

    The dtype of the sum is float32 or wider.
    """
    parts = [term.logits for term in biases.tables]
    parts += [expand_diagonals(term.logits, q_length) for term in biases.diagonals]
    if not parts:
        return None
    return functools.reduce(operator.add, [x.astype(logits_dtype(x)) for x in parts])


def _num_bias_rows(inputs: FusedInputs, q_length: int) -> int:
    """Returns the number of rows of the biases.

    Biases have one row for each query. In packed rows, biases have one row for each position in the
    longest segment.
    """
    if inputs.positions is None:
        return q_length
    return inputs.mask.segment_lengths(q_length, inputs.values.shape[1])[0]


def _logits(
    bias: jax.Array | None,
    products: Products,
    *,
    lengths: tuple[int, int],
    positions: tuple[jax.Array, jax.Array] | None,
    soft_cap: float | None,
) -> jax.Array:
    """Returns the logits ``[q, k]`` of one head and example, before the mask is applied.

    Args:
      bias: the sum of the head's biases, ``[q, k]``, or None if the head has no biases. If
        `positions` is not None, the rows and columns of `bias` belong to positions in a segment.
      products: the factors of this tile, ``[q, r]`` and ``[k, r]``.
      lengths: the numbers of queries and keys.
      positions: the positions of queries ``[q]`` and keys ``[k]`` in their segments, or None if the
        rows are not packed.
      soft_cap: the argument `soft_cap` of `attend`.
    """
    key = jnp.arange(lengths[1]) if positions is None else positions[1]
    if bias is not None and positions is not None:
        bias = jnp.take(jnp.take(bias, positions[0], axis=0), key, axis=1)
    summands = [] if bias is None else [bias]
    if products.low_rank:
        # The sum of the products Q Kᵀ of all terms is one product of the concatenated factors.
        queries = jnp.concatenate([term.queries for term in products.low_rank], axis=-1)
        keys = jnp.concatenate([term.keys for term in products.low_rank], axis=-1)
        summands.append(_matmul_nt(queries, keys))
    for term in products.outer:
        size = term.b.shape[-1]
        # The logits are a[q, k // B] · b[q, k % B]. The entries of a and b are looked up by matrix
        # products with one-hot matrices. These products use the highest precision, because a lower
        # precision would round the entries.
        exact = lax.Precision.HIGHEST
        a_one_hot = jax.nn.one_hot(key // size, term.a.shape[-1], dtype=term.a.dtype)
        b_one_hot = jax.nn.one_hot(key % size, size, dtype=term.b.dtype)
        summands.append(_matmul_nt(term.a, a_one_hot, exact) * _matmul_nt(term.b, b_one_hot, exact))
    return cap_logits(functools.reduce(operator.add, summands), soft_cap)


def _mask_logits(logits: jax.Array, mask: Mask) -> jax.Array:
    """Returns the logits ``[q, k]`` with -inf for pairs that the mask forbids.

    This function does not mask the rows of padding queries. The weights of padding queries become
    zero because `SoftmaxStats.inverse_row_sum` is zero for padding queries.
    """
    pairs = dataclasses.replace(mask, query_lengths=None, query_valid=None).pairs(*logits.shape)
    if pairs is None:
        return logits
    return jnp.where(pairs.reshape(pairs.shape[-2:]), logits, -jnp.inf)


def _matmul_nt(x: jax.Array, y: jax.Array, precision: lax.PrecisionLike = None) -> jax.Array:
    """Returns the product ``x yᵀ``, ``[q, k]`` in float32 or wider.

    The shape of x is ``[q, r]``, and the shape of y is ``[k, r]``.
    """
    return _matmul(*match_varying_axes(x, y), precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, y: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """Computes ``x yᵀ`` with a gradient that keeps the factors in their own dtypes.

    The cotangent of the product is float32 or wider. The backward pass rounds the cotangent to the
    dtype of a factor before it multiplies them.
    """
    return jnp.matmul(x, y.T, precision=precision, preferred_element_type=logits_dtype(x, y))


def _matmul_bwd(
    precision: lax.PrecisionLike, inputs: tuple[jax.Array, jax.Array], dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of both factors of `_matmul`."""
    x, y = inputs
    # dx = dO y
    dx = jnp.matmul(dout.astype(y.dtype), y, precision=precision, preferred_element_type=dout.dtype)
    # dy = dOᵀ x
    dy = _matmul_tn(dout.astype(x.dtype), x, precision)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_matmul.defvjp(lambda x, y, precision: (_matmul(x, y, precision), (x, y)), _matmul_bwd)


def _matmul_tn(x: jax.Array, y: jax.Array, precision: lax.PrecisionLike = None) -> jax.Array:
    """Returns the product ``xᵀ y``, ``[k, e]`` in float32 or wider.

    The large factor x has the shape ``[q, k]``, and the narrow factor y has the shape ``[q, e]``.
    The product is computed as ``(yᵀ x)ᵀ``, because XLA's CPU backend takes two to three times as
    long if it has to transpose a large left factor. The optimization barrier keeps XLA from
    rewriting ``(yᵀ x)ᵀ`` as ``xᵀ y``.
    """
    dims = (((0,), (0,)), ((), ()))
    transposed = lax.dot_general(
        y, x, dims, precision=precision, preferred_element_type=logits_dtype(x, y)
    )
    return lax.optimization_barrier(transposed).T
