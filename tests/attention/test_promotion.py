"""No dtype of the attention core is promoted by accident: strict promotion, forward and backward."""

import jax
import jax.numpy as jnp
import pytest

from synthesizer_jax.attention import Mask, attend, attention_weights, banded, static
from tests.attention import cases
from tests.attention.cases import BATCH, HEADS, KEYS, WIDTH

MASKS = cases.self_masks() | cases.packed_masks() | {"none": Mask()}
ROUTES = {
    "static": ("static", "relative", "factorized"),
    "fused": cases.EVERY_TERM,
    "reference": cases.EVERY_TERM,
    "banded": (),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mask", ["none", "causal and padding", "packed causal"])
@pytest.mark.parametrize("route", ROUTES)
def test_routes_promote_nothing(route, mask, dtype):
    terms = cases.make_terms(ROUTES[route], BATCH, KEYS, KEYS)
    if route == "banded":
        terms = (banded(cases.normal("weights", 1, KEYS, HEADS, 3), first=-2),)
    terms = jax.tree.map(lambda x: x.astype(dtype), terms)
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH, dtype=dtype)

    def loss(terms, values):
        y = attend(terms, values, mask=MASKS[mask], q_length=KEYS, implementation=route)
        assert y.dtype == dtype
        return y.astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"):
        gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), terms, values)
        weights = jax.eval_shape(
            lambda t: attention_weights(t, mask=MASKS[mask], k_length=KEYS), terms
        )
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype(dtype)}
    assert weights.dtype == jnp.float32


def test_logits_of_another_dtype_than_the_values():
    values = cases.normal("values", BATCH, KEYS, HEADS, WIDTH, dtype=jnp.bfloat16)
    terms = (static(cases.normal("static", HEADS, KEYS, KEYS)),)
    for route in ("static", "fused", "reference"):
        with jax.numpy_dtype_promotion("strict"):
            y = jax.eval_shape(lambda t, v, r=route: attend(t, v, implementation=r), terms, values)
        assert y.dtype == jnp.bfloat16
