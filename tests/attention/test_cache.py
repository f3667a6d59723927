"""Decoding step by step gives the full pass, and the cache holds no more than it must."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import (
    Cache,
    LowRank,
    Mask,
    Outer,
    Relative,
    Static,
    Term,
    Terms,
    attend,
    extend,
    init_cache,
)
from tests.attention import cases

B, N, H, E = 3, 24, 2, 5
MIXTURES = [(name,) for name in cases.EVERY_TERM] + [
    ("dot_product", "dense", "factorized", "static", "relative")
]


def at(term: Term, position: jax.Array | int, length: int) -> Term:
    """The term of a step: new tokens only, and the rows of parameters that belong to them."""
    rows = functools.partial(
        jax.lax.dynamic_slice_in_dim, start_index=position, slice_size=length, axis=1
    )
    match term:
        case Static(logits):
            return Static(rows(logits))
        case Outer(a, b):
            return Outer(rows(a), rows(b))
        case LowRank(queries, keys, token_keys):
            keys = rows(keys) if token_keys else keys
            return dataclasses.replace(term, queries=rows(queries), keys=keys)
        case Relative():
            return term


def steps(terms: Terms, values: jax.Array, first: int) -> jax.Array:
    """A prompt of `first` tokens at once, then one token at a time in a compiled loop."""

    def step(cache: Cache, position: jax.Array | int, length: int) -> tuple[jax.Array, Cache]:
        new = tuple(at(term, position, length) for term in terms)
        fresh = jax.lax.dynamic_slice_in_dim(values, position, length, axis=1)
        mask = Mask(causal=True, query_offset=position)
        new, past, mask, cache = extend(cache, new, fresh, at=position, mask=mask)
        return attend(new, past, mask=mask, q_length=length), cache

    empty = init_cache(terms, values[:, :1], max_length=N)
    poison = Cache(tuple(jnp.full_like(x, jnp.nan) for x in empty.keys), empty.values)
    out, cache = step(poison, 0, first)

    def body(cache: Cache, position: jax.Array) -> tuple[Cache, jax.Array]:
        out, cache = step(cache, position, 1)
        return cache, out[:, 0]

    _, rest = jax.lax.scan(body, cache, jnp.arange(first, N))
    return jnp.concatenate([out, rest.swapaxes(0, 1)], axis=1)


@pytest.mark.parametrize("names", MIXTURES, ids="+".join)
def test_steps_equal_the_full_pass(names: tuple[str, ...]) -> None:
    terms = cases.make_terms(names, B, N, N, H)
    values = cases.normal("values", B, N, H, E)
    full = attend(terms, values, mask=Mask(causal=True), q_length=N, implementation="reference")
    found = jax.jit(functools.partial(steps, first=4), compiler_options=cases.FAST_COMPILE)(
        terms, values
    )
    np.testing.assert_allclose(found, full, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("names", MIXTURES, ids="+".join)
def test_only_token_made_keys_are_cached(names: tuple[str, ...]) -> None:
    terms, values = cases.make_terms(names, B, 1, 1, H), jnp.ones((B, 1, H, E), jnp.bfloat16)
    cache = init_cache(terms, values, max_length=N)
    assert [x.shape for x in cache.keys] == [(B, N, H, 13)] * ("dot_product" in names)
    assert cache.values.shape == (B, N, H, E)
    assert cache.values.dtype == jnp.bfloat16


def test_no_new_keys_write_nothing() -> None:
    """Cross-attention after its first step."""
    terms, values = cases.make_terms(("dot_product",), B, 1, N, H), cases.normal("v", B, N, H, E)
    empty = init_cache(terms, values, max_length=N)
    *_, cache = extend(empty, terms, values, at=0, mask=Mask())
    nothing = (dataclasses.replace(terms[0], keys=terms[0].keys[:, :0]),)
    again, past, _, same = extend(cache, nothing, values[:, :0], at=0, mask=Mask())
    np.testing.assert_array_equal(again[0].keys, terms[0].keys)
    np.testing.assert_array_equal(past, values)
    assert same.values is cache.values


def test_errors() -> None:
    terms, values = cases.make_terms(("dot_product",), B, 1, 5, H), jnp.ones((B, 5, H, E))
    cache = init_cache(terms, values, max_length=6)
    with pytest.raises(ValueError, match=r"max_length=6 but 7 positions"):
        extend(cache, terms, values, at=2, mask=Mask())
    with pytest.raises(ValueError, match=r"keys of 1 terms but 0 were given"):
        extend(cache, cases.make_terms(("static",), B, 1, 5, H), values, at=0, mask=Mask())
