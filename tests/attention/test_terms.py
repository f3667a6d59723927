"""The algebra of terms, and masks read on their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import (
    Mask,
    Relative,
    Static,
    add,
    low_rank,
    materialize,
    outer,
    relative,
    scale,
    static,
)
from synthesizer_jax.attention.masks import segment_positions
from synthesizer_jax.attention.terms import expand_diagonals
from tests.attention import cases, oracle

B, Q, K, H = 3, 5, 7, 2


def logits(terms, **changes) -> np.ndarray:
    return np.asarray(materialize(terms, q_length=Q, k_length=K, **changes))


@pytest.mark.parametrize("name", cases.EVERY_TERM)
def test_materialize(name: str) -> None:
    terms = cases.make_terms((name,), B, Q, K, H)
    rows, columns = oracle.places(Mask(), B, Q, K)
    distances = columns[:, None, :] - rows[:, :, None]
    expected = oracle.term_logits(terms[0], rows, columns, distances)
    found = np.broadcast_to(logits(terms), expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_add_folds_what_it_can() -> None:
    terms = cases.make_terms(cases.EVERY_TERM, B, Q, K, H)
    total = add(*terms, *terms)
    assert sum(isinstance(t, Static) for t in total) == 1
    assert sum(isinstance(t, Relative) for t in total) == 1
    assert len(total) == 2 + 2 * 4
    np.testing.assert_allclose(logits(total), 2 * logits(terms), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [jnp.array([0.5, -2.0]), jnp.array(3.0)])
def test_scale(factor: jax.Array) -> None:
    for term in cases.make_terms(cases.EVERY_TERM, B, Q, K, H):
        found = logits(scale((term,), factor))
        shaped = np.broadcast_to(factor, (H,))[:, None, None]
        np.testing.assert_allclose(found, shaped * logits((term,)), rtol=1e-5, atol=1e-5)


def test_scale_multiplies_before_it_rounds() -> None:
    x = cases.normal("x", B, Q, H, 4, dtype=jnp.bfloat16)
    (term,) = scale((low_rank(x, x, token_keys=True),), jnp.array([0.3, 0.7]))
    exact = x.astype(jnp.float32) * jnp.array([0.3, 0.7])[:, None]
    assert term.queries.dtype == jnp.bfloat16
    np.testing.assert_array_equal(term.queries, exact.astype(jnp.bfloat16))


def test_spread_and_its_transpose() -> None:
    columns = jnp.arange(float(Q + K - 1))
    block = expand_diagonals(columns, Q)
    for i, j in np.ndindex(Q, K):
        assert block[i, j] == columns[Q - 1 + j - i]
    g = np.arange(Q * K, dtype=float).reshape(Q, K)
    (sums,) = jax.vjp(lambda c: expand_diagonals(c, Q), columns)[1](jnp.asarray(g, jnp.float32))
    expected = [np.trace(g, offset=d) for d in range(1 - Q, K)]
    np.testing.assert_allclose(sums, expected)


def test_relative_with_an_offset() -> None:
    term = relative(cases.normal("r", H, 40), first=-20)
    fixed = logits((term,), query_offset=9)
    traced = jax.jit(lambda o: materialize((term,), q_length=Q, k_length=K, query_offset=o))(9)
    np.testing.assert_array_equal(fixed, traced)
    np.testing.assert_array_equal(fixed[0, :, 2, 3], term.logits[:, 3 - 11 + 20])


def test_positions_in_segments() -> None:
    segments = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0], [4, 4, 2, 2, 2, 2, 2, 1]])
    np.testing.assert_array_equal(
        segment_positions(segments), [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4, 0]]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: static(jnp.ones((2, 3))), r"static: logits has shape \(2, 3\)"),
        (lambda: relative(jnp.ones(3), first=0), r"\[heads, distances\]"),
        (lambda: outer(jnp.ones((2, 3, 4, 5)), jnp.ones((2, 3, 5, 5))), "both must be equal"),
        (
            lambda: low_rank(jnp.ones((2, 3, 4, 5)), jnp.ones((2, 3, 4, 6)), token_keys=True),
            "r must be equal",
        ),
        (
            lambda: low_rank(jnp.ones((2, 3, 4, 5)), jnp.ones((2, 3, 4, 5)), token_keys=False),
            "batch axis of 1, not 2",
        ),
    ],
)
def test_errors(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
