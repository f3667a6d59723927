"""Compares outputs and gradients of all routes with the oracle, for all masks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import (
    Mask,
    attend,
    attention_weights,
    fused_loop,
    fused_route,
    static,
)
from synthesizer_jax.attention.terms import Call
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, QUERIES

BOUND = 2e-5
MASKS = {n: (m, QUERIES) for n, m in cases.cross_masks().items()}
MASKS |= {n: (m, KEYS) for n, m in (cases.self_masks() | cases.packed_masks()).items()}


@pytest.mark.parametrize("route", cases.ROUTES)
@pytest.mark.parametrize("name", MASKS)
def test_routes_equal_the_oracle_with_every_mask(route: str, name: str) -> None:
    mask, q = MASKS[name]
    terms, values, g = cases.problem(cases.ROUTES[route], q, KEYS)
    cases.check(terms, values, mask, g, route, BOUND)


@pytest.mark.parametrize("name", ["holes", "prefix and padding", "packed cross", "pattern"])
def test_all_heads_at_once_as_on_gpus(name: str) -> None:
    mask, q = MASKS.get(name, (None, QUERIES))
    if mask is None:
        mask = Mask(allowed=cases.holes(BATCH, HEADS, QUERIES, KEYS))
    terms, values, g = cases.problem(EVERY_TERM, q, KEYS)

    @functools.partial(jax.jit, static_argnums=1, compiler_options=cases.FAST_COMPILE)
    def run(inputs, parallel):
        out, stats = fused_loop.loop_forward(q, inputs, parallel=parallel)
        delta = fused_route.softmax_vjp_delta(out, g, jnp.float32)
        return out, stats, fused_loop.loop_backward(inputs, stats, delta, g, parallel=parallel)

    inputs = fused_route.fused_inputs(Call(terms, values, mask, q))
    oracle.close(run(inputs, True), run(inputs, False), 2e-5)


@pytest.mark.parametrize(
    ("route", "batch", "heads"),
    [("fused", 1, HEADS), ("fused", BATCH, 1), ("fused", BATCH, HEADS), ("reference", 1, HEADS)],
)
def test_any_pattern_of_pairs(route: str, batch: int, heads: int) -> None:
    terms, values, g = cases.problem(("static", "dot_product"), QUERIES, KEYS)
    mask = Mask(causal=True, query_offset=5, allowed=cases.holes(batch, heads, QUERIES, KEYS))
    cases.check(terms, values, mask, g, route, BOUND)


@pytest.mark.parametrize("route", ["fused", "reference"])
@pytest.mark.parametrize("name", ["padding", "packed cross"])
def test_soft_cap(route: str, name: str) -> None:
    mask, q = MASKS[name]
    terms, values, g = cases.problem(EVERY_TERM, q, KEYS)
    answer = oracle.attention(terms, values, mask, g, soft_cap=2.5)
    cases.compare(cases.run(terms, values, mask, g, route, soft_cap=2.5), answer, BOUND)
    with pytest.raises(ValueError, match="does not support soft_cap"):
        cases.run(terms[:1], values, mask, g, "static", soft_cap=2.5)


@pytest.mark.parametrize("route", ["fused", "reference"])
@pytest.mark.parametrize("name", ["padding", "packed cross"])
def test_sinks(route: str, name: str) -> None:
    mask, q = MASKS[name]
    terms, values, g = cases.problem(EVERY_TERM, q, KEYS)
    sinks = jnp.array([0.5, 400.0])  # the second sink receives nearly all of the weight
    *found, dsinks = cases.run(terms, values, mask, g, route, sinks)
    answer = oracle.attention(terms, values, mask, g, sinks=sinks)
    cases.compare(found, answer, BOUND)
    assert oracle.error(dsinks, answer.sinks) < BOUND
    with pytest.raises(ValueError, match="does not support sinks"):
        cases.run(terms[:1], values, mask, g, "static", sinks)
    with pytest.raises(ValueError, match=r"sinks.shape is \(1,\)"):
        cases.run(terms, values, mask, g, route, sinks[:1])


@pytest.mark.parametrize("name", EVERY_TERM)
def test_routes_with_each_term_alone(name: str) -> None:
    terms, values, g = cases.problem((name,), QUERIES, KEYS)
    cases.check(terms, values, cases.cross_masks()["padding"], g, "fused", BOUND)


def test_weights_for_reports() -> None:
    terms, values, g = cases.problem(EVERY_TERM, KEYS, KEYS)
    for mask in (cases.self_masks()["causal and padding"], cases.packed_masks()["packed"]):
        answer = oracle.attention(terms, values, mask, g)
        assert oracle.error(attention_weights(terms, mask=mask), answer.weights) < BOUND
    only = cases.make_terms(("relative",), BATCH, QUERIES, KEYS)
    weights = attention_weights(only, q_length=QUERIES, k_length=KEYS)
    assert weights.shape == (1, HEADS, QUERIES, KEYS)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


def test_a_second_call_outside_of_jit_compiles_nothing(caplog) -> None:
    values = cases.normal("values", 3, 6, 2, 4)
    mask = Mask(key_lengths=jnp.array([5, 3, 6]))
    logits = cases.normal("table", 2, 6, 6)

    def run():
        out, back = jax.vjp(lambda s: attend((static(s),), values, mask=mask), logits)
        return back(out)

    run()
    with jax.log_compiles():
        run()
    assert not [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
