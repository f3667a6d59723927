"""Hand-written gradients under JAX's transformations, and what takes the place of other derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.attention import attend, banded, dot_product_attention
from synthesizer_jax.attention.derivatives import with_gradient
from tests.attention import cases
from tests.attention.cases import BATCH, HEADS, KEYS, WIDTH

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
    "vmap of grad": lambda f: (
        lambda x, y: jax.vmap(jax.grad(f, (0, 1)), (0, None))(jnp.stack([x, y]), y)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda x, y: jax.vmap(f, (0, None))(jnp.stack([x, y]), y).sum(), (0, 1)
    ),
    "scan of checkpoint": lambda f: jax.grad(scan(checkpoint(f)), (0, 1)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name: str) -> None:
    handwritten = with_gradient(forward, backward, name="residuals")
    actual, expected = (
        jax.jit(TRANSFORMATIONS[name](lambda x, y, f=f: f((x, N, y)).sum()))(X, Y)
        for f in (handwritten, plain)
    )
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


MODES = {
    "forward": lambda f, x: jax.jvp(f, (x,), (x,)),
    "compiled forward": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "forward over reverse": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "reverse over reverse": lambda f, x: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(x),
}


@pytest.mark.parametrize(
    ("route", "mode"),
    [
        ("static", "forward"),
        ("fused", "compiled forward"),
        ("banded", "forward over reverse"),
        ("fused", "reverse over reverse"),
        ("dot_product_attention", "reverse over reverse"),
    ],
)
def test_other_derivatives_name_the_reference(route: str, mode: str) -> None:
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH)
    terms = {
        "static": cases.make_terms(("static",), BATCH, KEYS, KEYS),
        "fused": cases.make_terms(("static", "dot_product"), BATCH, KEYS, KEYS),
        "banded": (banded(cases.normal("weights", 1, 1, HEADS, 3), first=-1),),
    }.get(route)
    own = cases.normal("own", BATCH, HEADS, KEYS, KEYS)

    def loss(values: jax.Array, route: str) -> jax.Array:
        if terms is None:
            x, name = values, route.replace("dot_product_attention", "fused")
            return (dot_product_attention(x, x, x, own, implementation=name) ** 2).sum()
        return (attend(terms, values, q_length=KEYS, implementation=route) ** 2).sum()

    with pytest.raises(TypeError, match='use implementation="reference"'):
        MODES[mode](functools.partial(loss, route=route), values)
    found = MODES[mode](functools.partial(loss, route="reference"), values)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
