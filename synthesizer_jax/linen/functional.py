"""A replacement for Flax's `dot_product_attention`, used as `attention_fn` in Flax's layers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as linen_promote_dtype
from flax.typing import DotGeneralT, Dtype, EinsumT, PrecisionLike, PromoteDtypeFn
from jax.sharding import PartitionSpec

from synthesizer_jax.attention import Mask, Partition, Term, Terms, materialize
from synthesizer_jax.attention.explanations import log_external_call
from synthesizer_jax.attention.functional import attend_dot_product
from synthesizer_jax.attention.masks import add_pattern, as_bool
from synthesizer_jax.attention.partition import partition_by_types, partition_of_query
from synthesizer_jax.attention.terms import repeat_heads
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.primitives.mesh import partition as current_partition

if TYPE_CHECKING:
    from flax import nnx

QUERY_TILE = 128
"""The number of queries per tile when Flax's own function computes the attention."""

Bias: TypeAlias = jax.Array | Term | Terms | None

AttentionFn: TypeAlias = Callable[..., jax.Array]
"""The type of Flax's ``attention_fn``."""


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
    """Computes scaled dot-product attention without storing an array ``[batch, heads, q, k]``.

    Pass this function as ``attention_fn`` to `flax.linen.MultiHeadDotProductAttention` or
    `flax.nnx.MultiHeadAttention`. The function has the arguments of `dot_product_attention` in
    Linen and NNX. The results are equal to the results of Flax up to rounding. Logits and softmax
    are always computed in float32 or wider. If all examples share a bias, as in
    ``functools.partial(attention_fn, bias=table)``, the gradient of the bias is summed over the
    batch without storing an array per example.

    If dropout, a `precision` or a custom einsum is used, Flax's own function computes the
    attention. If there are more than 128 queries, Flax's function is called for tiles of 128
    queries, and the backward pass computes each tile again. With at most 128 queries, dropout drops
    the same weights as in Flax for the same PRNG key. With more queries, every query draws its own
    dropout mask.

    Args:
      query: ``[batch..., q, heads, e]``, with any number of batch axes, including zero.
      key: ``[batch..., k, heads, e]``. The number of heads must divide the number of heads of
        `query` (grouped-query attention).
      value: ``[batch..., k, heads, width]``, with as many heads as `key`.
      bias: a bias that is added to the logits. The bias may be an array that broadcasts to
        ``[batch..., heads, q, k]``, a term of `synthesizer_jax.attention` such as
        ``relative(...)``, or a tuple of terms.
      mask: an array or a `Mask`. An array is bool or 0/1 and broadcastable to
        ``[batch..., heads, q, k]``, where 1 means that the query may attend to the key. A `Mask`
        does not have to store every pair of query and key. If a query may attend to no key, its
        output depends on the type of `mask`. If `mask` is an array, the output is the mean of the
        values, as in Flax. If `mask` is a `Mask`, the output is zero.
      broadcast_dropout: see Flax.
      dropout_rng: the PRNG key of the dropout.
      dropout_rate: the probability with which a weight is dropped.
      deterministic: whether dropout is off.
      dtype: the dtype of the computation. None means that the dtype is inferred from `query`, `key`
        and `value`.
      precision: see Flax.
      module: a Flax module in which the weights are sown as ``attention_weights``. Sowing the
        weights creates an array ``[batch..., heads, q, k]``. None sows no weights.
      force_fp32_for_softmax: see Flax. `force_fp32_for_softmax` has an effect only if Flax's own
        function computes the attention. In this case, the output may have a dtype other than
        `dtype`.
      einsum_dot_general: see Flax.
      qk_attn_weights_einsum: see Flax.
      attn_weights_value_einsum: see Flax.
      promote_dtype: see Flax.
      is_causal: whether a query may attend only to keys up to its own position.

    Returns:
      The output ``[batch..., q, heads, width]``.

    Raises:
      ValueError: if the shapes of the inputs do not agree, or if dropout is active but
        `dropout_rng` is None.
    """
    # NNX passes its own `promote_dtype`, which takes a tuple of arrays.
    if promote_dtype is None:
        query, key, value = linen_promote_dtype(query, key, value, dtype=dtype)
    else:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    _check_shapes(query, key, value)

    has_dropout = dropout_rate > 0.0 and not deterministic
    if has_dropout and dropout_rng is None:
        raise ValueError(
            "attention_fn: dropout needs a PRNG key. Pass dropout_rng, or deterministic=True."
        )
    # If one of the following options is set, only Flax's own function can compute the attention.
    products = {
        "precision": precision,
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    options = {
        **products,
        "force_fp32_for_softmax": force_fp32_for_softmax,
        "dropout_rate": dropout_rate if has_dropout else 0.0,
        "broadcast_dropout": broadcast_dropout,
    }
    out, weights = _attend(
        query,
        key,
        value,
        bias,
        mask,
        dropout_rng if has_dropout else None,
        is_causal=is_causal,
        flax_options=options,
        use_flax=has_dropout or any(option is not None for option in products.values()),
        return_weights=module is not None,
    )

    if isinstance(module, nn.Module):
        module.sow("intermediates", "attention_weights", weights)
    elif module is not None:
        from flax import nnx  # imported only here, because importing NNX is slow

        module.sow(nnx.Intermediate, "attention_weights", weights)
    return out


def _specs(partition: Partition, result: tuple[jax.Array, jax.Array | None]) -> PyTree:
    """Returns the partition specs of the output and of the weights ``[batch..., heads, q, k]``."""
    out, weights = result
    *rows, sequence, heads = partition.spec(out)
    return partition.spec(out), None if weights is None else PartitionSpec(*rows, heads, sequence)


@partition_by_types(partition_of_query, _specs)
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: PyTree,
    mask: PyTree,
    dropout_rng: jax.Array | None,
    *,
    is_causal: bool,
    flax_options: dict[str, Any],
    use_flax: bool,
    return_weights: bool,
    partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes `attention_fn` for arrays that have the same dtype.

    Args:
      query: as in `attention_fn`.
      key: as in `attention_fn`.
      value: as in `attention_fn`.
      bias: as in `attention_fn`.
      mask: as in `attention_fn`.
      dropout_rng: the PRNG key of the dropout, or None if there is no dropout.
      is_causal: as in `attention_fn`.
      flax_options: the arguments that only Flax's own function takes.
      use_flax: whether Flax's own function computes the attention.
      return_weights: whether to return the weights.
      partition: the mesh axes that divide the arrays. None uses the current mesh and the current
        logical axis rules.

    Returns:
      The output, and the weights ``[batch..., heads, q, k]``, or None if `return_weights` is False.
    """
    batch = query.shape[:-3]
    if partition is None:
        partition = current_partition(batch=math.prod(batch), heads=query.shape[-2])
    logits_shape = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])

    # From here on, all arrays have one batch axis and the same number of heads.
    query, key, value = (merge_batch_axes(x, batch) for x in (query, key, value))
    key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    if not isinstance(bias, Term | tuple | None):
        bias = _broadcast_to_logits("attention_fn: bias", bias, logits_shape)
    is_own_mask = isinstance(mask, Mask)

    # If a query may attend to no key, this package returns zero, and Flax returns the mean of the
    # values. The output of a query without keys must be zero if `mask` is a `Mask`, and the mean of
    # the values if `mask` is an array. If the attention function returns the wrong one of these two
    # values, the output is corrected below.
    fills_empty_rows = mask is not None and is_own_mask == use_flax
    mask = as_mask(mask, logits_shape)
    mask = dataclasses.replace(mask, causal=mask.causal or is_causal)
    pairs = None
    attending = jnp.ones((1, 1, 1, 1), bool)  # whether each query may attend to at least one key
    if use_flax or return_weights or fills_empty_rows:
        pairs = mask.pairs(*logits_shape[-2:])
        if pairs is not None:
            attending = pairs.any(-1, keepdims=True)  # [b or 1, h or 1, q or 1, 1]

    if use_flax or return_weights:
        logits = _bias_as_logits(bias, q_length=query.shape[1], k_length=key.shape[1])
    if use_flax:
        compute: AttentionFn = functools.partial(_flax_attention, **flax_options)
        kernel = f"einsums, {QUERY_TILE} queries at a time"
        log_external_call("flax", kernel, compute, query, key, value, logits, pairs, dropout_rng)
        out = compute(query, key, value, logits, pairs, dropout_rng)
    else:
        out = attend_dot_product(query, key, value, bias=bias, mask=mask, partition=partition)
    if fills_empty_rows:
        # If `mask` is an array, the output of a query without keys is the mean of the values.
        empty = 0 if is_own_mask else value.mean(axis=1, keepdims=True)
        out = jnp.where(attending.swapaxes(1, 2), out, empty)  # [b, q, h, width]
    out = out.reshape(*batch, *out.shape[1:])  # [batch..., q, h, width]
    if not return_weights:
        return out, None

    # The weights are computed a second time, because the attention function does not return them.
    weights = nn.dot_product_attention_weights(
        query,
        key,
        logits,
        pairs,
        precision=flax_options["precision"],
        einsum_dot_general=flax_options["einsum_dot_general"],
        einsum=flax_options["qk_attn_weights_einsum"],
        force_fp32_for_softmax=flax_options["force_fp32_for_softmax"],
    )
    if is_own_mask:
        weights = jnp.where(attending, weights, 0)
    return out, weights.reshape(*batch, *weights.shape[1:])


def _bias_as_logits(bias: Bias, *, q_length: int, k_length: int) -> jax.Array | None:
    """Converts a bias to an array of logits, because Flax's functions do not support terms."""
    if bias is None or isinstance(bias, jax.Array):
        return bias
    terms = bias if isinstance(bias, tuple) else (bias,)
    return materialize(terms, q_length=q_length, k_length=k_length)


def _flax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    pairs: jax.Array | None,
    rng: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """Computes attention with Flax's own function, in tiles of at most `QUERY_TILE` queries.

    The backward pass computes each tile again, so that the weights of all queries are never stored
    at the same time.

    Args:
      query: ``[b, q, heads, e]``.
      key: ``[b, k, heads, e]``.
      value: ``[b, k, heads, width]``.
      bias: an array that is broadcastable to ``[b, heads, q, k]``, or None.
      pairs: a bool array that is broadcastable to ``[b, heads, q, k]`` and True for allowed pairs,
        or None.
      rng: the PRNG key of the dropout. None turns dropout off.
      **options: further arguments of Flax's function.
    """
    attention: AttentionFn = functools.partial(
        nn.dot_product_attention, deterministic=rng is None, **options
    )
    length = query.shape[1]
    if length <= QUERY_TILE:
        return attention(query, key, value, bias, pairs, dropout_rng=rng)

    # `jax.lax.map` maps over the first axis, so the axis of queries is moved to the front. Arrays
    # that all queries share are not mapped.
    by_query = [
        None if x is None or x.shape[axis] == 1 else jnp.moveaxis(x, axis, 0)
        for x, axis in ((query, 1), (bias, 2), (pairs, 2))
    ]

    @jax.checkpoint
    def attend_one(xs: PyTree) -> jax.Array:
        """Returns the output of one query, ``[b, 1, heads, width]``."""
        one_query, one_bias, one_pairs, one_rng = xs
        # Mapped arrays have lost the axis of queries, so the axis is added again. Arrays that all
        # queries share already have an axis of queries of size 1.
        one_bias = bias if one_bias is None else one_bias[:, :, None]
        one_pairs = pairs if one_pairs is None else one_pairs[:, :, None]
        return attention(one_query[:, None], key, value, one_bias, one_pairs, dropout_rng=one_rng)

    # With `batch_size`, `jax.lax.map` runs `jax.vmap` over tiles of queries, one tile after
    # another.
    rngs = None if rng is None else jax.random.split(rng, length)
    out = jax.lax.map(attend_one, (*by_query, rngs), batch_size=QUERY_TILE)
    return jnp.moveaxis(out[:, :, 0], 0, 1)  # [q, b, h, width] → [b, q, h, width]


def merge_batch_axes(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Reshapes an array ``[batch..., ...]`` so that it has exactly one batch axis.

    Args:
      x: the array.
      batch: the sizes of the batch axes of the array.
    """
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def _broadcast_to_logits(
    name: str, x: jax.typing.ArrayLike, logits_shape: tuple[int, ...]
) -> jax.Array:
    """Reshapes a broadcastable array to ``[b or 1, heads or 1, q or 1, k or 1]``.

    b is the product of the sizes of all batch axes.

    Raises:
      ValueError: if the array does not broadcast to the logits.
    """
    x = jnp.asarray(x)
    shape = (1,) * (len(logits_shape) - x.ndim) + x.shape
    fits = len(shape) == len(logits_shape) and all(
        n in (1, size) for n, size in zip(shape, logits_shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {x.shape}, but it must broadcast to [batch..., heads, q, k], "
            f"which is {logits_shape} here."
        )
    if math.prod(shape[:-3]) == 1:
        return x.reshape(1, *shape[-3:])
    batch = logits_shape[:-3]
    return merge_batch_axes(jnp.broadcast_to(x, (*batch, *shape[-3:])), batch)


def as_mask(mask: jax.typing.ArrayLike | Mask | None, logits_shape: tuple[int, ...]) -> Mask:
    """Converts a mask in Flax's format to a `Mask`.

    Args:
      mask: None, a `Mask`, or an array of bool or 0/1 that broadcasts to `logits_shape`.
      logits_shape: ``(batch..., heads, q, k)``.

    Raises:
      ValueError: if an array does not broadcast to `logits_shape`, or contains numbers other than 0
        and 1; or if a `Mask` contains arrays although the number of batch axes is not one.
    """
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        if len(logits_shape) != 4 and jax.tree.leaves(mask):
            raise ValueError(
                "mask is a Mask with arrays, which have one batch axis, but the inputs have "
                f" {len(logits_shape) - 3} batch axes. Pass an array [batch..., heads "
                "or 1, q, k] as mask."
            )
        return mask
    mask = as_bool(_broadcast_to_logits("mask", mask, logits_shape))
    *batch, _, q_length, k_length = logits_shape
    return add_pattern(Mask(), mask, batch=math.prod(batch), q_length=q_length, k_length=k_length)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Raises a `ValueError` with the messages of Flax's assertions if the shapes do not agree."""
    if not query.ndim == key.ndim == value.ndim >= 3:
        problem = "All three must be [batch..., length, heads, width], with equally many axes."
    elif not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        problem = "Their batch dims must match."
    elif query.shape[-1] != key.shape[-1]:
        problem = "The query and key depths must match."
    elif key.shape[-3:-1] != value.shape[-3:-1]:
        problem = "The key and value lengths must match, and so must their numbers of heads."
    elif query.shape[-2] % key.shape[-2]:
        problem = "The number of heads of the key must divide the number of heads of the query."
    else:
        return
    shapes = f"query {query.shape}, key {key.shape} and value {value.shape}"
    raise ValueError(f"attention_fn: the shapes are {shapes}. {problem}")
