"""Attention with a separate bias for every example."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.attend import FEW_LOGITS, attend
from synthesizer_jax.attention.checks import check_mask
from synthesizer_jax.attention.fused import CHECKPOINT_NAME
from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.partition import Partition
from synthesizer_jax.attention.terms import Static, Terms, add, logits_dtype


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
    implementation: str,
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
      implementation: as in `attend`.
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

    # Each example's arrays ``[b, 1, ...]``, and those that examples share.
    leaves, treedef = jax.tree.flatten((terms, biases, values, mask))
    is_own = jax.tree.leaves(
        (
            jax.tree.map(lambda x: x.ndim == 4 and x.shape[0] > 1, (terms, biases, values)),
            jax.tree.map(lambda x: jnp.ndim(x) > 0 and x.shape[0] > 1, mask),
        )
    )
    pairs = list(zip(leaves, is_own, strict=True))
    own, shared = [x[:, None] for x, flag in pairs if flag], [x for x, flag in pairs if not flag]

    def attend_one(own: Sequence[jax.Array], shared: Sequence[jax.Array]) -> jax.Array:
        parts = {True: iter(own), False: iter(shared)}
        merged = jax.tree.unflatten(treedef, [next(parts[flag]) for flag in is_own])
        terms, biases, values, mask = merged
        terms = add(*terms, *(bias_term(x, (heads, q_length, k_length)) for x in biases))
        return attend(terms, values, mask=mask, q_length=q_length, implementation=implementation)[0]

    def attend_all(shared: list[jax.Array], *own: jax.Array) -> jax.Array:
        if q_length * k_length <= FEW_LOGITS or implementation == "reference":
            return jax.vmap(attend_one, (0, None))(own, shared)
        policy = jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
        rematerialized = jax.checkpoint(
            lambda own: attend_one(own, shared), policy=policy, prevent_cse=False
        )
        out: jax.Array = jax.lax.map(rematerialized, own)
        return out

    if partition is None:
        return attend_all(shared, *own)
    out: jax.Array = partition.map_rows(attend_all, shared, *own)
    return out
