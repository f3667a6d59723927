"""Attention and its gradients in NumPy with float64.

Some weights are computed one at a time, because loops are easier to read here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention import LowRank, Mask, Outer, Relative, Static, Terms


@dataclasses.dataclass
class Answer:
    """The results of attention.

    The output has the shape ``[b, q, h, e]``. The log sums have the shape ``[b, q, h]``, and are
    minus infinity for queries without keys. The other fields are the attention weights and the
    cotangents of terms, values and sinks.
    """

    out: np.ndarray
    log_sums: np.ndarray
    weights: np.ndarray
    terms: tuple[dict[str, np.ndarray], ...]
    values: np.ndarray
    sinks: np.ndarray


def attention(
    terms: Terms,
    values: jax.Array,
    mask: Mask,
    g: jax.Array,
    *,
    keep: np.ndarray | None = None,
    soft_cap: float = np.inf,
    sinks: np.ndarray | None = None,
    g_log_sums: np.ndarray | None = None,
) -> Answer:
    """Computes attention and its gradients for a cotangent `g` ``[b, q, h, e]`` of the output.

    `keep` ``[b, k, h]`` multiplies the values, as dropout does. `g_log_sums` ``[b, q, h]`` is the
    cotangent of the log sums.
    """
    v, g = np.asarray(values, np.float64), np.asarray(g, np.float64)
    (b, k, h, _) = v.shape
    q = g.shape[1]
    v = v if keep is None else v * keep[..., None]
    rows, columns = places(mask, b, q, k)
    distances = columns[:, None, :] - rows[:, :, None] - int(mask.query_offset)
    looks = rows, columns, distances
    logits = sum(term_logits(term, *looks) for term in terms)
    slope = 1.0
    if soft_cap < np.inf:
        slope = 1 - np.tanh(logits / soft_cap) ** 2
        logits = soft_cap * np.tanh(logits / soft_cap)
    seen = may_see(mask, b, h, q, k)
    sinks = np.full(h, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    column = np.broadcast_to(sinks[:, None, None], (b, h, q, 1))  # a sink acts like one more key
    logits = np.concatenate([np.broadcast_to(logits, seen.shape), column], axis=-1)
    seen = np.concatenate([seen, seen.any(-1, keepdims=True)], axis=-1)
    weights = masked_softmax(logits, seen)
    log_sums = np.logaddexp.reduce(logits, axis=-1, where=seen, initial=-np.inf)  # [b, h, q]
    weights, lost = weights[..., :-1], weights[..., -1]
    dweights = np.einsum("bqhe,bkhe->bhqk", g, v)
    mean = np.sum(weights * dweights, axis=-1, keepdims=True)
    if g_log_sums is not None:
        # The derivative of a log sum with respect to the logits is the softmax.
        mean = mean - np.asarray(g_log_sums, np.float64).swapaxes(1, 2)[..., None]
    dlogits = weights * (dweights - mean) * slope
    dvalues = np.einsum("bhqk,bqhe->bkhe", weights, g)
    return Answer(
        out=np.einsum("bhqk,bkhe->bqhe", weights, v),
        log_sums=log_sums.swapaxes(1, 2),
        weights=weights,
        terms=tuple(term_gradient(term, dlogits, *looks) for term in terms),
        values=dvalues if keep is None else dvalues * keep[..., None],
        sinks=-np.sum(lost * mean[..., 0], axis=(0, 2)),
    )


def masked_softmax(logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Returns the softmax over the keys that a query may see, or zeros if it sees no key."""
    logits, seen = np.broadcast_arrays(logits, seen)
    out = np.zeros(seen.shape)
    for index in np.ndindex(*seen.shape[:-1]):
        if seen[index].any():
            row = logits[index][seen[index]]
            e = np.exp(row - row.max())
            out[index][seen[index]] = e / e.sum()
    return out


def may_see(mask: Mask, b: int, h: int, q: int, k: int) -> np.ndarray:
    """Returns which queries may attend to which keys according to `Mask`.

    The result is bool ``[b, h, q, k]``.
    """
    m = jax.tree.map(np.asarray, mask)
    rows, columns = places(mask, b, q, k)
    both = isinstance(m.window, tuple)
    before, after = m.window if both else (m.window and m.window - 1, None)
    seen = np.zeros((b, h, q, k), bool)
    for i, head, row, key in np.ndindex(b, h, q, k):
        ahead = columns[i, key] - rows[i, row] - int(m.query_offset)
        near = not m.causal or ahead <= 0
        near &= before is None or ahead >= -before
        near &= after is None or ahead <= after
        near |= m.prefix_lengths is not None and key < m.prefix_lengths[i]
        rules = [near]
        if m.key_lengths is not None:
            rules.append(key < m.key_lengths[i])
        if m.query_lengths is not None:
            rules.append(row < m.query_lengths[i])
        if m.key_valid is not None:
            rules.append(m.key_valid[i, key])
        if m.query_valid is not None:
            rules.append(m.query_valid[i, row])
        if m.key_segments is not None:
            rules.append(m.query_segments[i, row] == m.key_segments[i, key] > 0)
        if m.allowed is not None:
            allowed = np.broadcast_to(m.allowed, seen.shape)
            rules.append(allowed[i, head, row, key])
        seen[i, head, row, key] = all(rules)
    return seen


