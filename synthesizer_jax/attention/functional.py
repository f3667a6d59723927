"""`dot_product_attention`, with the arguments of `jax.nn.dot_product_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.attention.fused_route import CHECKPOINT_NAME
from synthesizer_jax.attention.masks import Mask, add_pattern
from synthesizer_jax.attention.partition import Partition, partition_by_types, partition_of_query
from synthesizer_jax.attention.relative_table import RelativeTable
from synthesizer_jax.attention.routes import FEW_LOGITS, attend
from synthesizer_jax.attention.terms import (
    LowRank,
    Static,
    Term,
    Terms,
    add,
    logits_dtype,
    low_rank,
)

NAME = "dot_product_attention"

Bias: TypeAlias = ArrayLike | RelativeTable | Term


@partition_by_types(partition_of_query)
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: Bias | tuple[Bias, ...] | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str = "auto",
    partition: Partition | None = None,
) -> jax.Array:
    """Computes ``softmax(scale · query keyᵀ + bias) · value``, with a bias that may be learned.

    This function takes the arguments of `jax.nn.dot_product_attention`, except `return_residual`.
    If there are more than 128 · 128 logits per head, neither the forward nor the backward pass
    creates an array ``[b, n, q, k]``. If all examples share a bias, the gradient of the bias is
    summed over the examples in place. `jax.nn.dot_product_attention` first stores a separate
    gradient for every example.

    The function differs from `jax.nn.dot_product_attention` in two ways:

    * The output of a query that may attend to no key is zero, and the query contributes no
      gradient. For such queries, `jax.nn.dot_product_attention` returns the average of all values.
    * The arguments `bias` and `mask` also accept objects of this package, such as a `Term` or
      a `Mask`.

    Under `jax.vmap`, the gradient of a bias is stored for each element of the mapped axis and
    summed afterwards. To save memory, use the batch axis of `query` instead of `jax.vmap`.

    Args:
      query: ``[b, q, n, h]``, or ``[q, n, h]`` for one example.
      key: ``[b, k, m, h]`` or ``[k, m, h]``. If the number m of key heads is smaller than the
        number n of query heads, m must divide n (multi-query and grouped-query attention). Head i
        of the query then uses head ``i // (n / m)`` of the key. The function repeats the heads of
        keys and values to get n heads.
      value: ``[b, k, m, e]`` or ``[k, m, e]``. The width e of the values may differ from the width
        h of the keys.
      bias: a bias that is added to the scaled logits, or a tuple of biases. A bias may be an array,
        the result of `relative_bias` for T5's bias, or a term: `static`, `relative`, `low_rank` or
        `outer`. An array must be broadcastable to ``[b, n, q, k]``. If an array has no batch axis,
        or a batch axis of size 1, all examples share the bias. A bias ``[b, n or 1, 1, k]`` that
        all queries share, such as an additive padding mask, costs almost nothing. If an array has
        this shape, its infinities are replaced by the largest finite bfloat16. A bias
        ``[b, n or 1, q, k]`` that differs between examples and queries is processed one example at
        a time if the sequences are long.
      mask: a bool array, broadcastable to ``[b, n, q, k]``, which is True if the query may attend
        to the key. A mask of keys, ``[b or 1, 1, 1, k]``, is faster than other mask arrays. The
        argument may also be a `Mask`, which cannot be combined with the other masking arguments. If
        the rows of the `Mask` are packed, the positions of an array `bias` count from the start of
        each example.
      scale: a scalar that is multiplied with the products of queries and keys. None means
        ``h ** -0.5``.
      is_causal: whether a query may attend only to keys up to its own position.
      query_seq_lengths: ``[b]`` integers, the number of real queries of each example. All later
        queries are padding, and their outputs are zero.
      key_value_seq_lengths: ``[b]`` integers, the number of real keys of each example. All later
        keys are padding.
      local_window_size: ``(left, right)``. Query i may attend only to the keys from ``i - left`` to
        ``i + right``. A single number applies to both sides of the query.
      implementation: as in `attend`. The route ``reference`` has derivatives of every order and
        mode.
      partition: the axes of the surrounding mesh that divide examples, heads and queries, as in
        `attend`. If the mesh axes are explicit, None means that the axes are read from the types of
        query, key and value. If the mesh axes are automatic, pass a partition, because the compiler
        would otherwise gather the arguments on every device.

    Returns:
      The output ``[b, q, n, e]`` or ``[q, n, e]``, in the dtype of the inputs. Logits and softmax
      are computed in float32 or wider.

    Raises:
      ValueError: if shapes or dtypes do not agree, or if a `Mask` is given together with other
        masks.
    """
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    query, key, value = _with_batch(*arrays)
    sizes = LogitsShape(query.shape[0], query.shape[2], query.shape[1], key.shape[1])

    # The masking arguments of `jax.nn.dot_product_attention` are converted to a `Mask`.
    window: Any = local_window_size
    if window is not None:
        window = tuple(window) if isinstance(window, tuple | list) else (window, window)
    given = {"query": query_seq_lengths, "key": key_value_seq_lengths}
    lengths = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    from_arguments = Mask(
        causal=bool(is_causal),
        window=window,
        query_lengths=lengths.get("query"),
        key_lengths=lengths.get("key"),
    )
    if mask is None:
        mask = from_arguments
    elif not isinstance(mask, Mask):
        mask = _add_array(from_arguments, mask, sizes)
    elif lengths or from_arguments.has_band:
        raise ValueError(
            f"{NAME}: mask is a Mask, so is_causal, query_seq_lengths, key_value_seq_lengths and "
            "local_window_size cannot be used. Set causal, query_lengths, key_lengths and window "
            "of the Mask instead."
        )

    out = attend_dot_product(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        implementation=implementation,
        partition=partition,
    )
    return out.reshape(*arrays[0].shape[:-1], value.shape[-1])


def attend_dot_product(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: Bias | tuple[Bias, ...] | None,
    mask: Mask,
    scale: ArrayLike | None = None,
    implementation: str = "auto",
    partition: Partition | None = None,
) -> jax.Array:
    """Computes `dot_product_attention` without checks.

    All arrays must have a batch axis, and the mask must be a `Mask`.
    """
    sizes = LogitsShape(query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    terms, unshared = _biases(bias, sizes, query.dtype, offset=mask.query_offset)
    terms = add(low_rank(_scaled(query, scale), key, token_keys=True), *terms)
    options: dict[str, Any] = {
        "mask": mask,
        "implementation": implementation,
        "partition": partition,
    }

    # A `Static` term has no batch axis. A bias that differs between examples therefore needs one
    # call for each example.
    if unshared:
        return _attend_examples(terms, unshared, value, **options)
    return attend(terms, value, q_length=sizes.queries, **options)


class LogitsShape(NamedTuple):
    """The sizes of the axes of the logits ``[batch, heads, queries, keys]``."""

    batch: int
    heads: int
    queries: int
    keys: int


def _with_batch(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns query, key and value with a batch axis, after checking their shapes and dtypes."""
    shapes = [x.shape for x in arrays]
    if any(len(shape) not in (3, 4) or len(shape) != len(shapes[0]) for shape in shapes):
        raise ValueError(
            f"{NAME}: query, key and value have shapes {shapes}, but all three must be [batch, "
            "length, heads, width] or all three [length, heads, width]."
        )
    if len({x.dtype for x in arrays}) > 1 or not jnp.issubdtype(arrays[0].dtype, jnp.floating):
        raise ValueError(
            f"{NAME}: query, key and value have dtypes {[str(x.dtype) for x in arrays]}. Cast them "
            "to the same floating-point dtype."
        )

    query, key, value = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in arrays)
    batch, _, heads, width = query.shape
    key_batch, _, key_heads, key_width = key.shape
    fits = (batch, width) == (key_batch, key_width) and heads % key_heads == 0
    if not fits or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{NAME}: query, key and value have shapes {shapes}. All three need the same batch "
            "size. Query and key need the same width. Key and value need the same length and the "
            "same number of heads, which must divide the number of heads of the query."
        )
    return query, key, value


