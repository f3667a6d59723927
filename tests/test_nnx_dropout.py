"""Dropout of our NNX modules beside `flax.nnx.MultiHeadAttention` and `flax.nnx.Dropout`."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from synthesizer_jax import DotProduct, Mixture, Random
from synthesizer_jax import nnx as snnx

D, HEADS, LENGTH = 8, 2, 6
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, D)), jnp.float32)
BOTH = Mixture((DotProduct(), Random(max_length=8)))


def flax_attention(rngs, **options):
    return nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs, **options)


def our_attention(rngs, **options):
    return snnx.Attention(HEADS, D // HEADS, alignment=BOTH, in_features=D, rngs=rngs, **options)


def flax_dropout(rngs, *, dropout_rate=0.0, **options):
    return nnx.Dropout(dropout_rate, rngs=rngs, **options)


def differs(a, b) -> bool:
    return bool(np.any(np.asarray(a) != np.asarray(b)))


@pytest.fixture(params=[flax_attention, our_attention], ids=["flax", "ours"])
def make_layer(request):
    """Each test below holds for Flax's attention and for ours."""
    return request.param


@pytest.mark.parametrize("streams", [{"default": 0}, {"params": 0, "dropout": 1}])
def test_every_call_draws_a_new_mask_until_eval(make_layer, streams):
    layer = make_layer(nnx.Rngs(**streams), dropout_rate=0.5)
    layer.train()
    assert differs(layer(X), layer(X))
    layer.eval()
    assert not differs(layer(X), layer(X))
    layer.train()
    assert differs(layer(X), layer(X))


def test_a_rate_of_zero_needs_no_stream(make_layer):
    layer = make_layer(nnx.Rngs(0), dropout_rate=0.0)
    assert layer.rngs is None
    assert not differs(layer(X), layer(X, deterministic=False))


def test_the_argument_overrides_the_attribute(make_layer):
    layer = make_layer(nnx.Rngs(0), dropout_rate=0.5, deterministic=True)
    assert not differs(layer(X), layer(X))
    assert differs(layer(X, deterministic=False), layer(X))
    layer.train()
    assert not differs(layer(X, deterministic=True), layer(X, deterministic=True))


def test_streams_of_the_call_override_those_of_the_module(make_layer):
    layer = make_layer(nnx.Rngs(0), dropout_rate=0.5, deterministic=False)
    count = int(layer.rngs.count[...])
    outputs = [layer(X, rngs=nnx.Rngs(dropout=s)) for s in (1, 1, 2)]
    assert not differs(outputs[0], outputs[1]) and differs(outputs[0], outputs[2])
    assert not differs(outputs[0], layer(X, rngs=nnx.Rngs(1)))
    stream = nnx.Rngs(dropout=1).dropout
    assert not differs(outputs[0], layer(X, rngs=stream)) and int(stream.count[...]) == 1
    assert int(layer.rngs.count[...]) == count
    layer.eval()
    assert not differs(layer(X, rngs=nnx.Rngs(1)), layer(X))


def test_views_and_attributes(make_layer):
    layer = make_layer(nnx.Rngs(0), dropout_rate=0.5, deterministic=False)
    view = nnx.view(layer, deterministic=True)
    assert not differs(view(X), view(X)) and differs(layer(X), layer(X))
    quiet = nnx.with_attributes(layer, deterministic=True)
    assert not differs(quiet(X), view(X))
    layer.set_attributes(deterministic=True)
    assert not differs(layer(X), view(X))
    assert "deterministic: bool | None" in nnx.view_info(layer)


def test_two_layers_of_one_stream_differ_and_a_seed_repeats(make_layer):
    rngs = nnx.Rngs(params=0, dropout=1)
    first, second = (make_layer(rngs, dropout_rate=0.5, deterministic=False) for _ in range(2))
    assert differs(
        jax.random.key_data(first.rngs.key[...]), jax.random.key_data(second.rngs.key[...])
    )
    again = make_layer(nnx.Rngs(params=0, dropout=1), dropout_rate=0.5, deterministic=False)
    assert not differs(first(X), again(X))


def test_deterministic_not_set_is_an_error(make_layer):
    layer = make_layer(nnx.Rngs(0), dropout_rate=0.5, deterministic=None)
    with pytest.raises(ValueError, match="deterministic"):
        layer(X)
    layer(X, deterministic=True)


def test_a_missing_stream_is_an_error(make_layer):
    layer = make_layer(nnx.Rngs(0), dropout_rate=0.5, deterministic=False, keep_rngs=False)
    with pytest.raises(ValueError, match="rngs"):
        layer(X)
    assert differs(layer(X, rngs=nnx.Rngs(1)), layer(X, deterministic=True))


