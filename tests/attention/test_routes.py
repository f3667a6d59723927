"""Every route against the oracle, forward and gradient, under every mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax.attention import Mask, attend, attention_weights, static
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, PARAMETERS, QUERIES, WIDTH

ROUTES = {"static": PARAMETERS, "fused": EVERY_TERM, "reference": EVERY_TERM}
BOUND = 2e-5


def problem(names: tuple[str, ...], q: int, k: int):
    return (
        cases.make_terms(names, BATCH, q, k),
        cases.normal("values", BATCH, k, HEADS, WIDTH),
        cases.normal("cotangent", BATCH, q, HEADS, WIDTH),
    )


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", cases.cross_masks())
def test_cross_attention(route: str, name: str) -> None:
    terms, values, g = problem(ROUTES[route], QUERIES, KEYS)
    cases.check(terms, values, cases.cross_masks()[name], g, route, BOUND)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", cases.self_masks())
def test_self_attention(route: str, name: str) -> None:
    terms, values, g = problem(ROUTES[route], KEYS, KEYS)
    cases.check(terms, values, cases.self_masks()[name], g, route, BOUND)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", cases.packed_masks())
def test_packed_rows(route: str, name: str) -> None:
    terms, values, g = problem(ROUTES[route], KEYS, KEYS)
    cases.check(terms, values, cases.packed_masks()[name], g, route, BOUND)


@pytest.mark.parametrize(
    ("route", "batch", "heads"),
    [("fused", 1, HEADS), ("fused", BATCH, 1), ("fused", BATCH, HEADS), ("reference", 1, HEADS)],
)
def test_any_pattern(route: str, batch: int, heads: int) -> None:
    terms, values, g = problem(("static", "dot_product"), QUERIES, KEYS)
    mask = Mask(causal=True, query_offset=5, allowed=cases.holes(batch, heads, QUERIES, KEYS))
    cases.check(terms, values, mask, g, route, BOUND)


@pytest.mark.parametrize("name", EVERY_TERM)
def test_each_term_alone(name: str) -> None:
    terms, values, g = problem((name,), QUERIES, KEYS)
    cases.check(terms, values, cases.cross_masks()["padding"], g, "fused", BOUND)


@given(
    sizes=st.tuples(*[st.sampled_from([2, 3, 5, 7, 11, 13])] * 5).filter(
        lambda s: len(set(s)) == len(s)
    ),
    names=st.sets(st.sampled_from(EVERY_TERM), min_size=1),
    route=st.sampled_from(["auto", "fused"]),
    causal=st.booleans(),
)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_shape(sizes, names, route, causal) -> None:
    b, q, k, h, e = sizes
    names = tuple(sorted(names))
    terms = cases.make_terms(names, b, q, k, h)
    values, g = cases.normal("values", b, k, h, e), cases.normal("cotangent", b, q, h, e)
    lengths = jnp.arange(b) % (k + 1)
    cases.check(terms, values, Mask(causal=causal, key_lengths=lengths), g, route, BOUND)


def test_empty_rows_are_zero_and_give_no_gradient() -> None:
    terms, values, g = problem(EVERY_TERM, QUERIES, KEYS)
    for route in ("fused", "reference"):
        mask = Mask(key_lengths=jnp.zeros(BATCH, int))
        out, dterms, dvalues = cases.run(terms, values, mask, g, route)
        assert not np.any(out)
        assert not np.any(dvalues)
        for arrays in oracle.gradients_of(dterms):
            assert not any(np.any(x) for x in arrays.values())


def test_weights_for_reports() -> None:
    terms, values, g = problem(EVERY_TERM, KEYS, KEYS)
    for mask in (cases.self_masks()["causal and padding"], cases.packed_masks()["packed"]):
        answer = oracle.attention(terms, values, mask, g)
        assert oracle.error(attention_weights(terms, mask=mask), answer.weights) < BOUND
    only = cases.make_terms(("relative",), BATCH, QUERIES, KEYS)
    weights = attention_weights(only, q_length=QUERIES, k_length=KEYS)
    assert weights.shape == (1, HEADS, QUERIES, KEYS)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("names", [("static", "relative"), EVERY_TERM])
def test_auto_equals_the_oracle(names: tuple[str, ...]) -> None:
    terms, values, g = problem(names, KEYS, KEYS)
    mask = cases.self_masks()["causal and padding"]
    cases.check(terms, values, mask, g, "auto", BOUND)


def test_one_query_of_a_long_row() -> None:
    """Decoding: the last row of a full pass."""
    terms, values, _ = problem(("static", "relative"), KEYS, KEYS)
    full = attend(terms, values, mask=Mask(causal=True))
    last = (type(terms[0])(terms[0].logits[:, -1:]), terms[1])
    step = attend(last, values, mask=Mask(causal=True, query_offset=KEYS - 1))
    np.testing.assert_allclose(step[:, 0], full[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [None, (5, 3, 6)])
def test_a_second_call_outside_of_jit_compiles_nothing(lengths, caplog) -> None:
    values = cases.normal("values", 3, 6, 2, 4)
    mask = Mask() if lengths is None else Mask(key_lengths=jnp.array(lengths))
    logits = cases.normal("table", 2, 6, 6)

    def run():
        out, back = jax.vjp(lambda s: attend((static(s),), values, mask=mask), logits)
        return back(out)

    run()
    with jax.log_compiles():
        run()
    assert not [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