def _scaled(query: jax.Array, scale: ArrayLike | None) -> jax.Array:
    """Returns the query multiplied by the scale, rounded once to its dtype."""
    factor = jnp.asarray(query.shape[-1] ** -0.5 if scale is None else scale, logits_dtype(query))
    if factor.ndim:
        raise ValueError(f"{NAME}: scale has shape {factor.shape}, but it must be a scalar.")
    return (query.astype(factor.dtype) * factor).astype(query.dtype)


def _add_array(masks: Mask, mask: ArrayLike, sizes: LogitsShape) -> Mask:
    """Adds a bool array that broadcasts to ``[b, n, q, k]`` to a mask."""
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise ValueError(
            f"{NAME}: mask has dtype {mask.dtype}, but it must be bool. If the array is added to "
            "the logits, pass it as bias."
        )
    pattern = _broadcast_rank("mask", mask, sizes)
    return add_pattern(
        masks, pattern, batch=sizes.batch, q_length=sizes.queries, k_length=sizes.keys
    )


def _broadcast_rank(name: str, x: jax.Array, sizes: LogitsShape) -> jax.Array:
    """Returns the array with four axes, each of size 1 or of the same size as in the logits.

    Raises:
      ValueError: if the array does not broadcast to the logits.
    """
    full = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if full.ndim > 4 or any(n not in (1, size) for n, size in zip(full.shape, sizes, strict=True)):
        raise ValueError(
            f"{NAME}: {name} has shape {x.shape}, but it must broadcast to [batch, heads, queries, "
            f"keys], which is {tuple(sizes)} here."
        )
    return full


