"""Tests the precision of the static route if logits are far below the maximum of their row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from synthesizer_jax.attention import Mask, attend, static
from synthesizer_jax.attention.fused_route import Options
from synthesizer_jax.attention.static_route import _attend_static_fwd, static_inputs
from synthesizer_jax.attention.terms import Call
from tests.attention import cases, oracle

B, N, H, E = 3, 11, 2, 5
fast_jit = functools.partial(jax.jit, compiler_options=cases.FAST_COMPILE)
GAPS = (20, 44, 60, 80, 86, 1000)
LENGTHS = jnp.array([11, 6, 0])


def logits_with_gap(gap: float) -> jax.Array:
    """Returns logits that are larger by `gap` for the last keys.

    In two examples, these keys are padding.
    """
    return cases.normal("far", H, N, N) + gap * (jnp.arange(N) >= 6)


def padding_masks() -> dict[str, Mask]:
    valid = jnp.arange(N) < LENGTHS[:, None]
    return {
        "padding": Mask(key_lengths=LENGTHS).for_self_attention(),
        "holes": Mask(key_valid=valid & cases.holes(B, N)).for_self_attention(),
        "causal and holes": Mask(causal=True, key_valid=cases.holes(B, N)).for_self_attention(),
        "prefix": Mask(
            causal=True, prefix_lengths=jnp.array([9, 2, 0]), key_lengths=LENGTHS
        ).for_self_attention(),
    }


def is_exact(logits: jax.Array, values: jax.Array, mask: Mask) -> bool:
    """Whether the static route uses matrix products because they are precise enough."""
    inputs = static_inputs(Call((static(logits),), values, mask, logits.shape[1]))
    _, residuals = _attend_static_fwd(logits.shape[1], Options(None, 0, ()), inputs)
    return bool(residuals.is_exact)


@pytest.mark.parametrize("name", padding_masks())
def test_logits_with_gaps_of_every_size_equal_the_oracle(name: str) -> None:
    _, values, dout = cases.problem(())
    for gap in GAPS:
        cases.check(
            (static(logits_with_gap(gap)),),
            1e-6 * values,
            padding_masks()[name],
            dout,
            "static",
            2e-5,
        )


def test_large_future_logits_do_not_underflow_causal_rows() -> None:
    future = jnp.arange(N) > jnp.arange(N)[:, None]
    logits = cases.normal("future", H, N, N) + 1000.0 * future
    mask = Mask(causal=True, key_valid=jnp.ones((B, N), bool))
    _, values, dout = cases.problem(())
    cases.check((static(logits),), values, mask, dout, "static", 2e-5)
    assert is_exact(logits, values, mask)


def test_padding_queries_do_not_trigger_the_loop() -> None:
    """Only real queries decide whether the precise loop is needed, not padding queries.

    The logits of a Gaussian bias differ by many thousands, but every real query sees keys whose
    logits are near the maximum.
    """
    distance = jnp.arange(64.0) - jnp.arange(64.0)[:, None]
    logits = jnp.broadcast_to(-8.0 * distance**2, (H, 64, 64))
    values = cases.normal("values", B, 64, H, E)
    lengths = jnp.array([64, 20, 0])
    for mask, expected in (
        (Mask(key_lengths=lengths).for_self_attention(), True),
        (Mask(key_lengths=lengths), False),
    ):
        assert is_exact(logits, values, mask) == expected


def test_vmap_keeps_a_single_conditional() -> None:
    tables = jnp.stack([logits_with_gap(gap) for gap in (0, 1000)])
    values = jnp.stack([cases.normal(name, B, N, H, E) for name in ("one", "two")])
    mask = padding_masks()["padding"]
    dout = cases.normal("cotangent", B, N, H, E)

    def attend_and_vjp(
        table: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, vjp = jax.vjp(lambda t, v: attend((static(t),), v, mask=mask), table, values)
        dtable, dvalues = vjp(dout)
        return out, dtable, dvalues

    mapped = fast_jit(jax.vmap(attend_and_vjp)).lower(tables, values).compile()
    assert mapped.as_text().count(" conditional(") == 2
    for i, (table, v) in enumerate(zip(tables, values, strict=True)):
        expected = oracle.attention((static(table),), v, mask, dout)
        out, dtable, dvalues = (x[i] for x in mapped(tables, values))
        cases.compare((out, (static(dtable),), dvalues), expected, 2e-5)
    nested = (
        fast_jit(jax.vmap(jax.vmap(attend_and_vjp))).lower(tables[None], values[None]).compile()
    )
    assert nested.as_text().count(" conditional(") == 2


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=True, key_lengths=LENGTHS)])
def test_causal_masks_need_no_conditional(mask: Mask) -> None:
    def loss(table: jax.Array, values: jax.Array) -> jax.Array:
        out = attend((static(table),), values, mask=mask.for_self_attention())
        return jnp.sum(out**2)

    lowered = fast_jit(jax.grad(loss)).lower(logits_with_gap(0), cases.normal("values", B, N, H, E))
    assert " conditional(" not in lowered.compile().as_text()


def test_memory_with_a_conditional() -> None:
    b, n, h, e = 8, 256, 4, 32
    table, values = jnp.zeros((h, n, n)), jnp.zeros((b, n, h, e))
    mask = Mask(key_lengths=jnp.full(b, n)).for_self_attention()

    def loss(table: jax.Array, values: jax.Array, route: str) -> jax.Array:
        return jnp.sum(attend((static(table),), values, mask=mask, implementation=route) ** 2)

    step = fast_jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    programs = (step.lower(table, values, route).compile() for route in ("static", "reference"))
    ours, reference = (p.memory_analysis().temp_size_in_bytes for p in programs)
    assert ours <= 0.3 * reference