def test_error_messages():
    layer = our_attention(nnx.Rngs(params=0), dropout_rate=0.5)
    message = (
        "Attention: dropout needs a random stream; pass rngs with a stream 'dropout' or a default "
        "stream to the constructor or to the call, or set deterministic=True"
    )
    for options in ({}, {"rngs": nnx.Rngs(params=1)}):
        with pytest.raises(ValueError, match="dropout needs") as error:
            layer(X, **options)
        assert str(error.value) == message
    with pytest.raises(TypeError, match=r"rngs is a int; pass nnx\.Rngs"):
        layer(X, rngs=3)


def test_dropout_is_on_from_the_start_as_in_nnx_dropout():
    ones = jnp.ones((2, LENGTH, D))
    for make_layer in (flax_dropout, our_attention):
        layer = make_layer(nnx.Rngs(0), dropout_rate=0.5)
        assert layer.deterministic is False and differs(layer(ones), layer(ones))
        key = jax.random.key(3)
        assert not differs(layer(ones, rngs=key), layer(ones, rngs=key))


def test_dropout_equals_linen():
    layer = our_attention(nnx.Rngs(0), dropout_rate=0.5)
    key = jax.random.key(7)
    variables = snnx.linen_variables(layer)
    np.testing.assert_array_equal(
        layer(X, rngs=key), layer.config.apply(variables, X, rngs={"dropout": key})
    )
    np.testing.assert_array_equal(layer(X, deterministic=True), layer.config.apply(variables, X))


class Net(nnx.Module):
    def __init__(self, make_layer, rngs):
        self.mix = make_layer(rngs, dropout_rate=0.5, deterministic=False)
        self.head = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.mix(x)).mean()


def test_a_compiled_step_draws_a_new_mask_and_trains(make_layer):
    net = Net(make_layer, nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        loss, gradients = nnx.value_and_grad(lambda net: net(X))(net)
        optimizer.update(net, gradients)
        return loss

    before, count = net.mix.out["kernel"][...] if make_layer is our_attention else None, 0
    losses = []
    for _ in range(2):
        losses.append(float(step(net, optimizer)))
        count += 1
    assert losses[0] != losses[1] and int(net.mix.rngs.count[...]) == count
    if before is not None:
        assert differs(before, net.mix.out["kernel"][...])
    # A clone and a merged copy go on where the streams stand.
    graph, params, others = nnx.split(net, nnx.Param, ...)
    copies = [nnx.clone(net), nnx.merge(graph, params, others)]
    np.testing.assert_array_equal(*(copy(X) for copy in copies))
    compiled = nnx.jit(lambda net: net(X))
    assert differs(compiled(net), compiled(net))
    net.eval()
    assert not differs(compiled(net), compiled(net))


def test_remat(make_layer):
    layer = make_layer(nnx.Rngs(0), dropout_rate=0.5, deterministic=False)
    gradients = []
    for call in (nnx.remat(lambda layer, x: layer(x)), lambda layer, x: layer(x)):
        gradients.append(
            nnx.grad(lambda layer, call=call: (call(layer, X) ** 2).sum())(nnx.clone(layer))
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *gradients)


def test_vmap_and_scan_over_layers(make_layer):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return make_layer(rngs, dropout_rate=0.5, deterministic=False)

    layers = create(nnx.Rngs(0))

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return layer(x)

    assert differs(forward(layers, X), forward(layers, X))
    layers.eval()
    once = forward(layers, X)
    assert not differs(once, forward(layers, X))
    x = X
    for i in range(3):
        layer = nnx.merge(*slice_of(layers, i))
        x = layer(x)
    np.testing.assert_allclose(once, x, rtol=1e-5, atol=1e-5)


def slice_of(layers, i):
    graph, state = nnx.split(layers)
    return graph, jax.tree.map(lambda leaf: leaf[i], state)


MIXERS = {
    "Attention": (2, 4),
    "TalkingHeads": (2, 4),
    "DynamicConvolution": (3,),
    "LightweightConvolution": (3,),
    "Linformer": (2, 4, 8),
}


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_with_a_rate(name):
    layer = getattr(snnx, name)(*MIXERS[name], dropout_rate=0.5, in_features=D, rngs=nnx.Rngs(0))
    assert differs(layer(X), layer(X))
    layer.eval()
    assert not differs(layer(X), layer(X))


class Foreign(linen.Module):
    """A Linen layer whose dropout no field tells of."""

    @linen.compact
    def __call__(self, x):
        y = linen.Dense(x.shape[-1])(x)
        if not self.has_rng("dropout"):
            return y
        return y * jax.random.bernoulli(self.make_rng("dropout"), 0.5, y.shape)


def test_dropout_of_a_linen_layer_that_no_field_tells_of():
    layer = snnx.to_nnx(Foreign(), in_features=D, rngs=nnx.Rngs(0))
    assert differs(layer(X), layer(X))
    with pytest.raises(ValueError, match="dropout needs a random stream"):
        snnx.to_nnx(Foreign(), in_features=D, rngs=nnx.Rngs(params=0))(X)