def _biases(
    bias: Bias | tuple[Bias, ...] | None,
    sizes: LogitsShape,
    dtype: jnp.dtype,
    *,
    offset: int | jax.Array,
) -> tuple[Terms, tuple[jax.Array, ...]]:
    """Converts a bias to terms.

    Returns:
      A tuple of the terms, and a tuple of arrays ``[b, n or 1, q, k or 1]`` that differ between
      examples and therefore do not fit into a term.

    Raises:
      ValueError: if a bias is boolean, or does not fit the logits.
    """
    if bias is None:
        return (), ()
    if isinstance(bias, tuple):
        parts = [_biases(part, sizes, dtype, offset=offset) for part in bias]
        all_terms: Terms = tuple(term for terms, _ in parts for term in terms)
        all_arrays = tuple(array for _, arrays in parts for array in arrays)
        return all_terms, all_arrays
    if isinstance(bias, RelativeTable):
        if bias.table.shape[0] != sizes.heads:
            raise ValueError(
                f"{NAME}: the relative bias has {bias.table.shape[0]} heads, but the query has "
                f"{sizes.heads}. If its table is [num_buckets, num_heads], pass head_axis=1 to "
                "relative_bias."
            )
        return (bias.term(sizes.queries, sizes.keys, offset),), ()
    if isinstance(bias, Term):
        return (bias,), ()

    array = jnp.asarray(bias)
    if array.dtype == bool:
        raise ValueError(f"{NAME}: bias has dtype bool. Pass a boolean array as mask instead.")
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(jnp.promote_types(dtype, jnp.float32))
    full = _broadcast_rank("bias", array, sizes)  # [b or 1, n or 1, q or 1, k or 1]

    # A bias that all examples share becomes a `Static` term. A bias that all queries share becomes
    # a `LowRank` term.
    if full.shape[0] == 1:
        return (_bias_term(full, sizes[1:]),), ()
    if full.shape[2] == 1:
        return (_key_bias(full, sizes, dtype),), ()
    return (), (full,)


def _key_bias(bias: jax.Array, sizes: LogitsShape, dtype: jnp.dtype) -> LowRank:
    """Converts a bias that all queries share to a `LowRank` term whose queries are ones.

    The fast routes compute a product of queries and keys in any case, so the bias costs only three
    more columns of queries and keys. Each number of the bias is split into a sum of three numbers
    that bfloat16 represents exactly. Matrix products do not round such numbers, even on TPUs, where
    the factors of a float32 product are rounded to bfloat16. All three numbers have the same
    cotangent, so only the first number passes its cotangent on to the bias.

    Args:
      bias: ``[b, n or 1, 1, k or 1]``.
      sizes: the sizes of the logits.
      dtype: the dtype of the query.
    """
    dtype = jnp.promote_types(dtype, jnp.bfloat16)  # the range of float16 is too small
    shape = sizes.batch, sizes.heads, sizes.keys
    bias = bias[:, :, 0].astype(jnp.promote_types(dtype, jnp.float32))
    largest = float(jnp.finfo(jnp.bfloat16).max)  # 0 · inf would be NaN
    bias = jnp.broadcast_to(jnp.clip(bias, -largest, largest), shape).transpose(0, 2, 1)
    # Larger numbers are used only to hide keys, so they do not need to be split exactly.
    moderate = jnp.abs(bias) < 1e38  # [b, k, n]
    rest = jax.lax.stop_gradient(jnp.where(moderate, bias, 0))

    # A float32 that is rounded to 7 mantissa bits is also a bfloat16. `high` holds the first 8
    # significant bits of the bias, and `middle` holds the next 8 bits. The third number holds the
    # remaining bits.
    high = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
    middle = jax.lax.reduce_precision(rest - high, exponent_bits=8, mantissa_bits=7)
    # For moderate numbers, the sum ``bias + (high - rest)`` equals `high`, and its gradient flows
    # to `bias`.
    parts = bias + (high - rest), middle, rest - high - middle
    keys = jnp.stack(parts, axis=-1).astype(dtype)  # [b, k, n, 3]
    queries = jnp.ones((1, sizes.queries, sizes.heads, 3), dtype)
    return low_rank(queries, keys, token_keys=True, token_queries=False)


