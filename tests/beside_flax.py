"""What the tests of `MultiHeadAttention` and `attention_fn` share; Flax is their oracle."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import synthesizer_jax as sj
import synthesizer_jax.nnx as snnx

B, Q, K, D, H = 2, 6, 5, 8, 2
FAST = {"xla_backend_optimization_level": 0}


def tokens(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def pattern(seed: int, *shape: int) -> jax.Array:
    """A mask array in which every query sees some keys."""
    drawn = np.random.default_rng(seed).random(shape) < 0.6
    drawn[..., 0] = True
    return jnp.asarray(drawn)


def close(found, expected, bound: float = 2e-6) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=0, atol=bound * max(1, np.abs(other).max()))


def value_and_gradients(run, *arguments):
    """Of a loss that weighs every output differently; and the output."""

    def loss(*arguments):
        y = run(*arguments)
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
    """The output, and the attention weights where they are sown."""
    if isinstance(layer, nn.Module):
        params = {"params": layer.init(jax.random.key(0), *inputs)["params"]}
        y, state = layer.apply(params, *inputs, mutable=["intermediates"], **options)
        return y, state.get("intermediates")
    y, state = nnx.capture(layer, nnx.Intermediate)(*inputs, **options)
    return y, nnx.to_pure_dict(state)
