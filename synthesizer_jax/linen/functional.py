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
"""The number of queries that are computed at once when Flax's own function computes the attention.
"""

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
    """Scaled dot-product attention that does not keep an array ``[batch, heads, q, k]`` in memory.

    Pass it as ``attention_fn`` to `flax.linen.MultiHeadDotProductAttention` or
    `flax.nnx.MultiHeadAttention`. It has the arguments of the `dot_product_attention` of both
    libraries. The results are equal to Flax's up to rounding. Logits and softmax are always
    computed in float32 or wider. If all examples share a bias, as in
    ``functools.partial(attention_fn, bias=table)``, its gradient is summed over the batch without
    an array per example.

    Flax's own function computes the attention if there is dropout, a `precision`, or a custom
    einsum. If there are more than 128 queries, it computes 128 of them at a time, and the backward
    pass computes them again. Up to 128 queries, the same PRNG key drops exactly the weights that
    Flax drops. With more queries, every query draws its own dropout mask.

    Args:
      query: ``[batch..., q, heads, e]``, with any number of batch axes, or none.
      key: ``[batch..., k, heads, e]``. Its number of heads may be a divisor of that of `query`
        (grouped-query attention).
      value: ``[batch..., k, heads, width]``, with as many heads as `key`.
      bias: is added to the logits. It is an array that broadcasts to ``[batch..., heads, q, k]``;
        or a term of `synthesizer_jax.attention`, such as ``relative(...)``; or a tuple of terms.
      mask: bool or 0/1, broadcastable to ``[batch..., heads, q, k]``, where 1 means that the query
        may attend to the key. The output of a query that may attend to no key is then the mean of
        the values, as in Flax. It may also be a `Mask`, which needs no array of q × k. The output
        of such a query is then zero.
      broadcast_dropout: see Flax.
      dropout_rng: the PRNG key of the dropout.
      dropout_rate: the probability with which a weight is dropped.
      deterministic: whether dropout is off.
      dtype: the dtype of the computation. None infers it from `query`, `key` and `value`.
      precision: see Flax.
      module: a Flax module in which the weights are sown as ``attention_weights``. This creates an
        array of q × k. None sows no weights.
      force_fp32_for_softmax: see Flax. It has an effect, also on the dtype of the output, only if
        Flax's own function computes the attention.
      einsum_dot_general: see Flax.
      qk_attn_weights_einsum: see Flax.
      attn_weights_value_einsum: see Flax.
      promote_dtype: see Flax.
      is_causal: whether a query may attend only to keys up to its own position.

    Returns:
      The output ``[batch..., q, heads, width]``.

    Raises:
      ValueError: if shapes do not agree, or if there is dropout without a `dropout_rng`.
    """
    # NNX passes its own function, which takes a tuple of arrays.
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
    # If one of these is set, only Flax's own function can compute the attention.
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
        from flax import nnx  # slow to import, and already loaded if the module is an NNX module

        module.sow(nnx.Intermediate, "attention_weights", weights)
    return out


