"""The cache holds no more than it must; tests/layers decode with it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from synthesizer_jax.attention import Mask, extend, init_cache
from tests.attention import cases

B, N, H, E = 3, 24, 2, 5
MIXTURES = [("outer",), ("dot_product", "dense", "factorized", "static", "relative")]


@pytest.mark.parametrize("names", MIXTURES, ids="+".join)
def test_only_token_made_keys_are_cached(names: tuple[str, ...]) -> None:
    terms, values = cases.make_terms(names, B, 1, 1, H), jnp.ones((B, 1, H, E), jnp.bfloat16)
    cache = init_cache(terms, values, max_length=N)
    assert [x.shape for x in cache.keys] == [(B, N, H, 13)] * ("dot_product" in names)
    assert cache.values.shape == (B, N, H, E)
    assert cache.values.dtype == jnp.bfloat16


def test_errors() -> None:
    terms, values = cases.make_terms(("dot_product",), B, 1, 5, H), jnp.ones((B, 5, H, E))
    cache = init_cache(terms, values, max_length=6)
    with pytest.raises(ValueError, match=r"max_length=6 but 7 positions"):
        extend(cache, terms, values, at=2, mask=Mask())
    with pytest.raises(ValueError, match=r"keys of 1 terms but 0 were given"):
        extend(cache, cases.make_terms(("static",), B, 1, 5, H), values, at=0, mask=Mask())