def _bias_term(bias: jax.Array, shape: tuple[int, ...]) -> Static:
    """Converts a bias ``[1, h or 1, q or 1, k or 1]`` to a term for logits of shape ``(h, q, k)``.

    A bias that must be broadcast is first converted to float32, so that its gradient is summed in
    float32.
    """
    if bias.shape[1:] != shape:
        bias = jnp.broadcast_to(bias.astype(logits_dtype(bias)), (1, *shape))
    return Static(bias[0])


def _attend_examples(
    terms: Terms,
    biases: tuple[jax.Array, ...],
    values: jax.Array,
    mask: Mask,
    *,
    implementation: str,
    partition: Partition | None,
) -> jax.Array:
    """Calls `attend` separately for each example, for biases that differ between examples.

    If the examples have few logits, they are computed in parallel by `jax.vmap`. Otherwise they are
    computed one after another by `jax.lax.map`.

    Args:
      terms: the terms of the logits, without the biases.
      biases: arrays ``[b, h or 1, q, k or 1]``.
      values: ``[b, k, h, e]``.
      mask: the keys that each query may attend to.
      implementation: as in `attend`.
      partition: as in `attend`.
    """
    if mask.query_segments is not None:
        raise ValueError(
            f"{NAME}: packed rows do not support a separate bias for every example. Use a bias "
            "that all examples share, or rows that are not packed."
        )
    batch, k_length, *_ = values.shape
    q_length = biases[0].shape[2]
    heads = terms[0].num_heads
    mask = mask.broadcast_to(batch=batch, heads=heads, q_length=q_length, k_length=k_length)

    # An array with a batch axis longer than 1 differs between examples. Such an array is reshaped
    # to [b, 1, ...], so that the mapped function gets a batch of one example. All other arrays are
    # shared by the examples.
    leaves, treedef = jax.tree.flatten((terms, biases, values, mask))
    is_own = jax.tree.leaves(
        (
            jax.tree.map(lambda x: x.ndim == 4 and x.shape[0] > 1, (terms, biases, values)),
            jax.tree.map(lambda x: jnp.ndim(x) > 0 and x.shape[0] > 1, mask),
        )
    )
    pairs = list(zip(leaves, is_own, strict=True))
    unshared = [x[:, None] for x, flag in pairs if flag]
    shared = [x for x, flag in pairs if not flag]

    def attend_one(unshared: Sequence[jax.Array], shared: Sequence[jax.Array]) -> jax.Array:
        """Returns the output ``[q, h, e]`` of one example."""
        # Merge the shared and the unshared leaves in their original order.
        parts = {True: iter(unshared), False: iter(shared)}
        merged = jax.tree.unflatten(treedef, [next(parts[flag]) for flag in is_own])
        terms, biases, values, mask = merged
        terms = add(*terms, *(_bias_term(x, (heads, q_length, k_length)) for x in biases))
        return attend(terms, values, mask=mask, q_length=q_length, implementation=implementation)[0]

    def attend_all(shared: list[jax.Array], *unshared: jax.Array) -> jax.Array:
        """Returns the output of all examples, ``[b, q, h, e]``."""
        if q_length * k_length <= FEW_LOGITS or implementation == "reference":
            return jax.vmap(attend_one, (0, None))(unshared, shared)

        # Without `jax.checkpoint`, the loop would keep every intermediate result of `attend_one`
        # for all examples, such as the bias after broadcasting to the heads.
        policy = jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
        rematerialized = jax.checkpoint(
            lambda unshared: attend_one(unshared, shared), policy=policy, prevent_cse=False
        )
        out: jax.Array = jax.lax.map(rematerialized, unshared)
        return out

    if partition is None:
        return attend_all(shared, *unshared)
    out: jax.Array = partition.map_rows(attend_all, shared, *unshared)
    return out
