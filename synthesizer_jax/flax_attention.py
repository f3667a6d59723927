"""A replacement for Flax's `dot_product_attention`, to be used as `attention_fn` in Flax's layers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype as linen_promote_dtype
from flax.typing import DotGeneralT, Dtype, EinsumT, PrecisionLike, PromoteDtypeFn
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.ambient import partition
from synthesizer_jax.attention import Mask, Partition, Term, Terms, materialize
from synthesizer_jax.attention.explanations import log_external_call
from synthesizer_jax.attention.functional import attend_dot_product
from synthesizer_jax.attention.masks import add_pattern, as_bool
from synthesizer_jax.attention.partition import axes_along, axes_of_type, in_auto_mode

if TYPE_CHECKING:
    from flax import nnx

QUERY_BLOCK = 128
"""Number of queries per call where Flax's own function computes the attention."""

Bias: TypeAlias = jax.Array | Term | Terms | None

AttentionFn: TypeAlias = Callable[..., jax.Array]
"""The type of Flax's ``attention_fn``."""


class _Inputs(NamedTuple):
    """The array arguments of `attention_fn`; `dropout_rng` is None if there is no dropout."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: Bias
    mask: jax.Array | Mask | None
    dropout_rng: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Options:
    """The other arguments of `attention_fn`, under its names; all einsums None: the defaults."""

    broadcast_dropout: bool
    dropout_rate: float
    precision: PrecisionLike
    force_fp32_for_softmax: bool
    is_causal: bool
    return_weights: bool
    einsum_dot_general: DotGeneralT | None
    qk_attn_weights_einsum: EinsumT | None
    attn_weights_value_einsum: EinsumT | None


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Bias = None,
    mask: jax.Array | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: nn.Module | nnx.Module | None = None,
    *,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: DotGeneralT | None = None,
    qk_attn_weights_einsum: EinsumT | None = None,
    attn_weights_value_einsum: EinsumT | None = None,
    promote_dtype: PromoteDtypeFn | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Scaled dot-product attention that does not keep an array ``[batch, heads, q, k]`` in memory.

    An ``attention_fn`` for `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`,
    with the arguments of both libraries' `dot_product_attention`. The results are equal up to rounding;
    logits and softmax are always computed in float32 or wider. The gradient of a bias that all examples
    share, ``functools.partial(attention_fn, bias=table)``, is summed over the batch without an array per
    example.

    With dropout, a `precision` or custom einsums, Flax's own function computes the attention in blocks of
    128 queries, which the backward pass recomputes. Up to 128 queries, the dropped weights are exactly
    those that Flax drops with the same PRNG key; with more queries, every block draws its own mask.

    Args:
      query: ``[batch..., q, heads, e]``, with any number of batch dimensions, or none.
      key: ``[batch..., k, heads, e]``; its number of heads may be a divisor of that of `query` (grouped
        queries).
      value: ``[batch..., k, heads, width]``, with as many heads as `key`.
      bias: added to the logits, broadcastable to ``[batch..., heads, q, k]``; or a term, or a tuple of
        terms, of `synthesizer_jax.attention`, such as ``relative(...)``.
      mask: broadcastable to ``[batch..., heads, q, k]``, bool or 0/1, where 1 means that the query
        attends to the key. The output of a query that attends to no key is the mean of the values, as in
        Flax. Or a `Mask`, which needs no array of q × k; the output of such a query is then zero.
      broadcast_dropout: whether all examples and heads share one dropout mask ``[q, k]``.
      dropout_rng: PRNG key of the dropout.
      dropout_rate: probability of dropping a weight.
      deterministic: if True, dropout is off.
      dtype: dtype of the computation; None: inferred from `query`, `key` and `value`.
      precision: precision of the matrix products, see `jax.lax.Precision`.
      module: a Flax module in which the weights are sown as ``attention_weights``, which requires an
        array of q × k.
      force_fp32_for_softmax: has an effect only where Flax's own function computes the attention.
      einsum_dot_general: the ``dot_general`` of both products.
      qk_attn_weights_einsum: the einsum of queries and keys.
      attn_weights_value_einsum: the einsum of weights and values.
      promote_dtype: NNX's ``((query, key, value), dtype=...) -> arrays``.
      is_causal: whether queries attend only to keys up to their own position.

    Returns:
      ``[batch..., q, heads, width]``.

    Raises:
      ValueError: the shapes do not agree, or `dropout_rng` is missing.
    """
    promote = promote_dtype or (lambda xs, dtype: linen_promote_dtype(*xs, dtype=dtype))
    query, key, value = promote((query, key, value), dtype=dtype)
    _check_shapes(query, key, value)
    has_dropout = dropout_rate > 0.0 and not deterministic
    if has_dropout and dropout_rng is None:
        raise ValueError("attention_fn: dropout needs dropout_rng; pass it, or deterministic=True")
    inputs = _Inputs(query, key, value, bias, mask, dropout_rng if has_dropout else None)
    options = _Options(
        broadcast_dropout=broadcast_dropout,
        dropout_rate=dropout_rate,
        precision=precision,
        force_fp32_for_softmax=force_fp32_for_softmax,
        is_causal=is_causal,
        return_weights=module is not None,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    if axes_of_type(AxisType.Explicit):
        out, weights = _attention_in_auto_mode(inputs, options)
    else:
        batch_size = math.prod(query.shape[:-3])
        out, weights = _attention(
            inputs, options, partition(batch=batch_size, heads=query.shape[-2])
        )
    if weights is not None:
        _sow(module, weights)
    return out


def _attention_in_auto_mode(
    inputs: _Inputs, options: _Options
) -> tuple[jax.Array, jax.Array | None]:
    """`_attention` under explicit mesh axes, partitioned like the queries."""
    query = inputs.query
    batch_ndim = query.ndim - 3
    batch = axes_along(query, 0) if batch_ndim else ()
    sequence, heads = axes_along(query, -3), axes_along(query, -2)
    batch_spec = [batch, *[None] * (batch_ndim - 1)] if batch_ndim else []
    out_spec = PartitionSpec(*batch_spec, sequence, heads)
    weights_spec = PartitionSpec(*batch_spec, heads, sequence) if options.return_weights else None
    attention = functools.partial(
        _attention, options=options, queries_partition=Partition(batch, heads, sequence)
    )
    return in_auto_mode(attention, lambda _: (out_spec, weights_spec))(inputs)


def _attention(
    inputs: _Inputs, options: _Options, queries_partition: Partition | None
) -> tuple[jax.Array, jax.Array | None]:
    """`attention_fn` for arrays of one dtype: the output, and the weights if they are requested."""
    query, key, value, bias, mask, dropout_rng = inputs
    batch = query.shape[:-3]
    logits_shape = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    query, key, value = (merge_batch_axes(x, batch) for x in (query, key, value))
    key, value = (_repeat_heads(x, query.shape[2]) for x in (key, value))
    if isinstance(bias, jax.Array | np.ndarray | np.generic):
        bias = _broadcast_to_logits("bias", bias, logits_shape)
    has_mask_array = mask is not None and not isinstance(mask, Mask)
    zero_empty_rows = isinstance(mask, Mask)
    mask = as_mask(mask, logits_shape)
    mask = dataclasses.replace(mask, causal=mask.causal or options.is_causal)
    inputs = _Inputs(query, key, value, bias, mask, dropout_rng)
    weights = None
    if options.return_weights:
        weights = _flax_weights(inputs, options)
        weights = _zero_empty_rows(weights, mask) if zero_empty_rows else weights
        weights = weights.reshape(*batch, *weights.shape[1:])
    flax_options = (
        options.precision,
        options.einsum_dot_general,
        options.qk_attn_weights_einsum,
        options.attn_weights_value_einsum,
    )
    if dropout_rng is None and all(option is None for option in flax_options):
        out = attend_dot_product(
            query, key, value, bias=bias, mask=mask, partition=queries_partition
        )
        if has_mask_array:
            out = _replace_empty_rows(out, key, mask, replacement=value.mean(axis=1, keepdims=True))
    else:
        flax_attention = functools.partial(_flax_attention, options=options)
        kernel = f"einsums, {QUERY_BLOCK} queries at a time"
        log_external_call("flax", kernel, flax_attention, *inputs)
        out = flax_attention(*inputs)
        if zero_empty_rows:
            out = _replace_empty_rows(out, key, mask, replacement=jnp.zeros((), out.dtype))
    return out.reshape(*batch, *out.shape[1:]), weights


def merge_batch_axes(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Reshapes an array ``[batch..., ...]`` such that it has a single batch dimension."""
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def _broadcast_to_logits(
    name: str, x: jax.typing.ArrayLike, logits_shape: tuple[int, ...]
) -> jax.Array:
    """Reshapes an array that broadcasts to the logits such that it has a single batch dimension.

    Args:
      name: the argument's name, for the error.
      x: an array that broadcasts to `logits_shape`.
      logits_shape: ``(batch..., heads, q, k)``.

    Returns:
      ``[b or 1, heads or 1, q or 1, k or 1]``; the batch dimension is 1 if all examples share the array.

    Raises:
      ValueError: `x` does not broadcast to `logits_shape`.
    """
    x = jnp.asarray(x)
    shape = (1,) * (len(logits_shape) - x.ndim) + x.shape
    if len(shape) != len(logits_shape) or any(
        n not in (1, m) for n, m in zip(shape, logits_shape, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {x.shape}, which does not broadcast to "
            f"[batch..., heads, q, k]={logits_shape}"
        )
    if math.prod(shape[:-3]) == 1:
        return x.reshape(1, *shape[-3:])
    batch = logits_shape[:-3]
    return merge_batch_axes(jnp.broadcast_to(x, (*batch, *shape[-3:])), batch)


def as_mask(mask: jax.typing.ArrayLike | Mask | None, logits_shape: tuple[int, ...]) -> Mask:
    """Converts an array to a `Mask`.

    Args:
      mask: None, a `Mask`, or bool or 0/1 numbers that broadcast to `logits_shape`.
      logits_shape: ``(batch..., heads, q, k)``.

    Raises:
      ValueError: an array does not broadcast to `logits_shape` or is an additive mask; or a `Mask` with
        arrays is given and the number of batch dimensions is not one.
    """
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        if len(logits_shape) != 4 and jax.tree.leaves(mask):
            raise ValueError(
                f"mask: a Mask with arrays has one batch dimension, but the inputs have "
                f"{len(logits_shape) - 3}; pass a mask array [batch..., heads or 1, q, k]"
            )
        return mask
    mask = as_bool(_broadcast_to_logits("mask", mask, logits_shape))
    *batch, _, q_length, k_length = logits_shape
    return add_pattern(Mask(), mask, batch=math.prod(batch), q_length=q_length, k_length=k_length)


def _replace_empty_rows(
    out: jax.Array, key: jax.Array, mask: Mask, *, replacement: jax.Array
) -> jax.Array:
    """Replaces the output ``[b, q, heads, e]`` of queries that attend to no key."""
    pairs = mask.pairs(out.shape[1], key.shape[1])
    if pairs is None:
        return out
    return jnp.where(pairs.any(-1, keepdims=True).swapaxes(1, 2), out, replacement)


def _zero_empty_rows(weights: jax.Array, mask: Mask) -> jax.Array:
    """Sets the weights ``[b, heads, q, k]`` of queries that attend to no key to zero."""
    pairs = mask.pairs(*weights.shape[2:])
    return weights if pairs is None else jnp.where(pairs.any(-1, keepdims=True), weights, 0)


def _flax_weights(inputs: _Inputs, options: _Options) -> jax.Array:
    """The attention weights ``[b, heads, q, k]``, computed by Flax."""
    return nn.dot_product_attention_weights(
        inputs.query,
        inputs.key,
        *_materialize(inputs),
        einsum=options.qk_attn_weights_einsum,
        einsum_dot_general=options.einsum_dot_general,
        precision=options.precision,
        force_fp32_for_softmax=options.force_fp32_for_softmax,
    )


def _flax_attention(*arrays: jax.Array | Bias | Mask, options: _Options) -> jax.Array:
    """Applies Flax's own function to blocks of queries; the arrays are those of `_Inputs`."""
    inputs = _Inputs(*arrays)  # type: ignore[arg-type]
    query, key, value, *_, rng = inputs
    attention: Callable[..., jax.Array] = functools.partial(
        nn.dot_product_attention,
        deterministic=rng is None,
        precision=options.precision,
        force_fp32_for_softmax=options.force_fp32_for_softmax,
        dropout_rate=options.dropout_rate,
        broadcast_dropout=options.broadcast_dropout,
        einsum_dot_general=options.einsum_dot_general,
        qk_attn_weights_einsum=options.qk_attn_weights_einsum,
        attn_weights_value_einsum=options.attn_weights_value_einsum,
    )
    logits, pairs = _materialize(inputs)
    length = query.shape[1]
    if length <= QUERY_BLOCK:
        return attention(query, key, value, logits, pairs, dropout_rng=rng)
    num_blocks = -(-length // QUERY_BLOCK)

    def pad_queries(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None or x.shape[axis] == 1:
            return x
        pad_width = [(0, 0)] * x.ndim
        pad_width[axis] = (0, num_blocks * QUERY_BLOCK - length)
        return jnp.pad(x, pad_width)

    queries, logits, pairs = pad_queries(query, 1), pad_queries(logits, 2), pad_queries(pairs, 2)

    @jax.checkpoint
    def attend_block(i: jax.Array, rng: jax.Array | None) -> jax.Array:
        def slice_queries(x: jax.Array | None, axis: int) -> jax.Array | None:
            if x is None or x.shape[axis] == 1:
                return x
            return jax.lax.dynamic_slice_in_dim(x, i * QUERY_BLOCK, QUERY_BLOCK, axis)

        query_block = slice_queries(queries, 1)
        logits_block, pairs_block = slice_queries(logits, 2), slice_queries(pairs, 2)
        return attention(query_block, key, value, logits_block, pairs_block, dropout_rng=rng)

    rngs = None if rng is None else jax.random.split(rng, num_blocks)
    out = jax.lax.map(lambda xs: attend_block(*xs), (jnp.arange(num_blocks), rngs))
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :length]


def _materialize(inputs: _Inputs) -> tuple[jax.Array | None, jax.Array | None]:
    """The bias and the mask as the arrays that Flax takes."""
    q_length, k_length = inputs.query.shape[1], inputs.key.shape[1]
    bias, mask = inputs.bias, inputs.mask
    assert isinstance(mask, Mask)
    if bias is not None and not isinstance(bias, jax.Array):
        terms = bias if isinstance(bias, tuple) else (bias,)
        bias = materialize(terms, q_length=q_length, k_length=k_length)
    return bias, mask.pairs(q_length, k_length)


def _repeat_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Repeats keys or values ``[b, k, groups, e]`` such that every head of the queries has its own."""
    return x if x.shape[2] == num_heads else jnp.repeat(x, num_heads // x.shape[2], axis=2)


def _sow(module: nn.Module | nnx.Module | None, weights: jax.Array) -> None:
    if isinstance(module, nn.Module):
        module.sow("intermediates", "attention_weights", weights)
        return
    from flax import nnx  # slow to import, and already loaded if the module is an NNX module

    assert isinstance(module, nnx.Module)
    module.sow(nnx.Intermediate, "attention_weights", weights)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape} and value {value.shape}"
    if not query.ndim == key.ndim == value.ndim >= 3:
        raise ValueError(
            f"attention_fn: {shapes} must be [batch..., length, heads, width], all of the same rank"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"attention_fn: {shapes}; their batch dims must match")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"attention_fn: {shapes}; query and key depths must match")
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(
            f"attention_fn: {shapes}; key and value lengths must match, and so must their heads"
        )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"attention_fn: {shapes}; the number of heads of query must be a multiple of that of key"
        )
