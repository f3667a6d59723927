"""The static route where it could lose digits: logits far under the row's maximum."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, attend, static
from synthesizer_jax.attention.static import _guarded
from tests.attention import cases, oracle

B, N, H, E = 3, 11, 2, 5
fast = functools.partial(jax.jit, compiler_options=cases.FAST_COMPILE)
GAPS = (20, 44, 60, 80, 86, 1000)
LENGTHS = jnp.array([11, 6, 0])


def far(gap: float) -> jax.Array:
    """Logits whose last keys, padding in two examples, lie `gap` nats above the others."""
    return cases.normal("far", H, N, N) + gap * (jnp.arange(N) >= 6)


def far_masks() -> dict[str, Mask]:
    valid = jnp.arange(N) < LENGTHS[:, None]
    return {
        "padding": Mask(key_lengths=LENGTHS).for_self_attention(),
        "holes": Mask(key_valid=valid & cases.holes(B, N)).for_self_attention(),
        "causal and holes": Mask(causal=True, key_valid=cases.holes(B, N)).for_self_attention(),
        "prefix": Mask(
            causal=True, prefix_lengths=jnp.array([9, 2, 0]), key_lengths=LENGTHS
        ).for_self_attention(),
    }


@pytest.mark.parametrize("small", [1.0, 1e-6])
@pytest.mark.parametrize("name", far_masks())
def test_any_gap(name: str, small: float) -> None:
    values = small * cases.normal("values", B, N, H, E)
    g = cases.normal("cotangent", B, N, H, E)
    for gap in GAPS:
        cases.check((static(far(gap)),), values, far_masks()[name], g, "static", 2e-5)


def test_future_logits_do_not_push_causal_rows_under() -> None:
    future = jnp.arange(N) > jnp.arange(N)[:, None]
    logits = cases.normal("future", H, N, N) + 1000.0 * future
    mask = Mask(causal=True, key_valid=jnp.ones((B, N), bool))
    values, g = cases.normal("values", B, N, H, E), cases.normal("cotangent", B, N, H, E)
    cases.check((static(logits),), values, mask, g, "static", 2e-5)
    *_, exact = fast(_guarded)((logits, values, mask))[1]
    assert bool(exact)


def test_padding_queries_have_no_vote() -> None:
    """A log-Gaussian ranges over many thousand nats, but every real row's keys are near."""
    distance = jnp.arange(64.0) - jnp.arange(64.0)[:, None]
    logits = jnp.broadcast_to(-8.0 * distance**2, (H, 64, 64))
    values = cases.normal("values", B, 64, H, E)
    lengths = jnp.array([64, 20, 0])
    for mask, expected in (
        (Mask(key_lengths=lengths).for_self_attention(), True),
        (Mask(key_lengths=lengths), False),
    ):
        *_, exact = fast(_guarded)((logits, values, mask))[1]
        assert bool(exact) == expected


def test_one_layer_of_a_scan_falls_back() -> None:
    """Three layers, the middle one 1,000 nats off, rematerialised."""
    tables = jnp.stack([far(gap) for gap in (0, 1000, 20)])
    mask = far_masks()["padding"]
    values = cases.normal("values", B, N, H, E)

    def loss(tables: jax.Array, values: jax.Array, implementation: str) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, table: jax.Array):
            y = attend((static(table),), x, mask=mask, implementation=implementation)
            return x + y, None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, values, tables)[0]))

    grad = fast(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for found, expected in zip(
        grad(tables, values, "static"), grad(tables, values, "reference"), strict=True
    ):
        assert oracle.error(found, np.asarray(expected, np.float64)) < 2e-5


def test_vmap_takes_one_decision() -> None:
    tables = jnp.stack([far(gap) for gap in (0, 1000)])
    values = jnp.stack([cases.normal(name, B, N, H, E) for name in ("one", "two")])
    mask = far_masks()["padding"]
    g = cases.normal("cotangent", B, N, H, E)

    def one(table: jax.Array, values: jax.Array):
        out, back = jax.vjp(lambda t, v: attend((static(t),), v, mask=mask), table, values)
        return out, *back(g)

    both = fast(jax.vmap(one)).lower(tables, values).compile()
    assert both.as_text().count(" conditional(") == 2
    for i, (table, v) in enumerate(zip(tables, values, strict=True)):
        answer = oracle.attention((static(table),), v, mask, g)
        out, dtable, dvalues = (x[i] for x in both(tables, values))
        assert oracle.error(out, answer.out) < 2e-5
        assert oracle.error(dtable, answer.terms[0]["logits"]) < 2e-5
        assert oracle.error(dvalues, answer.values) < 2e-5
    nested = fast(jax.vmap(jax.vmap(one))).lower(tables[None], values[None]).compile()
    assert nested.as_text().count(" conditional(") == 2


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=True, key_lengths=LENGTHS)])
def test_causal_rows_need_no_guard(mask: Mask) -> None:
    def loss(table: jax.Array, values: jax.Array) -> jax.Array:
        out = attend((static(table),), values, mask=mask.for_self_attention())
        return jnp.sum(out**2)

    lowered = fast(jax.grad(loss)).lower(far(0), cases.normal("values", B, N, H, E))
    assert " conditional(" not in lowered.compile().as_text()


def test_memory_with_the_guard_in_place() -> None:
    b, n, h, e = 8, 256, 4, 32
    table, values = jnp.zeros((h, n, n)), jnp.zeros((b, n, h, e))
    mask = Mask(key_lengths=jnp.full(b, n)).for_self_attention()

    @functools.partial(fast, static_argnums=2)
    def grads(table: jax.Array, values: jax.Array, implementation: str):
        def loss(table: jax.Array, values: jax.Array) -> jax.Array:
            out = attend((static(table),), values, mask=mask, implementation=implementation)
            return jnp.sum(out**2)

        return jax.grad(loss, argnums=(0, 1))(table, values)

    used = {}
    for route in ("static", "reference"):
        compiled = grads.lower(table, values, route).compile()
        used[route] = compiled.memory_analysis().temp_size_in_bytes
    assert used["static"] <= 0.3 * used["reference"]
