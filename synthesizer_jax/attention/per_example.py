"""Attention with a separate bias for every example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.attention.attend import FEW_LOGITS, attend
from synthesizer_jax.attention.checks import check_mask
from synthesizer_jax.attention.fused import CHECKPOINT_NAME
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.partition import Partition
from synthesizer_jax.attention.terms import Static, Term, Terms, add, logits_dtype

_Tree = TypeVar("_Tree")


def bias_term(bias: jax.Array, shape: tuple[int, ...]) -> Static:
    """Returns a bias as a term; the gradient of a bias that is broadcast is summed in float32.

    Args:
      bias: of one example, ``[1, h or 1, q or 1, k or 1]``.
      shape: h, q and k.
    """
    if bias.shape[1:] != shape:
        bias = jnp.broadcast_to(bias.astype(logits_dtype(bias)), (1, *shape))
    return Static(bias[0])


def attend_examples(
    terms: Terms,
    biases: tuple[jax.Array, ...],
    values: jax.Array,
    *,
    mask: Mask,
    q_length: int,
    partition: Partition | None,
) -> jax.Array:
    """Computes `attend` with biases that examples do not share.

    Small examples are computed in parallel, by `jax.vmap`; large ones one after another.

    Args:
      terms: as in `attend`.
      biases: arrays ``[b, h or 1, q, k or 1]``.
      values: ``[b, k, h, e]``.
      mask: as in `attend`, without segments.
      q_length: number of queries.
      partition: as in `attend`; its batch axes divide the examples.

    Raises:
      ValueError: for packed rows.
    """
    if mask.query_segments is not None:
        raise ValueError(
            "dot_product_attention: a separate bias for every example is not possible in packed rows; "
            "give a bias that all examples share, or rows that are not packed"
        )
    batch, k_length, heads, _ = values.shape
    mask = check_mask(mask, batch=batch, heads=heads, q_length=q_length, k_length=k_length)

    def attend_one(
        terms: Terms, biases: tuple[jax.Array, ...], values: jax.Array, mask: Mask
    ) -> jax.Array:
        terms = add(*terms, *(bias_term(x, (heads, q_length, k_length)) for x in biases))
        return attend(terms, values, mask=mask, q_length=q_length)[0]

    is_batched = _batched_terms(terms), (True,) * len(biases), True, _batched_mask(mask)
    batched, shared, merge = _split_by_example((terms, biases, values, mask), is_batched)

    def attend_all(shared: list[ArrayLike], *batched: jax.Array) -> jax.Array:
        if q_length * k_length <= FEW_LOGITS:
            return jax.vmap(lambda example: attend_one(*merge(example, shared)))(batched)
        policy = jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
        rematerialized = jax.checkpoint(
            lambda example: attend_one(*merge(example, shared)), policy=policy, prevent_cse=False
        )
        out: jax.Array = jax.lax.map(rematerialized, batched)
        return out

    if partition is None:
        return attend_all(shared, *batched)
    out: jax.Array = partition.map_rows(attend_all, shared, *batched)
    return out


def _batched_terms(terms: Terms) -> tuple[Term, ...]:
    """Returns which arrays of terms have a batch axis, as trees of bools.

    Arrays ``[b or 1, n, h, r]`` may have one; arrays of other ranks have none.
    """
    return tuple(jax.tree.map(lambda x: x.ndim == 4 and x.shape[0] > 1, t) for t in terms)


def _batched_mask(mask: Mask) -> Mask:
    """Returns which arrays of a mask have a batch axis longer than 1, as a tree of bools."""
    batched: Mask = jax.tree.map(lambda x: jnp.ndim(x) > 0 and x.shape[0] > 1, mask)
    return batched


def _split_by_example(
    tree: _Tree, is_batched: object
) -> tuple[
    list[jax.Array],
    list[ArrayLike],
    Callable[[Sequence[jax.Array], Sequence[ArrayLike]], _Tree],
]:
    """Splits a tree into arrays with an entry for each example and arrays that examples share.

    Args:
      tree: of arrays.
      is_batched: the same tree of bools: whether the first axis of an array is that of the examples.

    Returns:
      The batched arrays, reshaped from ``[b, ...]`` to ``[b, 1, ...]``; the shared arrays; and a function
      of one example's arrays ``[1, ...]`` and the shared ones that returns the example's tree.
    """
    arrays, treedef = jax.tree.flatten(tree)
    flags = jax.tree.leaves(is_batched)

    def merge(example: Sequence[jax.Array], shared: Sequence[ArrayLike]) -> _Tree:
        iterators = {True: iter(example), False: iter(shared)}
        merged: _Tree = jax.tree.unflatten(treedef, [next(iterators[flag]) for flag in flags])
        return merged

    batched = [x[:, None] for x, flag in zip(arrays, flags, strict=True) if flag]
    return batched, [x for x, flag in zip(arrays, flags, strict=True) if not flag], merge
