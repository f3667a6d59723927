"""Attention with biases that every example has for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.attend import SMALL, attend
from synthesizer_jax.attention.checks import check_mask
from synthesizer_jax.attention.fused import KEPT
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.partition import Partition
from synthesizer_jax.attention.terms import Static, Terms, add, wide


def bias_term(bias: jax.Array, shape: tuple[int, ...]) -> Static:
    """A bias ``[1, h or 1, q or 1, k or 1]`` as a term; a broadcast's gradient is summed in float32.

    Args:
      bias: of one example.
      shape: h, q and k.
    """
    if bias.shape[1:] != shape:
        bias = jnp.broadcast_to(bias.astype(wide(bias)), (1, *shape))
    return Static(bias[0])


def attend_examples(
    terms: Terms,
    biases: tuple[jax.Array, ...],
    values: jax.Array,
    mask: Mask,
    q_length: int,
    partition: Partition | None,
) -> jax.Array:
    """`attend` with biases that examples do not share, one example at a time; small ones all at once.

    Args:
      terms: as in `attend`.
      biases: ``[b, h or 1, q, k or 1]`` each.
      values: ``[b, k, h, e]``.
      mask: as in `attend`, not packed.
      q_length: number of queries.
      partition: as in `attend`; its batch axes divide the examples.

    Raises:
      ValueError: for packed rows.
    """
    if mask.query_segments is not None:
        raise ValueError(
            "dot_product_attention: a bias for every example cannot be told apart in packed rows; "
            "give a bias that all examples share, or rows that are not packed"
        )
    batch, k_length, heads, _ = values.shape
    mask = check_mask(mask, batch=batch, heads=heads, q_length=q_length, k_length=k_length)

    def one(terms: Terms, biases: Any, values: jax.Array, mask: Mask) -> jax.Array:
        terms = add(*terms, *(bias_term(x, (heads, q_length, k_length)) for x in biases))
        return attend(terms, values, mask=mask, q_length=q_length)[0]

    def tokens(x: jax.Array) -> bool:  # other arrays of terms have no axis of examples
        return x.ndim == 4 and x.shape[0] > 1

    def rows(x: jax.Array) -> bool:
        return jnp.ndim(x) > 0 and x.shape[0] > 1

    divided = (*(jax.tree.map(tokens, t) for t in terms),)
    which = divided, (True,) * len(biases), True, jax.tree.map(rows, mask)
    own, shared, rebuild = _examples((terms, biases, values, mask), which)

    def run(shared: list[Any], *own: jax.Array) -> jax.Array:
        if q_length * k_length <= SMALL:
            return jax.vmap(lambda own: one(*rebuild(own, shared)))(own)
        policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        kept = jax.checkpoint(
            lambda own: one(*rebuild(own, shared)), policy=policy, prevent_cse=False
        )
        return jax.lax.map(kept, own)

    if partition is None:
        return run(shared, *own)
    return partition.rows(run, shared, *own)


def _examples(tree: Any, which: Any) -> tuple[list[jax.Array], list[Any], Callable[..., Any]]:
    """Arrays ``[b, ...]`` of a tree as ``[b, 1, ...]``, the others, and how to put one example together.

    Args:
      tree: of arrays.
      which: the same tree of bools: whether an array's first axis is that of the examples.
    """
    leaves, structure = jax.tree.flatten(tree)
    chosen = jax.tree.leaves(which)

    def rebuild(own: Sequence[jax.Array], shared: Sequence[Any]) -> Any:
        parts = {True: iter(own), False: iter(shared)}
        return jax.tree.unflatten(structure, [next(parts[c]) for c in chosen])

    own = [x[:, None] for x, c in zip(leaves, chosen, strict=True) if c]
    return own, [x for x, c in zip(leaves, chosen, strict=True) if not c], rebuild