def _specs(partition: Partition, result: tuple[jax.Array, jax.Array | None]) -> PyTree:
    """Returns the layouts of the output and of the weights, ``[batch..., heads, q, k]``."""
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
    """Computes `attention_fn` for arrays of one dtype.

    Args:
      query: as in `attention_fn`.
      key: as in `attention_fn`.
      value: as in `attention_fn`.
      bias: as in `attention_fn`.
      mask: as in `attention_fn`.
      dropout_rng: the PRNG key of the dropout. None if there is no dropout.
      is_causal: as in `attention_fn`.
      flax_options: the arguments that only Flax's own function takes.
      use_flax: whether Flax's own function computes the attention.
      return_weights: whether to return the weights.
      partition: the mesh axes that divide the arrays. None uses the mesh and the logical axis rules
        that are set.

    Returns:
      The output, and the weights ``[batch..., heads, q, k]``, or None if they are not requested.
    """
    batch = query.shape[:-3]
    if partition is None:
        partition = current_partition(batch=math.prod(batch), heads=query.shape[-2])
    logits_shape = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])

    # From here on, arrays have one batch axis, and all have the heads of the query.
    query, key, value = (merge_batch_axes(x, batch) for x in (query, key, value))
    key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    if not isinstance(bias, Term | tuple | None):
        bias = _broadcast_to_logits("bias", bias, logits_shape)
    is_own_mask = isinstance(mask, Mask)

    # The two functions disagree about a query that may attend to no key: this package returns zero
    # for it, and Flax returns the mean of the values. A `Mask` promises zero, and an array the
    # mean. The output has to be corrected if the function that computes it returns the other one.
    fills_empty_rows = mask is not None and is_own_mask == use_flax
    mask = as_mask(mask, logits_shape)
    mask = dataclasses.replace(mask, causal=mask.causal or is_causal)
    pairs = None
    attending = jnp.ones((1, 1, 1, 1), bool)  # which queries may attend to a key
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
        # Flax's output for a query without keys is the mean of the values.
        empty = 0 if is_own_mask else value.mean(axis=1, keepdims=True)
        out = jnp.where(attending.swapaxes(1, 2), out, empty)  # [b, q, h, width]
    out = out.reshape(*batch, *out.shape[1:])  # [batch..., q, h, width]
    if not return_weights:
        return out, None

    # The weights are computed a second time, because the engine never has them in memory.
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
    """Returns a bias as an array of logits, because Flax's functions take no terms."""
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

    The backward pass computes each tile again, so that it does not keep the weights of all
    queries.

    Args:
      query: ``[b, q, heads, e]``.
      key: ``[b, k, heads, e]``.
      value: ``[b, k, heads, width]``.
      bias: broadcastable to ``[b, heads, q, k]``, or None.
      pairs: which query may attend to which key, bool, broadcastable to ``[b, heads, q, k]``, or
        None.
      rng: the PRNG key of the dropout. None turns dropout off.
      **options: further arguments of Flax's function.
    """
    attention: AttentionFn = functools.partial(
        nn.dot_product_attention, deterministic=rng is None, **options
    )
    length = query.shape[1]
    if length <= QUERY_TILE:
        return attention(query, key, value, bias, pairs, dropout_rng=rng)

    # `jax.lax.map` maps the first axis, so the axis of queries is moved to the front. Arrays that
    # all queries share are not mapped.
    by_query = [
        None if x is None or x.shape[axis] == 1 else jnp.moveaxis(x, axis, 0)
        for x, axis in ((query, 1), (bias, 2), (pairs, 2))
    ]

    @jax.checkpoint
    def attend_one(xs: PyTree) -> jax.Array:
        """Returns the output of one query, ``[b, 1, heads, width]``."""
        one_query, one_bias, one_pairs, one_rng = xs
        # What is mapped lacks the axis of queries. What all queries share has it, with size 1.
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
      batch: the sizes of its batch axes.
    """
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def _broadcast_to_logits(
    name: str, x: jax.typing.ArrayLike, logits_shape: tuple[int, ...]
) -> jax.Array:
    """Reshapes an array that broadcasts to the logits to ``[b or 1, heads or 1, q or 1, k or 1]``.

    b is the product of all batch axes.

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
            f"attention_fn: {name} has shape {x.shape}, but it must broadcast to [batch..., heads, "
            f"q, k], which is {logits_shape} here."
        )
    if math.prod(shape[:-3]) == 1:
        return x.reshape(1, *shape[-3:])
    batch = logits_shape[:-3]
    return merge_batch_axes(jnp.broadcast_to(x, (*batch, *shape[-3:])), batch)


def as_mask(mask: jax.typing.ArrayLike | Mask | None, logits_shape: tuple[int, ...]) -> Mask:
    """Converts a mask of Flax to a `Mask`.

    Args:
      mask: None, a `Mask`, or bool or 0/1 numbers that broadcast to `logits_shape`.
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
                "attention_fn: mask is a Mask with arrays, which have one batch axis, but the "
                f"inputs have {len(logits_shape) - 3} batch axes. Pass an array [batch..., heads "
                "or 1, q, k] as mask."
            )
        return mask
    mask = as_bool(_broadcast_to_logits("mask", mask, logits_shape))
    *batch, _, q_length, k_length = logits_shape
    return add_pattern(Mask(), mask, batch=math.prod(batch), q_length=q_length, k_length=k_length)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Raises a `ValueError`, in the words of Flax's assertions, if the shapes do not agree."""
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
