"""Derivatives of every order and mode, on every route."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import Mask, Terms, attend, banded, static
from synthesizer_jax.attention.derivatives import with_gradient
from tests.attention import cases, oracle
from tests.attention.cases import BATCH, EVERY_TERM, HEADS, KEYS, PARAMETERS, WIDTH

LENGTHS = jnp.array([11, 4, 0])


Inputs = tuple[jax.Array, jax.Array, jax.Array]
Residuals = tuple[jax.Array, jax.Array]
Function = Callable[[jax.Array, jax.Array], jax.Array]


def plain(inputs: Inputs) -> jax.Array:
    x, n, y = inputs
    return jnp.sin(x) * y**2 * n


def forward(inputs: Inputs) -> tuple[jax.Array, Residuals]:
    """Stops the gradient of `plain`, and has a residual that is not differentiable."""
    return jax.lax.stop_gradient(plain(inputs)), (jnp.cos(inputs[0]), jnp.array(True))


def backward(
    inputs: Inputs, out: jax.Array, residuals: Residuals, dout: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
    x, n, y = inputs
    # d/dx (sin(x) y² n) = cos(x) y² n,  d/dy = 2 sin(x) y n
    return residuals[0] * y**2 * n * dout, None, 2 * jnp.sin(x) * y * n * dout


X, Y = jnp.arange(3.0) / 3 + 0.2, jnp.arange(3.0) + 1
N = jnp.arange(3)


def checkpoint(f: Function) -> Function:
    policy = jax.checkpoint_policies.save_only_these_names("residuals")
    return jax.checkpoint(f, policy=policy)


def scan(f: Function) -> Function:
    return lambda x, y: jax.lax.scan(lambda c, _: (c + f(x * c, y), c), 1.0, None, length=2)[0]


TRANSFORMATIONS = {
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
    "checkpoint": lambda f: jax.hessian(checkpoint(f)),
    "scan": lambda f: jax.hessian(scan(f), (0, 1)),
    "scan of checkpoint": lambda f: jax.hessian(scan(checkpoint(f)), (0, 1)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name: str) -> None:
    handwritten = with_gradient(forward, backward, plain, name="residuals")
    actual, expected = (
        jax.jit(TRANSFORMATIONS[name](lambda x, y, f=f: f((x, N, y)).sum()))(X, Y)
        for f in (handwritten, plain)
    )
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_reverse_mode_runs_the_handwritten_backward_pass() -> None:
    doubled = with_gradient(
        forward, lambda *args: jax.tree.map(lambda d: 2 * d, backward(*args)), plain
    )
    gradients = [jax.grad(lambda x, f=f: f((x, N, Y)).sum())(X) for f in (doubled, plain)]
    np.testing.assert_allclose(gradients[0], 2 * gradients[1], rtol=1e-6)


MASKS = {
    "none": Mask(),
    "padding": Mask.padded(LENGTHS),
    "causal": Mask.padded(LENGTHS, causal=True),
    "packed": Mask.packed(cases.packed_masks()["packed"].key_segments, segments=3),
}


def second_order(
    terms: Terms, values: jax.Array, mask: Mask, route: str
) -> tuple[object, object, object]:
    """Returns second derivatives of a loss in three modes.

    Forward over reverse, reverse over forward, and the gradient of the squared norm of the gradient.
    """
    direction = jax.tree.map(lambda x: jnp.cos(3 * x + 1), (terms, values))

    def loss(terms: Terms, values: jax.Array) -> jax.Array:
        out = attend(terms, values, mask=mask, q_length=values.shape[1], implementation=route)
        return jnp.sum(jnp.sin(out) * jnp.arange(values.shape[2])[:, None])

    gradient = jax.grad(loss, (0, 1))
    forward_over_reverse = jax.jvp(gradient, (terms, values), direction)
    tangent = lambda *x: jax.jvp(loss, x, direction)[1]
    reverse_over_forward = jax.grad(tangent, (0, 1))(terms, values)
    squared_norm = lambda *x: sum(jnp.vdot(d, d) for d in jax.tree.leaves(gradient(*x)))
    reverse_over_reverse = jax.grad(squared_norm, (0, 1))(terms, values)
    return forward_over_reverse, reverse_over_forward, reverse_over_reverse


def assert_close(actual: object, expected: object, bound: float = 1e-4) -> None:
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert x.shape == y.shape
        assert np.isfinite(x).all()
        assert oracle.error(x, np.asarray(y, np.float64)) < bound


@pytest.mark.slow
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
    actual, expected = (
        jax.jit(
            functools.partial(second_order, mask=MASKS[mask], route=r),
            compiler_options=cases.FAST_COMPILE,
        )(terms, values)
        for r in (route, "reference")
    )
    assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
def test_second_derivatives_of_windows(normalize: bool) -> None:
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    for batch, q_length in ((1, 1), (BATCH, 1), (BATCH, KEYS)):
        weights = jnp.exp(cases.normal("weights", batch, q_length, HEADS, 3))
        terms = (banded(weights, first=-1, normalize=normalize),)
        for mask in (Mask(), Mask.padded(LENGTHS)):
            actual, expected = (
                second_order(terms, values, mask, route) for route in ("banded", "reference")
            )
            assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [40.0, 60.0, 100.0, 300.0])
def test_second_derivatives_of_large_logits(gap: float) -> None:
    """The logits of padding keys exceed the others; from some gap on the static route runs the loop."""
    logits = cases.normal("logits", HEADS, KEYS, KEYS) + gap * (jnp.arange(KEYS) >= 4)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    mask = Mask(key_lengths=jnp.full(BATCH, 4))
    with jax.enable_x64(True):
        logits64, values64 = logits.astype(jnp.float64), values.astype(jnp.float64)
        expected = second_order((static(logits64),), values64, mask, "reference")
    actual = second_order((static(logits),), values, mask, "static")
    assert_close(actual, expected, bound=1e-3)


@pytest.mark.parametrize("names", [("static",), ("dot_product", "relative")])
def test_forward_mode_has_no_array_of_logits(names: tuple[str, ...]) -> None:
    """The sequences are so long that ``auto`` does not select the reference route."""
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
