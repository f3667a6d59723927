"""Measures how sharp, local and static attention weights are, and how they are distributed.

Attention weights have the shape ``[batch or 1, heads, q, k]``. Each query sees consecutive keys
from the beginning of the sequence. The weights of a query need not sum to one. For example, the
weights of talking heads may even be negative. Entropies, distances and maps are therefore computed
from the absolute values of the weights, divided by the sum of the absolute values.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.distillation.fit import (
    PRIOR,
    Statistics,
    divergence,
    sums_by_distance,
    times_seen,
)

LOWEST, PER_DECADE = -6, 8
"""The smallest weight in histograms, as an exponent of 10, and the number of bins per decade."""
EDGES = np.logspace(LOWEST, 0, -LOWEST * PER_DECADE + 1)
"""The edges of the bins in the histogram of weights.

Weights below the first edge are counted in the first bin. Weights above the last edge are counted
in the last bin.
"""

NEAR, REACH = 2, 16
"""The largest distance of near keys from the query, and the largest distance in a profile."""

MOST_CELLS = 48
"""The largest number of rows and columns of a map. Cells of longer sequences are joined."""

UNIFORM = 1e-3
"""A divergence from equal weights, in nats, below which attention counts as uniform.

If attention is uniform, positions cannot explain any divergence.
"""

Measures: TypeAlias = dict[str, Any]
"""The type of dictionaries of arrays by name; see `attention_sums` and `measure`."""


class QueryView(NamedTuple):
    """Tells which queries of a batch are real, and which keys each query sees.

    Attributes:
      real: ``[batch, q]``, whether the query is real and not padding.
      seen: ``[batch, q]``, the number of keys that the query sees. A query sees the first keys of a
        sequence.
      diagonal: ``[batch, q]``, the position of the key on the diagonal. In cross-attention, the
        position may be between two keys. The position is NaN if keys have no positions.
    """

    real: jax.Array
    seen: jax.Array
    diagonal: jax.Array


def attention_sums(weights: jax.Array, logits: jax.Array | None, view: QueryView) -> Measures:
    """Returns sums over the real queries of a batch, which can be added to other batches' sums.

    Args:
      weights: the attention weights ``[batch or 1, heads, q, k]``.
      logits: the attention logits, with the same shape as the weights. The rank of the logits is
        measured for the first row. `None` means that there are no logits. With talking heads, the
        number of heads may differ between logits and weights. The logits are then not measured.
      view: which queries are real, and which keys the queries see.

    Returns:
      A dictionary of sums. All sums except ``ranked`` have one entry for each head:

      - ``statistics``: see `Statistics`.
      - ``spread``: the sum of exp(entropy) / (number of keys seen), over queries that see several
        keys.
      - ``histogram``: the number of weights in each bin, for queries that see several keys.
      - ``off_diagonal``: the distance of the largest weight from the diagonal.
      - ``cosines``: the cosine between the weights of each pair of heads, ``[heads, heads]``.
      - ``rank``: the rank of the logits in the first row, as a share of the largest possible rank.
        The rank is NaN if it was not measured.
      - ``ranked``: the number of rows whose rank was measured, which is 1.
    """
    real, seen, diagonal = view
    heads, keys = weights.shape[1], weights.shape[3]
    weights = jnp.broadcast_to(weights, (len(real), *weights.shape[1:])).astype(jnp.float32)

    # `pairs` has the shape ``[b, 1, q, k]``. An entry is true if the query is real and sees the
    # key.
    pairs = (real[..., None] & (jnp.arange(keys) < seen[..., None]))[:, None]
    sees_several = seen > 1
    weights = jnp.where(pairs, weights, 0.0)

    # `p` is the distribution of each query over keys, with the shape ``[b, heads, q, k]``.
    p = jnp.abs(weights)
    p = p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)
    entropy = -jax.scipy.special.xlogy(p, p).sum(-1)

    def sum_over_queries(x: jax.Array, counted: jax.Array) -> jax.Array:
        """Returns the sums ``[heads]`` of `x`, ``[b, heads, q]``, over the counted queries."""
        return jnp.where(counted[:, None], x, 0.0).sum((0, 2))

    log = jnp.log10(jnp.maximum(jnp.abs(weights), 1e-30))
    bins = jnp.clip((PER_DECADE * (log - LOWEST)).astype(jnp.int32), 0, len(EDGES) - 2)
    # Count in int32, because float32 cannot count beyond 2^24.
    histogram = jnp.zeros((heads, len(EDGES) - 1), jnp.int32)
    several = pairs & sees_several[:, None, :, None]
    histogram = histogram.at[jnp.arange(heads)[:, None, None], bins].add(several)

    # `queries` counts, for each position and each number of keys, the queries that see this number
    # of keys. The shape is ``[q, keys + 1]``.
    queries = (jax.nn.one_hot(seen, keys + 1) * real[..., None]).sum(0)
    # Scale the weights of each query to unit length, so that inner products are cosines.
    unit = weights / jnp.maximum(jnp.linalg.norm(weights, axis=-1, keepdims=True), 1e-30)

    rank = jnp.full((heads,), jnp.nan)
    if logits is not None and logits.shape[1] == heads:
        # Count the real queries and the seen keys of the first row. Logits of padding are set to
        # zero, because zeros do not change the rank.
        num_queries = real[0].sum()
        num_keys = jnp.max(seen[0], initial=0, where=real[0])
        block = (jnp.arange(len(real[0])) < num_queries)[:, None] & (jnp.arange(keys) < num_keys)
        number = jnp.linalg.matrix_rank(jnp.where(block, logits[0], 0.0).astype(jnp.float32))
        rank = number / jnp.maximum(jnp.minimum(num_queries, num_keys), 1)

    spread = jnp.exp(entropy) / jnp.maximum(seen, 1)[:, None]
    off_diagonal = jnp.abs(p.argmax(-1) - diagonal[:, None])
    return {
        "statistics": Statistics(p.sum(0), -entropy.sum((0, 2)), queries),
        "spread": sum_over_queries(spread, real & sees_several),
        "off_diagonal": sum_over_queries(off_diagonal, real),
        "histogram": histogram,
        "cosines": jnp.einsum("bhqk,bgqk->hg", unit, unit),
        "rank": rank,
        "ranked": jnp.ones(()),
    }


def measure(first: Measures, second: Measures | None) -> Measures:
    """Returns the measures of attention in a layer, from the sums of two halves of the examples.

    To measure how static attention is, the weights of the first half are compared with the weights
    of the second half.

    Args:
      first: the sums of the first half; see `attention_sums`.
      second: the sums of the second half. `None` means that all examples are in the first half.

    Returns:
      A dictionary of NumPy arrays and numbers. The entries ``keys`` and ``near_of_equal`` are
      numbers. All other entries are arrays with one element or row for each head:

      - ``entropy``: the mean over queries, in nats.
      - ``spread``: the mean of exp(entropy) / (number of keys seen). The spread of equal weights is
        1.
      - ``near``: the share of the weights whose distance is at most `NEAR`.
      - ``off_diagonal``: the mean distance of the largest weight from the diagonal, in positions
        (after You et al. 2020).
      - ``histogram``: the share of the weights in each bin between `EDGES`.
      - ``profile``: the share of the weights at each distance from −`REACH` to `REACH`. The first
        and the last entry include all larger distances.
      - ``similarity``: the mean cosine between the weights of each pair of heads,
        ``[heads, heads]``.
      - ``map``: the mean weights by position; see `join_cells`.
      - ``rank``: the numerical rank of the logits, as a share of the largest possible rank. A head
        of width e has a rank of at most e (Bhojanapalli et al. 2020).
      - ``static``: the share of the divergence from equal weights that positions explain. The
        smoothed mean weights of the first half serve as a prediction of the weights of the second
        half. The share is 1 if the weights are equal. The share is negative if equal weights
        predict better, and NaN if there is no second half.
      - ``keys``: the mean number of keys that a query sees.
      - ``near_of_equal``: the value that ``near`` would have for equal weights.
    """
    total = first if second is None else jax.tree.map(np.add, first, second)
    mass, negentropy, queries = total["statistics"]

    # `queries` has a column for each number of keys that a query can see.
    number = np.arange(queries.shape[1])
    counts = queries.sum()
    seen = queries.sum(0) * number
    # `pairs` is the number of pairs of a query and a key, without queries that see only one key.
    pairs = max(seen[2:].sum(), 1)
    # `equal` sums the weights that each pair would have if every query gave all its keys equal
    # weight. The shape is ``[q, k]``.
    equal = times_seen(queries / np.maximum(number, 1))

    distance = np.arange(mass.shape[2]) - np.arange(mass.shape[1])[:, None]
    near = np.abs(distance) <= NEAR
    # `offset` is the index of the bin of the profile to which each pair belongs.
    offset = (np.clip(distance, -REACH, REACH) + REACH).ravel()

    # Cut the map after the last query and the last key that occur in the examples.
    shown = np.s_[
        :,
        : np.flatnonzero(queries.sum(1)).max(initial=0) + 1,
        : max(np.flatnonzero(seen), default=1),
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
    """Returns the entry ``static`` of the result of `measure`, by head.

    A table of logits is computed from the first half of the examples, and tested on the second
    half.
    """
    mass, _, queries = first["statistics"]
    seen = times_seen(queries)
    _, q, k = mass.shape
    distance = np.arange(k) - np.arange(q)[:, None] + q - 1
    counts = np.maximum(sums_by_distance(seen), 1e-30)

    # `prior` is the mean weight at the distance of each pair, with the shape ``[heads, q, k]``. The
    # table mixes the prior with the mean weight of the pair, because the mean weight of a pair that
    # was seen only a few times is unreliable.
    prior = np.maximum(np.stack(list(map(sums_by_distance, mass))) / counts, 1e-6)[:, distance]
    table = np.log((mass + PRIOR * prior) / (seen + PRIOR))

    # Compute the divergence of the second half from the table, and from equal weights.
    left = Statistics(*map(jnp.float32, second["statistics"]))
    missed, most = (np.asarray(divergence(jnp.float32(x), left)) for x in (table, 0 * table))
    return np.where(most < UNIFORM, 1.0, 1.0 - missed / np.maximum(most, UNIFORM))


def join_cells(maps: np.ndarray) -> np.ndarray:
    """Joins neighboring cells of maps ``[heads, q, k]`` into at most `MOST_CELLS` rows and columns.

    Joined rows, which are queries, are averaged. Joined columns, which are keys, are summed,
    because the weights of a query sum to one over keys.
    """
    q, k = (np.arange(0, n, -(-n // MOST_CELLS)) for n in maps.shape[1:])
    rows = np.diff(np.append(q, maps.shape[1]))
    return np.add.reduceat(np.add.reduceat(maps, q, axis=1), k, axis=2) / rows[:, None]
