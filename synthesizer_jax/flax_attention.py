"""Attention with the arguments of Flax's `dot_product_attention`, for Flax's own layers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as linen_promote_dtype
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.ambient import partition
from synthesizer_jax.attention import Mask, Partition, Term, Terms, materialise
from synthesizer_jax.attention.explain import note_other
from synthesizer_jax.attention.functional import attend_product
from synthesizer_jax.attention.masks import parts_of
from synthesizer_jax.attention.partition import axes_along, axes_of_type, in_auto_mode

QUERY_BLOCK = 128
"""Queries that Flax's own function sees at a time where it does the computation."""

Bias: TypeAlias = jax.Array | Term | Terms | None


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
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Scaled dot-product attention that keeps no array of ``[batch, heads, q, k]``.

    The ``attention_fn`` of `flax.linen.MultiHeadDotProductAttention` and
    `flax.nnx.MultiHeadAttention`, with the arguments of both libraries' `dot_product_attention`. The
    result is theirs up to rounding; logits and softmax are always float32 or wider. A bias that all
    examples share, ``functools.partial(attention_fn, bias=table)``, gets its gradient summed over
    the batch without an array per example.

    Dropout, a `precision` and einsums of your own are computed by Flax's function itself, a block of
    128 queries at a time, recomputed in the backward pass. Up to 128 queries the weights dropped are
    exactly those that Flax drops for the same key; with more, each block makes its own draw.

    Args:
      query: ``[batch..., q, heads, e]``; any number of batch dimensions, also none.
      key: ``[batch..., k, heads, e]``, or fewer heads that divide those of `query` (grouped queries).
      value: ``[batch..., k, heads, width]``, its heads as those of `key`.
      bias: added to the logits, broadcastable to ``[batch..., heads, q, k]``; or a term, or a tuple of
        terms, of `synthesizer_jax.attention`, such as ``relative(...)``.
      mask: broadcastable to ``[batch..., heads, q, k]``, bool or 0/1: 1 lets a query see a key. A query
        that sees no key gets the mean of the values, as in Flax. Or a `Mask`, which needs no array of
        q × k; then such a query gets zeros.
      broadcast_dropout: one draw ``[q, k]`` for all examples and heads.
      dropout_rng: key of the dropout.
      dropout_rate: probability of dropping a weight.
      deterministic: no dropout.
      dtype: dtype of the computation; None: inferred from `query`, `key` and `value`.
      precision: of the matrix products, see `jax.lax.Precision`.
      module: a Flax module, in which the weights are sown as ``attention_weights``; they are then
        in memory.
      force_fp32_for_softmax: accepted; the softmax is in float32 unless Flax computes it.
      einsum_dot_general: the ``dot_general`` of both products.
      qk_attn_weights_einsum: the einsum of queries and keys.
      attn_weights_value_einsum: the einsum of weights and values.
      promote_dtype: NNX's ``((query, key, value), dtype=...) -> arrays``.
      is_causal: a query sees only keys up to its own position.

    Returns:
      ``[batch..., q, heads, width]``.

    Raises:
      ValueError: shapes that do not agree, or dropout without `dropout_rng`.
    """
    promote = promote_dtype or (lambda xs, dtype: linen_promote_dtype(*xs, dtype=dtype))
    query, key, value = promote((query, key, value), dtype=dtype)
    _check_shapes(query, key, value)
    dropping = dropout_rate > 0.0 and not deterministic
    if dropping and dropout_rng is None:
        raise ValueError("attention_fn: dropout needs dropout_rng; give it, or deterministic=True")
    einsums = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    options: dict[str, Any] = {
        "broadcast_dropout": broadcast_dropout,
        "dropout_rate": dropout_rate,
        "precision": precision,
        "force_fp32_for_softmax": force_fp32_for_softmax,
    }
    call: Any = functools.partial(
        _attention, **options, is_causal=is_causal, with_weights=module is not None, einsums=einsums
    )
    arrays = (query, key, value, bias, mask, dropout_rng if dropping else None)
    if axes_of_type(AxisType.Explicit):
        out, weights = _in_auto_mode(call, arrays)
    else:
        number = math.prod(query.shape[:-3])
        out, weights = call(*arrays, divided=partition(batch=number, heads=query.shape[-2]))
    if weights is not None:
        _sow(module, weights)
    return out


def _in_auto_mode(
    call: Callable[..., Any], arrays: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """`_attention` where mesh axes are explicit, divided as the type of the queries says."""
    query = arrays[0]
    more = query.ndim - 3  # batch dimensions
    batch = axes_along(query, 0) if more else ()
    sequence, heads = axes_along(query, -3), axes_along(query, -2)
    first = [batch, *[None] * (more - 1)] if more else []
    specs = (
        PartitionSpec(*first, sequence, heads),
        PartitionSpec(*first, heads, sequence),
    )
    run = functools.partial(call, divided=Partition(batch, heads, sequence))
    return in_auto_mode(run, lambda found: (specs[0], None if found[1] is None else specs[1]))(
        *arrays
    )


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Bias,
    mask: jax.Array | Mask | None,
    dropout_rng: jax.Array | None,
    *,
    broadcast_dropout: bool,
    dropout_rate: float,
    precision: Any,
    force_fp32_for_softmax: bool,
    is_causal: bool,
    with_weights: bool,
    einsums: dict[str, Any],
    divided: Partition | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`attention_fn` of arrays of one dtype: the output, and the weights where they are asked for."""
    batch = query.shape[:-3]
    full = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    query, key, value = (flat(x, batch) for x in (query, key, value))
    key, value = (_repeat_heads(x, query.shape[2]) for x in (key, value))
    bias = flat_logits("bias", bias, full) if hasattr(bias, "shape") else bias
    seen = as_mask(mask, full)
    seen = dataclasses.replace(seen, causal=seen.causal or is_causal)
    options: Any = {"precision": precision, "force_fp32_for_softmax": force_fp32_for_softmax}
    weights = None
    if with_weights:
        weights = nn.dot_product_attention_weights(
            *_arrays(query, key, bias, seen),
            einsum=einsums["qk_attn_weights_einsum"],
            einsum_dot_general=einsums["einsum_dot_general"],
            **options,
        )
        weights = _without_empty_rows(weights, seen) if isinstance(mask, Mask) else weights
        weights = weights.reshape(*batch, *weights.shape[1:])
    if all(x is None for x in (dropout_rng, precision, *einsums.values())):
        out = attend_product(query, key, value, bias, seen, partition=divided)
        if mask is not None and not isinstance(mask, Mask):
            out = _without_keys(out, key, seen, value.mean(axis=1, keepdims=True))
    else:
        options |= {"dropout_rate": dropout_rate, "broadcast_dropout": broadcast_dropout}
        run: Any = functools.partial(_in_query_blocks, **options, **einsums)
        given = query, key, value, bias, seen, dropout_rng
        note_other("flax", f"einsums, {QUERY_BLOCK} queries at a time", run, *given)
        out = run(*given)
        if isinstance(mask, Mask):
            out = _without_keys(out, key, seen, jnp.zeros((), out.dtype))
    return out.reshape(*batch, *out.shape[1:]), weights


