"""Layers of this package in users' NNX and Linen models."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from synthesizer_jax import MIXERS, Attention, DotProduct, Mask, Mixture, Random
from synthesizer_jax import nnx as snnx
from tests.layers.cases import CASES
from tests.layers.contract import LENGTHS, tokens

D = 12


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nnx_equals_linen(name):
    layer, mode = CASES[name].layer, CASES[name].modes[-1]
    x = tokens(0, dtype=np.float32)
    wrapped = snnx.to_nnx(layer, in_features=x.shape[-1], rngs=nnx.Rngs(0))
    variables = snnx.linen_variables(wrapped)
    mask = Mask(causal=mode == "causal", key_lengths=jnp.array(LENGTHS))
    np.testing.assert_array_equal(wrapped(x, mask=mask), layer.apply(variables, x, mask=mask))


def test_every_mixer_has_an_nnx_class():
    assert set(MIXERS) <= set(dir(snnx))
    with pytest.raises(AttributeError, match="has no attribute 'Attentoin'"):
        snnx.Attentoin  # noqa: B018


class UserModel(nnx.Module):
    """A user's NNX model."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(20, D, rngs=rngs)
        self.mix = snnx.Attention(
            3,
            4,
            alignment=Mixture((DotProduct(), Random(max_length=8))),
            dropout_rate=0.5,
            in_features=D,
            rngs=rngs,
        )
        self.head = nnx.Linear(D, 20, rngs=rngs)

    def __call__(self, x, **options):
        h = self.embed(x)
        return self.head(h + self.mix(h, mask=Mask(causal=True), **options))


@pytest.mark.slow
def test_a_users_nnx_model_trains_splits_and_saves(tmp_path):
    model, x = UserModel(nnx.Rngs(0)), jnp.arange(16).reshape(2, 8) % 7
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = model(x[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, x[:, 1:]).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(30)]
    model.eval()
    assert losses[-1] < 0.5 * losses[0]
    graph, state = nnx.split(model)
    again = nnx.merge(graph, state)
    np.testing.assert_array_equal(again(x), model(x))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "params", params)
    fresh = UserModel(nnx.Rngs(1))
    fresh.eval()
    nnx.update(fresh, nnx.State(restored))
    np.testing.assert_array_equal(fresh(x), model(x))


class UserLinenModel(nn.Module):
    """A user's Linen model, with a layer of this package as a field and as a submodule."""

    mixer: nn.Module

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(D)(x)
        h = h + self.mixer(h, mask=Mask(causal=True))
        return nn.Dense(3)(h + Attention(2, 5, alignment=Random(max_length=9), name="second")(h))


def test_a_users_linen_model():
    model = UserLinenModel(Attention(3, 4))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 5)), jnp.float32)
    params = model.init(jax.random.key(0), x)["params"]
    assert set(params) == {"Dense_0", "Dense_1", "mixer", "second"}
    loss = lambda p: (model.apply({"params": p}, x) ** 2).sum()
    gradients = jax.jit(jax.grad(loss))(params)
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(gradients))
