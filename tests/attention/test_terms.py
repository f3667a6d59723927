"""Adding, multiplying and combining terms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import add, low_rank, materialize, outer, relative, scale, static
from tests.attention import cases

B, Q, K, H = 3, 5, 7, 2
X = jnp.ones((2, 3, 4, 5))


def logits(terms, **changes) -> np.ndarray:
    return np.asarray(materialize(terms, q_length=Q, k_length=K, **changes))


def test_add_folds_what_it_can() -> None:
    terms = cases.make_terms(cases.EVERY_TERM, B, Q, K, H)
    total = add(*terms, *terms)
    kinds = [type(term).__name__ for term in total]
    assert kinds.count("Static") == kinds.count("Relative") == 1
    assert len(total) == 2 + 2 * 4
    np.testing.assert_allclose(logits(total), 2 * logits(terms), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [jnp.array([0.5, -2.0]), jnp.array(3.0)])
def test_scaling_a_term(factor: jax.Array) -> None:
    for term in cases.make_terms(cases.EVERY_TERM, B, Q, K, H):
        found = logits(scale((term,), factor))
        shaped = np.broadcast_to(factor, (H,))[:, None, None]
        np.testing.assert_allclose(found, shaped * logits((term,)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: static(jnp.ones((2, 3))), r"static: logits.shape is \(2, 3\)"),
        (lambda: relative(jnp.ones(3), first=0), r"\[heads, distances\]"),
        (lambda: outer(X, jnp.ones((2, 3, 5, 5))), "but they must be the same"),
        (
            lambda: low_rank(X, jnp.ones((2, 3, 4, 6)), token_keys=True),
            "r must be the same in both",
        ),
        (lambda: low_rank(X, X, token_keys=False), "batch axis has the size 2. It must be 1"),
    ],
)
def test_wrong_terms_are_errors(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
