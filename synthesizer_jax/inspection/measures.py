"""Measures of attention weights: how sharp, local and static they are, how they are distributed.

Weights are ``[batch or 1, heads, q, k]``, and a query sees the first of the keys. Where weights do not add
up to one, as those of talking heads, which may be negative, entropy, distances and maps are those of their
absolute values divided by the sum of these.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.distillation.fit import PRIOR, Statistics, divergence

LOWEST, PER_DECADE = -6, 8
EDGES = np.logspace(LOWEST, 0, -LOWEST * PER_DECADE + 1)
"""The edges of the histogram of weights; smaller and larger ones are counted at its ends."""

NEAR = 2
"""Distance of the keys that are called near."""

REACH = 16
"""The largest distance of a profile."""

MOST_CELLS = 48
"""Most rows and columns of a map; those of longer sequences are joined."""

UNIFORM = 1e-3
"""Divergence from equal weights, in nats, below which there is nothing to explain."""


class Rows(NamedTuple):
    """Which queries of a batch are real and what they see.

    Attributes:
      real: ``[batch, q]`` bool.
      seen: ``[batch, q]`` how many of the first keys.
      diagonal: ``[batch, q]`` the key at the same place of its sequence, a fraction in cross-attention.
    """

    real: jax.Array
    seen: jax.Array
    diagonal: jax.Array


class Sums(NamedTuple):
    """Sums over the real queries of batches.

    Attributes:
      mass: ``[heads, q, k]`` weights.
      negentropy: ``[heads]`` Σ p log p, in nats.
      queries: ``[q, k + 1]`` queries, by position and by how many keys they see.
      spread: ``[heads]`` exp(entropy) / keys seen, of queries that see several.
      peak: ``[heads]`` the largest weight.
      off_diagonal: ``[heads]`` distance of the largest weight from the diagonal.
      powers: ``[heads, 4]`` the first four powers of weights − center, over the pairs of queries that see
        several keys.
      histogram: ``[heads, bins]`` these pairs, by their weights.
      cosines: ``[heads, heads]`` cosines of the weights of two heads.
    """

    mass: jax.Array
    negentropy: jax.Array
    queries: jax.Array
    spread: jax.Array
    peak: jax.Array
    off_diagonal: jax.Array
    powers: jax.Array
    histogram: jax.Array
    cosines: jax.Array


def attention_sums(weights: jax.Array, rows: Rows, *, center: jax.Array | float) -> Sums:
    """Returns the sums of a batch.

    Args:
      weights: ``[batch or 1, heads, q, k]``.
      rows: which queries count.
      center: a number near the mean weight, about which powers are precise.
    """
    real, seen, diagonal = rows
    heads, keys = weights.shape[1], weights.shape[3]
    weights = jnp.broadcast_to(weights, (len(real), *weights.shape[1:])).astype(jnp.float32)
    pairs = (real[..., None] & (jnp.arange(keys) < seen[..., None]))[:, None]
    weights = jnp.where(pairs, weights, 0.0)
    p = jnp.abs(weights)
    p = p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)
    entropy = -jax.scipy.special.xlogy(p, p).sum(-1)
    of_queries = lambda x, counts: jnp.where(counts[:, None], x, 0.0).sum((0, 2))
    log = jnp.log10(jnp.maximum(jnp.abs(weights), 1e-30))
    bins = jnp.clip((PER_DECADE * (log - LOWEST)).astype(jnp.int32), 0, len(EDGES) - 2)
    empty = jnp.zeros((heads, len(EDGES) - 1))
    several = pairs & (seen > 1)[:, None, :, None]
    off = jnp.where(several, weights - center, 0.0)
    unit = weights / jnp.maximum(jnp.linalg.norm(weights, axis=-1, keepdims=True), 1e-30)
    return Sums(
        mass=p.sum(0),
        negentropy=-entropy.sum((0, 2)),
        queries=(jax.nn.one_hot(seen, keys + 1) * real[..., None]).sum(0),
        spread=of_queries(jnp.exp(entropy) / jnp.maximum(seen, 1)[:, None], real & (seen > 1)),
        peak=of_queries(p.max(-1), real),
        off_diagonal=of_queries(jnp.abs(p.argmax(-1) - diagonal[:, None]), real),
        powers=jnp.stack([(off**n).sum((0, 2, 3)) for n in range(1, 5)], axis=1),
        histogram=empty.at[jnp.arange(heads)[:, None, None], bins].add(several),
        cosines=jnp.einsum("bhqk,bgqk->hg", unit, unit),
    )


@dataclasses.dataclass(frozen=True)
class Measures:
    """What is known of the attention of a layer; arrays ``[heads, ...]``.

    Attributes:
      entropy: mean over queries, in nats.
      spread: exp(entropy) as a share of the keys seen, of queries that see several: 1 is equal weights.
      peak: mean largest weight.
      near: share of the weights of keys at a distance of up to `NEAR`.
      distance: mean distance of a key from its query, weighted.
      off_diagonal: mean distance of the largest weight from the diagonal (after You et al. 2020).
      static: the share of the divergence from equal weights that positions explain: mean weights of one
        half of the examples, smoothed, describe the other half. 1 where weights are equal, below 0 where
        equal weights are the better description; NaN for a single batch.
      mean: of the weights of pairs seen, where there are several keys; so are `deviation`, `skewness` and
        excess `kurtosis`.
      histogram: shares of these pairs between `EDGES`.
      profile: share of the weights at the distances −`REACH` to `REACH`; the ends hold all beyond.
      similarity: ``[heads, heads]`` mean cosine of the weights of two heads.
      map: ``[heads, q, k]`` mean weights by position, joined to `MOST_CELLS` cells.
      keys: mean number of keys seen.
      near_of_equal: `near` of equal weights.
    """

    entropy: np.ndarray
    spread: np.ndarray
    peak: np.ndarray
    near: np.ndarray
    distance: np.ndarray
    off_diagonal: np.ndarray
    static: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    skewness: np.ndarray
    kurtosis: np.ndarray
    histogram: np.ndarray
    profile: np.ndarray
    similarity: np.ndarray
    map: np.ndarray
    keys: float
    near_of_equal: float


def measure(first: Sums, second: Sums | None, *, center: float) -> Measures:
    """Returns the measures of two halves of the examples, as `attention_sums` gives them in NumPy arrays.

    Args:
      first: sums of one half.
      second: of the other; None: there is none.
      center: that of the sums.
    """
    total = first if second is None else Sums(*map(np.add, first, second))
    counts = total.queries.sum()
    number = np.arange(total.queries.shape[1])
    seen = total.queries.sum(0) * number
    pairs = max(seen[2:].sum(), 1)
    equal = _times_seen(total.queries / np.maximum(number, 1))
    distance = np.arange(equal.shape[1]) - np.arange(len(equal))[:, None]
    near, far = np.abs(distance) <= NEAR, np.abs(distance)
    offset = np.clip(distance, -REACH, REACH) + REACH
    profile = np.stack([np.bincount(offset.ravel(), m.ravel(), 2 * REACH + 1) for m in total.mass])
    mean, moments = _moments(total.powers / pairs)
    deviation = np.sqrt(moments[0])
    safe = np.maximum(deviation, 1e-30)
    shown = np.s_[: np.flatnonzero(total.queries.sum(1)).max(initial=0) + 1]
    last = np.flatnonzero(total.queries.sum(0)).max(initial=1)
    rows = total.queries.sum(1)[:, None]
    return Measures(
        entropy=-total.negentropy / counts,
        spread=total.spread / np.maximum(total.queries[:, 2:].sum(), 1),
        peak=total.peak / counts,
        near=(total.mass * near).sum((1, 2)) / counts,
        distance=(total.mass * far).sum((1, 2)) / counts,
        off_diagonal=total.off_diagonal / counts,
        static=np.full(len(mean), np.nan) if second is None else _explained(first, second),
        mean=center + mean,
        deviation=deviation,
        skewness=moments[1] / safe**3,
        kurtosis=moments[2] / safe**4 - 3.0,
        histogram=total.histogram / pairs,
        profile=profile / counts,
        similarity=total.cosines / counts,
        map=join_cells((total.mass / np.maximum(rows, 1))[:, shown, :last]),
        keys=float(seen.sum() / counts),
        near_of_equal=float((equal * near).sum() / counts),
    )


def _times_seen(queries: np.ndarray) -> np.ndarray:
    """Returns ``[q, k]``, what is counted in ``[q, k + 1]`` of the queries that see a key."""
    return np.cumsum(queries[:, ::-1], axis=1)[:, ::-1][:, 1:]


def _moments(powers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean ``[heads]`` and second to fourth central moments of mean powers ``[heads, 4]``."""
    m, p2, p3, p4 = powers.T
    third = p3 - 3 * m * p2 + 2 * m**3
    fourth = p4 - 4 * m * p3 + 6 * m**2 * p2 - 3 * m**4
    return m, np.stack([np.maximum(p2 - m**2, 0.0), third, fourth])


