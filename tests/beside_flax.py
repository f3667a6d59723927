"""Shared code of the tests of `MultiHeadAttention` and `attention_fn`, whose reference is Flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import synthesizer_jax as sj
import synthesizer_jax.nnx as snnx
from tests.environment import FAST_COMPILE as FAST

B, Q, K, D, H = 2, 6, 5, 8, 2


def tokens(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def pattern(seed: int, *shape: int) -> jax.Array:
    """A random mask in which every query attends to at least one key."""
    array = np.random.default_rng(seed).random(shape) < 0.6
    array[..., 0] = True
    return jnp.asarray(array)


def close(actual, expected, bound: float = 2e-6) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=bound * max(1, np.abs(y).max()))


def value_and_gradients(forward, *arguments):
    """The value and gradients of a loss with a different weight for every output; and the output."""

    def loss(*arguments):
        y = forward(*arguments)
        return jnp.sum(jnp.sin(jnp.arange(y.size).reshape(y.shape)) * y), y

    function = jax.value_and_grad(loss, argnums=range(len(arguments)), has_aux=True)
    return jax.jit(function, compiler_options=FAST)(*arguments)


LAYERS = {
    "linen": (nn.MultiHeadDotProductAttention, sj.MultiHeadAttention),
    "nnx": (
        lambda h, **o: nnx.MultiHeadAttention(h, D, decode=False, rngs=nnx.Rngs(0), **o),
        lambda h, **o: snnx.MultiHeadAttention(h, D, decode=False, rngs=nnx.Rngs(0), **o),
    ),
}


def applied(layer, *inputs, **options):
    """The output, and the attention weights if they are sown."""
    if isinstance(layer, nn.Module):
        params = {"params": layer.init(jax.random.key(0), *inputs)["params"]}
        y, state = layer.apply(params, *inputs, mutable=["intermediates"], **options)
        return y, state.get("intermediates")
    y, state = nnx.capture(layer, nnx.Intermediate)(*inputs, **options)
    return y, nnx.to_pure_dict(state)
