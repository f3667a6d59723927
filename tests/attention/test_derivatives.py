"""What takes the place of derivatives that fast routes do not have."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from synthesizer_jax.attention import attend, banded, dot_product_attention
from tests.attention import cases
from tests.attention.cases import BATCH, HEADS, KEYS, WIDTH

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