def flat(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """The array ``[batch..., ...]`` with all batch dimensions in one."""
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def flat_logits(name: str, x: Any, full: tuple[int, ...]) -> jax.Array:
    """An array that broadcasts to logits, with one batch axis.

    Args:
      name: of the argument, for the error.
      x: broadcastable to `full`.
      full: ``(batch..., heads, q, k)``.

    Returns:
      ``[b or 1, heads or 1, q or 1, k or 1]``; the batch axis is 1 where all examples share it.

    Raises:
      ValueError: `x` does not broadcast to `full`.
    """
    x = jnp.asarray(x)
    shape = (1,) * (len(full) - x.ndim) + x.shape
    if len(shape) != len(full) or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ValueError(
            f"{name} has shape {x.shape}, which does not broadcast to [batch..., heads, q, k]={full}"
        )
    if math.prod(shape[:-3]) == 1:
        return x.reshape(1, *shape[-3:])
    return flat(jnp.broadcast_to(x, (*full[:-3], *shape[-3:])), full[:-3])


def as_mask(mask: Any, full: tuple[int, ...]) -> Mask:
    """The `Mask` of an array.

    Args:
      mask: None, a `Mask`, or bool or 0/1 numbers, broadcastable to `full`.
      full: ``(batch..., heads, q, k)``.

    Raises:
      ValueError: an array that does not broadcast to `full`, or a `Mask` with arrays where there is
        not exactly one batch dimension.
    """
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        if len(full) != 4 and jax.tree.leaves(mask):
            raise ValueError(
                f"mask: a Mask with arrays has one batch dimension, but the inputs have "
                f"{len(full) - 3}; give a mask array [batch..., heads or 1, q, k]"
            )
        return mask
    mask = flat_logits("mask", mask, full).astype(bool)
    batch, (q_length, k_length) = math.prod(full[:-3]), full[-2:]
    fields: dict[str, Any] = parts_of(mask, batch=batch, q_length=q_length, k_length=k_length)
    return Mask(**fields)


def _without_keys(out: jax.Array, key: jax.Array, mask: Mask, other: jax.Array) -> jax.Array:
    """The output ``[b, q, heads, e]`` with another one for queries that see no key."""
    pairs = mask.pairs(out.shape[1], key.shape[1])
    if pairs is None:
        return out
    return jnp.where(pairs.any(-1, keepdims=True).swapaxes(1, 2), out, other)


def _without_empty_rows(weights: jax.Array, mask: Mask) -> jax.Array:
    """Flax's weights ``[b, heads, q, k]`` with zeros for queries that see no key."""
    pairs = mask.pairs(*weights.shape[2:])
    return weights if pairs is None else jnp.where(pairs.any(-1, keepdims=True), weights, 0)


def _in_query_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Bias,
    mask: Mask,
    rng: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """Flax's own function, a block of queries at a time; without `rng` nothing is dropped."""
    run: Any = functools.partial(nn.dot_product_attention, deterministic=rng is None, **options)
    query, key, logits, pairs = _arrays(query, key, bias, mask)
    length = query.shape[1]
    if length <= QUERY_BLOCK:
        return run(query, key, value, logits, pairs, dropout_rng=rng)
    count = -(-length // QUERY_BLOCK)

    def padded(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None or x.shape[axis] == 1:
            return x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * QUERY_BLOCK - length)
        return jnp.pad(x, widths)

    queries, logits, pairs = padded(query, 1), padded(logits, 2), padded(pairs, 2)

    @jax.checkpoint
    def block(i: jax.Array, rng: jax.Array | None) -> jax.Array:
        def cut(x: jax.Array | None, axis: int) -> jax.Array | None:
            if x is None or x.shape[axis] == 1:
                return x
            return jax.lax.dynamic_slice_in_dim(x, i * QUERY_BLOCK, QUERY_BLOCK, axis)

        return run(cut(queries, 1), key, value, cut(logits, 2), cut(pairs, 2), dropout_rng=rng)

    rngs = None if rng is None else jax.random.split(rng, count)
    out = jax.lax.map(lambda x: block(*x), (jnp.arange(count), rngs))
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :length]


def _arrays(
    query: jax.Array, key: jax.Array, bias: Bias, mask: Mask
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Query, key, and bias and mask as the arrays that Flax takes."""
    q_length, k_length = query.shape[1], key.shape[1]
    if bias is not None and not isinstance(bias, jax.Array):
        terms = bias if isinstance(bias, tuple) else (bias,)
        bias = materialise(terms, q_length=q_length, k_length=k_length)
    return query, key, bias, mask.pairs(q_length, k_length)


def _repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    """Keys or values ``[b, k, groups, e]`` for every head of the queries."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def _sow(module: Any, weights: jax.Array) -> None:
    if isinstance(module, nn.Module):
        module.sow("intermediates", "attention_weights", weights)
        return
    from flax import nnx  # takes time to import and is loaded where such a module exists

    module.sow(nnx.Intermediate, "attention_weights", weights)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape} and value {value.shape}"
    if not query.ndim == key.ndim == value.ndim >= 3:
        raise ValueError(f"attention_fn: {shapes} must be [batch..., length, heads, width] alike")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"attention_fn: {shapes} must have the same batch dimensions")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"attention_fn: {shapes}; query and key must have the same width")
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(f"attention_fn: {shapes}; key and value need the same length and heads")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(f"attention_fn: {shapes}; the heads of key must divide those of query")
