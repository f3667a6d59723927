"""Defines a new term in one file outside of the package, and tests that all layers can use it."""

import dataclasses
import functools
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import Attention, DotProduct, Mask, Mixture, PerHead
from synthesizer_jax.alignments import Alignment
from synthesizer_jax.alignments.base import project
from synthesizer_jax.attention import Term, attend, low_rank
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.primitives.parameters import apply_method


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Salience(Term):
    """Logits that depend only on the key: ``logits[b, h, q, k] = x[b, k, h]``."""

    x: Annotated[jax.Array, "b", "k", "h"]

    linear = "x"

    def depends_on_tokens(self, name: str) -> bool:
        return True

    def materialize(self, *, q_length, k_length, query_offset):
        x = self.x.astype(logits_dtype(self.x)).swapaxes(1, 2)[:, :, None]
        return jnp.broadcast_to(x, (*x.shape[:2], q_length, k_length))


class BySalience(Alignment):
    known: bool = False

    @nn.compact
    def __call__(self, queries, keys, context):
        x = project(keys, heads=context.num_heads, width=1, name="salience")
        if self.known:  # as for the package's own terms
            ones = jnp.ones((*queries.shape[:2], context.num_heads, 1), x.dtype)
            return (low_rank(ones, x, token_keys=True),)
        return (Salience(x[..., 0]),)


def pair_of_layers(make):
    return (Attention(4, 3, alignment=make(BySalience(known))) for known in (False, True))


@pytest.mark.parametrize(
    "make",
    [lambda own: Mixture((DotProduct(), own)), lambda own: PerHead((own, DotProduct()))],
    ids=["in a mixture", "of some heads"],
)
def test_layers_know_a_new_term(make):
    new, known = pair_of_layers(make)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 6)), jnp.float32)
    variables = jax.jit(new.init)(jax.random.key(0), x)
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2, 2, 2]])
    for mask in (
        Mask(),
        Mask(causal=True, key_lengths=jnp.array([8, 5])),
        Mask.packed(segments, segments=2, causal=True),
    ):
        y, expected = (jax.jit(layer.apply)(variables, x, mask=mask) for layer in (new, known))
        np.testing.assert_allclose(y, expected, atol=1e-5)
    gradients = [
        jax.jit(jax.grad(lambda v, layer=layer: (layer.apply(v, x) ** 2).sum()))(variables)
        for layer in (new, known)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *gradients)


def test_a_new_term_decodes():
    layer, _ = pair_of_layers(lambda own: Mixture((DotProduct(), own)))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, 6)), jnp.float32)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    expected = jax.jit(layer.apply)(variables, x, mask=Mask(causal=True))
    cache = apply_method(layer.init_cache, variables, x, max_length=6)
    assert [key.shape for key in cache.keys] == [(2, 4, 6, 3), (2, 6, 4)]
    step = jax.jit(functools.partial(apply_method, layer.extend))
    for at in range(6):
        y, cache = step(variables, x[:, at : at + 1], cache)
        np.testing.assert_allclose(y[:, 0], expected[:, at], atol=1e-5)


def test_routes_say_that_they_do_not_support_a_new_term():
    values = jnp.ones((2, 8, 4, 3))
    terms = (Salience(jnp.ones((2, 8, 4))),)
    with pytest.raises(
        ValueError, match=r"'fused' cannot compute this call\. .* term is of type Salience"
    ):
        attend(terms, values, q_length=8, implementation="fused")
    with pytest.raises(
        ValueError, match="term of type Salience has 4 heads, but the values have 3"
    ):
        attend(terms, values[:, :, :3], q_length=8)