def _explained(first: Sums, second: Sums) -> np.ndarray:
    """Returns `Measures.static`: a table of the first half, measured on the second."""
    seen = _times_seen(first.queries)
    heads, q, k = first.mass.shape
    offset = (np.arange(k) - np.arange(q)[:, None] + q - 1).ravel()
    sums = lambda x: np.bincount(offset, x.ravel(), q + k - 1)
    by_distance = np.stack([sums(mass) for mass in first.mass]) / np.maximum(sums(seen), 1e-30)
    prior = np.maximum(by_distance, 1e-6)[:, offset].reshape(heads, q, k)
    table = np.log((first.mass + PRIOR * prior) / (seen + PRIOR))
    left = Statistics(*map(jnp.float32, (second.mass, second.negentropy, second.queries)))
    missed, most = (
        np.asarray(divergence(x, left)) for x in (jnp.float32(table), jnp.zeros((heads, q, k)))
    )
    return np.where(most < UNIFORM, 1.0, 1.0 - missed / np.maximum(most, UNIFORM))


def join_cells(maps: np.ndarray) -> np.ndarray:
    """Joins queries (means) and keys (sums) of ``[heads, q, k]`` to at most `MOST_CELLS` of each."""
    q, k = (np.arange(0, n, -(-n // MOST_CELLS)) for n in maps.shape[1:])
    rows = np.diff(np.append(q, maps.shape[1]))
    joined = np.add.reduceat(np.add.reduceat(maps, q, axis=1), k, axis=2)
    return joined / rows[:, None]


def logit_ranks(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns two ranks of matrices of logits ``[..., q, k]``, as shares of the smaller size.

    The first is the numerical rank, which a head of width e limits to e (Bhojanapalli et al. 2020). The
    second is the effective rank: exp of the entropy of the singular values (Roy and Vetterli 2007).
    """
    values = np.linalg.svd(np.asarray(logits, np.float32), compute_uv=False)
    largest = values.max(-1, keepdims=True)
    limit = largest * max(logits.shape[-2:]) * np.finfo(np.float32).eps
    p = values / np.maximum(values.sum(-1, keepdims=True), 1e-30)
    entropy = -(p * np.log(np.maximum(p, 1e-30))).sum(-1)
    size = values.shape[-1]
    return (values > limit).sum(-1) / size, np.where(
        largest[..., 0] > 0, np.exp(entropy), 0.0
    ) / size
