"""Measures of attention weights: how sharp, local and static they are, and how they are distributed.

Weights are ``[batch or 1, heads, q, k]``, and a query sees the first of the keys. Where weights do not add
up to one, as those of talking heads, which may be negative, entropies, distances and maps are those of
their absolute values divided by the sum of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.distillation.fit import PRIOR, Statistics, divergence, sums_by_distance, times_seen

LOWEST, PER_DECADE = -6, 8
EDGES = np.logspace(LOWEST, 0, -LOWEST * PER_DECADE + 1)
"""The edges of the histogram of weights; smaller and larger ones are counted at its ends."""

NEAR, REACH = 2, 16
"""The distance of keys that are called near, and the largest of a profile."""

MOST_CELLS = 48
"""Most rows and columns of a map; those of longer sequences are joined."""

UNIFORM = 1e-3
"""Divergence from equal weights, in nats, below which there is nothing to explain."""

Measures: TypeAlias = dict[str, Any]
"""Arrays by name, see `attention_sums` and `measure`."""


class Rows(NamedTuple):
    """Which queries are real, how many of the first keys they see, and which key is on the diagonal.

    All are ``[batch, q]``; in cross-attention the diagonal is at fractions of keys, and NaN if keys have no
    positions.
    """

    real: jax.Array
    seen: jax.Array
    diagonal: jax.Array


def attention_sums(weights: jax.Array, logits: jax.Array | None, rows: Rows) -> Measures:
    """Returns sums over the real queries of a batch, which can be added to those of others.

    Args:
      weights: ``[batch or 1, heads, q, k]``.
      logits: of the same shape, whose rank is measured for the first row; None: there are none. Those of
        other numbers of heads, as talking heads may have, are not measured.
      rows: which queries count.

    Returns:
      ``statistics``, see `Statistics`. By head, of queries that see several keys: ``spread``,
      exp(entropy) / keys seen, and the ``histogram`` of weights over pairs. ``off_diagonal``, the distance
      of the largest weight from the diagonal; ``cosines`` of the weights of two heads, ``[heads, heads]``;
      ``rank`` of the first row; ``ranked``: 1.
    """
    real, seen, diagonal = rows
    heads, keys = weights.shape[1], weights.shape[3]
    weights = jnp.broadcast_to(weights, (len(real), *weights.shape[1:])).astype(jnp.float32)
    pairs = (real[..., None] & (jnp.arange(keys) < seen[..., None]))[:, None]
    several = pairs & (seen > 1)[:, None, :, None]
    weights = jnp.where(pairs, weights, 0.0)
    p = jnp.abs(weights)
    p = p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)
    entropy = -jax.scipy.special.xlogy(p, p).sum(-1)
    of_queries = lambda x, counted: jnp.where(counted[:, None], x, 0.0).sum((0, 2))
    log = jnp.log10(jnp.maximum(jnp.abs(weights), 1e-30))
    bins = jnp.clip((PER_DECADE * (log - LOWEST)).astype(jnp.int32), 0, len(EDGES) - 2)
    histogram = jnp.zeros((heads, len(EDGES) - 1), jnp.int32)  # float32 stops at 2^24
    unit = weights / jnp.maximum(jnp.linalg.norm(weights, axis=-1, keepdims=True), 1e-30)
    queries = (jax.nn.one_hot(seen, keys + 1) * real[..., None]).sum(0)
    rank = jnp.full((heads,), jnp.nan)
    if logits is not None and logits.shape[1] == heads:
        # What is not real is zero, which adds nothing to the rank.
        size = real[0].sum(), jnp.max(seen[0], initial=0, where=real[0])
        block = (jnp.arange(len(real[0])) < size[0])[:, None] & (jnp.arange(keys) < size[1])
        number = jnp.linalg.matrix_rank(jnp.where(block, logits[0], 0.0).astype(jnp.float32))
        rank = number / jnp.maximum(jnp.minimum(*size), 1)
    return {
        "statistics": Statistics(p.sum(0), -entropy.sum((0, 2)), queries),
        "spread": of_queries(jnp.exp(entropy) / jnp.maximum(seen, 1)[:, None], real & (seen > 1)),
        "off_diagonal": of_queries(jnp.abs(p.argmax(-1) - diagonal[:, None]), real),
        "histogram": histogram.at[jnp.arange(heads)[:, None, None], bins].add(several),
        "cosines": jnp.einsum("bhqk,bgqk->hg", unit, unit),
        "rank": rank,
        "ranked": jnp.ones(()),
    }


def measure(first: Measures, second: Measures | None) -> Measures:
    """Returns the measures of two halves of the examples from their sums, as NumPy arrays; None: no half.

    Returns:
      By head: ``entropy``, mean over queries in nats; ``spread``, 1 is equal weights; ``near``, the share
      of weights at a distance of up to `NEAR`; ``off_diagonal``, in positions (after You et al. 2020);
      ``histogram`` of weights, shares between `EDGES`; ``profile``, shares at the
      distances −`REACH` to `REACH`, the ends with all beyond; ``similarity``, mean cosines; ``map``, mean
      weights by position, see `join_cells`; ``rank``, the numerical rank of the logits as a share of the
      largest possible (a head of width e has at most e; Bhojanapalli et al. 2020). ``static`` is the share
      of the divergence from equal weights that positions explain: smoothed mean weights of one half
      describe the other. It is 1 where weights are equal, below 0 where equal weights are better, and NaN
      without a second half. Numbers: ``keys``, the mean seen by a query, and ``near_of_equal``, of equal
      weights.
    """
    total = first if second is None else jax.tree.map(np.add, first, second)
    mass, negentropy, queries = total["statistics"]
    number = np.arange(queries.shape[1])
    counts, seen = queries.sum(), queries.sum(0) * number
    pairs = max(seen[2:].sum(), 1)
    equal = times_seen(queries / np.maximum(number, 1))
    distance = np.arange(mass.shape[2]) - np.arange(mass.shape[1])[:, None]
    near = np.abs(distance) <= NEAR
    offset = (np.clip(distance, -REACH, REACH) + REACH).ravel()
    shown = np.s_[
        :, : np.flatnonzero(queries.sum(1)).max(initial=0) + 1, : max(np.flatnonzero(seen), default=1)
    ]
    return {
        "entropy": -negentropy / counts,
        "spread": total["spread"] / max(queries[:, 2:].sum(), 1),
        "near": (mass * near).sum((1, 2)) / counts,
        "off_diagonal": total["off_diagonal"] / counts,
        "static": np.nan * negentropy if second is None else _explained(first, second),
        "histogram": total["histogram"] / pairs,
        "profile": np.stack([np.bincount(offset, x.ravel(), 2 * REACH + 1) for x in mass]) / counts,
        "similarity": total["cosines"] / counts,
        "map": join_cells((mass / np.maximum(queries.sum(1), 1)[:, None])[shown]),
        "rank": total["rank"] / total["ranked"],
        "keys": float(seen.sum() / counts),
        "near_of_equal": float((equal * near).sum() / counts),
    }


def _explained(first: Measures, second: Measures) -> np.ndarray:
    """Returns ``static`` of `measure`: a table of the first half, measured on the second."""
    mass, _, queries = first["statistics"]
    seen = times_seen(queries)
    _, q, k = mass.shape
    distance = np.arange(k) - np.arange(q)[:, None] + q - 1
    counts = np.maximum(sums_by_distance(seen), 1e-30)
    prior = np.maximum(np.stack(list(map(sums_by_distance, mass))) / counts, 1e-6)[:, distance]
    table = np.log((mass + PRIOR * prior) / (seen + PRIOR))
    left = Statistics(*map(jnp.float32, second["statistics"]))
    missed, most = (np.asarray(divergence(jnp.float32(x), left)) for x in (table, 0 * table))
    return np.where(most < UNIFORM, 1.0, 1.0 - missed / np.maximum(most, UNIFORM))


def join_cells(maps: np.ndarray) -> np.ndarray:
    """Joins queries (means) and keys (sums) of ``[heads, q, k]`` to at most `MOST_CELLS` of each."""
    q, k = (np.arange(0, n, -(-n // MOST_CELLS)) for n in maps.shape[1:])
    rows = np.diff(np.append(q, maps.shape[1]))
    return np.add.reduceat(np.add.reduceat(maps, q, axis=1), k, axis=2) / rows[:, None]