def places(mask: Mask, b: int, q: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of queries ``[b, q]`` and keys ``[b, k]`` for lookups in parameters."""

    def one(segments: jax.Array | None, n: int) -> np.ndarray:
        out = np.tile(np.arange(n), (b, 1))
        if segments is not None:
            for i, row in enumerate(np.asarray(segments)):
                out[i] = [j - list(row).index(row[j]) if row[j] else 0 for j in range(n)]
        return out

    return one(mask.query_segments, q), one(mask.key_segments, k)


def term_logits(term, rows: np.ndarray, columns: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Returns the attention logits ``[b, h, q, k]`` that a term contributes."""
    t = jax.tree.map(lambda x: np.asarray(x, np.float64), term)
    match t:
        case Static(logits):
            return np.stack([logits[:, r][:, :, c] for r, c in zip(rows, columns, strict=True)])
        case Relative(logits, first):
            return logits[:, distances - first].swapaxes(0, 1)
        case LowRank():
            x, y = looked_up(t, rows, columns)
            return np.einsum("bqhr,bkhr->bhqk", x, y)
        case Outer(x, y):
            full = np.stack([np.kron(*pair) for pair in pairs(x, y)]).reshape(*x.shape[:3], -1)
            full = full.transpose(0, 2, 1, 3)
            return np.stack([full[i][:, :, c] for i, c in enumerate(columns)])


def pairs(x: np.ndarray, y: np.ndarray):
    return zip(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), strict=True)


def looked_up(t: LowRank, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of a low-rank term for the queries and the keys of every example."""
    b = len(rows)
    x = np.broadcast_to(t.queries, (b, *t.queries.shape[1:]))
    y = np.broadcast_to(t.keys, (b, *t.keys.shape[1:]))
    if not t.token_queries:
        x = np.stack([x[i, r] for i, r in enumerate(rows)])
    if not t.token_keys:
        y = np.stack([y[i, c] for i, c in enumerate(columns)])
    return x, y


def term_gradient(
    term, dlogits: np.ndarray, rows: np.ndarray, columns: np.ndarray, distances: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the cotangents of all arrays of a term."""
    b, _, q, k = dlogits.shape
    t = jax.tree.map(lambda x: np.asarray(x, np.float64), term)
    out = {f.name: np.zeros_like(getattr(t, f.name)) for f in array_fields(t)}
    match t:
        case Static():
            for i, row, key in np.ndindex(b, q, k):
                out["logits"][:, rows[i, row], columns[i, key]] += dlogits[i, :, row, key]
        case Relative():
            for i, row, key in np.ndindex(b, q, k):
                out["logits"][:, distances[i, row, key] - t.first] += dlogits[i, :, row, key]
        case LowRank():
            x, y = looked_up(t, rows, columns)
            dx = np.einsum("bhqk,bkhr->bqhr", dlogits, y)
            dy = np.einsum("bhqk,bqhr->bkhr", dlogits, x)
            for i in range(b):
                row = np.arange(q) if t.token_queries else rows[i]
                column = np.arange(k) if t.token_keys else columns[i]
                np.add.at(out["queries"][i % len(t.queries)], row, dx[i])
                np.add.at(out["keys"][i % len(t.keys)], column, dy[i])
        case Outer(x, y):
            for i, key in np.ndindex(b, k):
                p, r = divmod(columns[i, key], y.shape[-1])
                d = dlogits[i, :, :, key].T
                out["a"][i, ..., p] += d * y[i, ..., r]
                out["b"][i, ..., r] += d * x[i, ..., p]
    return out


def array_fields(term) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(term) if not f.metadata.get("static")]


def gradients_of(terms: Terms) -> tuple[dict[str, np.ndarray], ...]:
    """Returns arrays of terms or of their cotangents, in the form of `Answer.terms`."""
    return tuple(
        {f.name: np.asarray(getattr(t, f.name), float) for f in array_fields(t)} for t in terms
    )


def error(found, expected: np.ndarray) -> float:
    """Returns the largest difference between arrays, divided by the largest expected entry."""
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.isfinite(found).all()
    return float(
        np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30)
    )


def close(found, expected, bound: float = 2e-6, least: float = 1.0) -> None:
    """Compares two trees of arrays and their dtypes.

    Differences are divided by the largest entry of the array, or by `least` if `least` is larger.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=bound * max(least, np.abs(y).max()))


def rms_error(found, expected: np.ndarray) -> float:
    """Returns the root mean square of the difference, divided by that of the expected array."""
    found = np.asarray(jnp.asarray(found, jnp.float32), np.float64)
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))
