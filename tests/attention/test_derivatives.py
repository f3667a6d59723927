"""Derivatives of every order and mode, on every route."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, Terms, attend, banded, static
from synthesizer_jax.attention.derivatives import with_gradient
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, PARAMETERS, WIDTH

LENGTHS = jnp.array([11, 4, 0])


def plain(inputs):
    x, n, y = inputs
    return jnp.sin(x) * y**2 * n


def forward(inputs):
    """With numbers that JAX must not differentiate."""
    return jax.lax.stop_gradient(plain(inputs)), (jnp.cos(inputs[0]), jnp.array(True))


def backward(inputs, out, kept, g):
    x, n, y = inputs
    return kept[0] * y**2 * n * g, None, 2 * jnp.sin(x) * y * n * g


X, Y = jnp.arange(3.0) / 3 + 0.2, jnp.arange(3.0) + 1
N = jnp.arange(3)


def checkpointed(f):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(f, policy=policy)


def scanned(f):
    return lambda x, y: jax.lax.scan(lambda c, _: (c + f(x * c, y), c), 1.0, None, length=2)[0]


WAYS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (y, x)),
    "linearize": lambda f: lambda x, y: jax.linearize(f, x, y)[1](y, x),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, (0, 1)), (0, 1)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third order": lambda f: jax.jacfwd(jax.hessian(f)),
    "vmap of grad": lambda f: (
        lambda x, y: jax.vmap(jax.grad(f, (0, 1)), (0, None))(jnp.stack([x, y]), y)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda x, y: jax.vmap(f, (0, None))(jnp.stack([x, y]), y).sum(), (0, 1)
    ),
    "vmap of hessian": lambda f: (
        lambda x, y: jax.vmap(jax.hessian(f, (0, 1)), (0, None))(jnp.stack([x, y]), y)
    ),
    "checkpoint": lambda f: jax.hessian(checkpointed(f)),
    "scan": lambda f: jax.hessian(scanned(f), (0, 1)),
    "scan of checkpoint": lambda f: jax.hessian(scanned(checkpointed(f)), (0, 1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_differentiate(way: str) -> None:
    by_hand = with_gradient(forward, backward, plain, name="kept")
    found, expected = (
        jax.jit(WAYS[way](lambda x, y, f=f: f((x, N, y)).sum()))(X, Y) for f in (by_hand, plain)
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_reverse_mode_runs_the_backward_pass_by_hand() -> None:
    wrong = with_gradient(forward, lambda *a: jax.tree.map(lambda d: 2 * d, backward(*a)), plain)
    grads = [jax.grad(lambda x, f=f: f((x, N, Y)).sum())(X) for f in (wrong, plain)]
    np.testing.assert_allclose(grads[0], 2 * grads[1], rtol=1e-6)


MASKS = {
    "none": Mask(),
    "padding": Mask.padded(LENGTHS),
    "causal": Mask.padded(LENGTHS, causal=True),
    "packed": Mask.packed(cases.packed_masks()["packed"].key_segments, segments=3),
}


def second_order(terms: Terms, values: jax.Array, mask: Mask, route: str):
    """A directional derivative of a loss's gradient, and that of a tangent's norm."""
    direction = jax.tree.map(lambda x: jnp.cos(3 * x + 1), (terms, values))

    def loss(terms: Terms, values: jax.Array) -> jax.Array:
        out = attend(terms, values, mask=mask, q_length=values.shape[1], implementation=route)
        return jnp.sum(jnp.sin(out) * jnp.arange(values.shape[2])[:, None])

    gradient = jax.grad(loss, (0, 1))
    forward_over_reverse = jax.jvp(gradient, (terms, values), direction)
    tangent = lambda *x: jax.jvp(loss, x, direction)[1]
    reverse_over_forward = jax.grad(tangent, (0, 1))(terms, values)
    squared = lambda *x: sum(jnp.vdot(d, d) for d in jax.tree.leaves(gradient(*x)))
    return forward_over_reverse, reverse_over_forward, jax.grad(squared, (0, 1))(terms, values)


@pytest.mark.parametrize(
    ("route", "mask"),
    [
        ("static", "none"),
        ("static", "padding"),
        ("static", "causal"),
        ("static", "packed"),
        ("fused", "padding"),
        ("fused", "causal"),
        ("fused", "packed"),
    ],
)
def test_second_derivatives(route: str, mask: str) -> None:
    names = PARAMETERS if route == "static" else EVERY_TERM
    terms = cases.make_terms(names, BATCH, KEYS, KEYS)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    found, expected = (
        jax.jit(
            functools.partial(second_order, mask=MASKS[mask], route=r),
            compiler_options=cases.FAST_COMPILE,
        )(terms, values)
        for r in (route, "reference")
    )
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert oracle.error(x, np.asarray(y, np.float64)) < 1e-4


@pytest.mark.parametrize("normalise", [False, True])
def test_second_derivatives_of_windows(normalise: bool) -> None:
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    for batch, rows in ((1, 1), (BATCH, 1), (BATCH, KEYS)):
        weights = jnp.exp(cases.normal("weights", batch, rows, HEADS, 3))
        term = (banded(weights, first=-1, normalise=normalise),)
        for mask in (Mask(), Mask.padded(LENGTHS)):
            found, expected = (
                second_order(term, values, mask, route) for route in ("banded", "reference")
            )
            for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                assert x.shape == y.shape
                assert oracle.error(x, np.asarray(y, np.float64)) < 1e-4


@pytest.mark.parametrize("gap", [40.0, 60.0, 100.0, 300.0])
def test_second_derivatives_behind_the_guard(gap: float) -> None:
    """Padding keys far above the others: exact where the static route gives way to the loop."""
    logits = cases.normal("logits", HEADS, KEYS, KEYS) + gap * (jnp.arange(KEYS) >= 4)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    mask = Mask(key_lengths=jnp.full(BATCH, 4))
    with jax.enable_x64(True):
        wide = logits.astype(jnp.float64), values.astype(jnp.float64)
        expected = second_order((static(wide[0]),), wide[1], mask, "reference")
    found = second_order((static(logits),), values, mask, "static")
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.isfinite(x).all()
        assert oracle.error(x, np.asarray(y, np.float64)) < 1e-3


@pytest.mark.parametrize("names", [("static",), ("dot_product", "relative")])
def test_forward_mode_holds_no_logits(names: tuple[str, ...]) -> None:
    """Long enough for `auto` to leave the reference."""
    batch, n = 4, 160
    terms = cases.make_terms(names, batch, n, n)
    values = cases.normal("values", batch, n, HEADS, WIDTH)
    mask = Mask.padded(jnp.array([n, 3, 70, 99]))

    def tangent(terms: Terms, values: jax.Array, route: str) -> jax.Array:
        call = functools.partial(attend, mask=mask, q_length=n, implementation=route)
        return jax.jvp(call, (terms, values), (terms, values))[1]

    jitted = jax.jit(tangent, static_argnums=2)
    compiled = jitted.lower(terms, values, "auto").compile()
    assert f"f32[{batch},{HEADS},{n},{n}]" not in compiled.as_text()
    expected = jitted(terms, values, "reference")
    assert oracle.error(compiled(terms, values), np.asarray(expected, np.float64)) < 2e-5
