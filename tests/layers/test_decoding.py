"""Decoding that cannot be misused: the cache knows how far it is filled, and says what does not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import (
    Attention,
    DotProduct,
    Gaussian,
    LightweightConvolution,
    Mask,
    Mixture,
    PerHead,
    Random,
    RelativeBias,
    SentenceFeedForward,
)
from synthesizer_jax.parameters import apply_method

ROOM, D = 8, 6
LAYERS = {
    "dot product": Attention(2, 3),
    "random and relative": Attention(
        2, 3, alignment=Mixture((DotProduct(), Random(max_length=ROOM), RelativeBias()))
    ),
    "gaussian": Attention(2, 3, alignment=Gaussian((-1, 0))),
    "some gaussian": Attention(2, 3, alignment=PerHead((Gaussian((0,)), DotProduct()))),
    "convolution": LightweightConvolution(width=3),
    "sentence": SentenceFeedForward(ROOM, 5, 2, 3, causal=True),
}
ENDLESS = ("gaussian", "convolution")  # windows of weights
EXACT = (*ENDLESS, "sentence")  # cannot go back


@pytest.fixture(scope="module", params=LAYERS)
def made(request):
    """A layer's name, the layer, its variables, tokens, and what a full pass makes of them."""
    layer = LAYERS[request.param]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, ROOM, D)), jnp.float32)
    variables = layer.init(jax.random.key(0), x, mask=Mask(causal=True))
    return request.param, layer, variables, x, layer.apply(variables, x, mask=Mask(causal=True))


def start(made, n=3):
    _, layer, variables, x, _ = made
    return prefill(layer, variables, x[:, :n])


def prefill(layer, variables, x, mask=None):
    cache = apply_method(layer.init_cache, variables, x, max_length=ROOM)
    return apply_method(layer.extend, variables, x, cache, mask=mask)


@pytest.mark.slow
def test_steps_need_neither_mask_nor_position(made):
    """They are causal and follow one another, a token or several at a time, compiled or not."""
    _, layer, variables, x, whole = made
    y, cache = start(made)
    parts = [y]
    eager = lambda x, cache: apply_method(layer.extend, variables, x, cache)
    step = jax.jit(eager)
    for at, count in ((3, 2), (5, 1), (6, 1), (7, 1)):
        run = step if at != 5 else eager
        y, cache = run(x[:, at : at + count], cache)
        assert cache.length == at + count
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-5)
    assert step._cache_size() == 2  # two lengths of x: the cache's own type never changes


@pytest.mark.slow
def test_a_mask_cannot_open_what_is_not_written(made):
    name, layer, variables, x, whole = made
    open_mask = Mask(key_lengths=jnp.array([ROOM, ROOM]))
    y, _ = prefill(layer, variables, x[:, :3], open_mask)
    np.testing.assert_allclose(y, whole[:, :3], atol=1e-5)
    if name == "dot product":  # a prefix does open later tokens, as far as they are there
        prefix = Mask(prefix_lengths=jnp.array([6, 6]))
        seen, _ = prefill(layer, variables, x[:, :3], prefix)
        np.testing.assert_allclose(seen, layer.apply(variables, x[:, :3]), atol=1e-5)


def test_past_the_end(made):
    """An error where it is known, NaN where it is traced; windows have no end."""
    name, layer, variables, x, _ = made
    _, cache = start(made, ROOM)
    step = lambda x, cache: apply_method(layer.extend, variables, x, cache)
    if name in ENDLESS:
        y, _ = jax.jit(step)(x[:, :1], cache)
        assert np.all(np.isfinite(y))
        return
    with pytest.raises(
        ValueError, match=f"max_length={ROOM} but (was given )?{ROOM + 1} positions"
    ):
        step(x[:, :1], cache)
    y, after = jax.jit(step)(x[:, :1], cache)
    assert np.all(np.isnan(y))
    assert np.all(np.isnan(jax.jit(step)(x[:, :1], after)[0]))


def test_a_position_that_is_not_where_the_cache_ends(made):
    name, layer, variables, x, whole = made
    _, cache = start(made, 4)
    step = lambda x, cache, at: apply_method(layer.extend, variables, x, cache, position=at)
    with pytest.raises(ValueError, match="position=5 but the cache holds 4 tokens"):
        step(x[:, 5:6], cache, 5)
    assert np.all(np.isnan(jax.jit(step)(x[:, 5:6], cache, 5)[0]))
    if name in EXACT:
        with pytest.raises(ValueError, match="position=3 but the cache holds 4 tokens"):
            step(x[:, 3:4], cache, 3)
        assert np.all(np.isnan(jax.jit(step)(x[:, 3:4], cache, 3)[0]))
    else:  # decoded again from there
        y, cache = jax.jit(step)(x[:, 3:5], cache, 3)
        np.testing.assert_allclose(y, whole[:, 3:5], atol=1e-5)
        assert cache.length == 5


def test_positions_need_the_cache_of_what_stands_before(made):
    _, layer, variables, x, _ = made
    empty = apply_method(layer.init_cache, variables, x, max_length=ROOM)
    with pytest.raises(ValueError, match="position=2 but the cache holds 0 tokens"):
        apply_method(layer.extend, variables, x[:, :2], empty, position=2)
    with pytest.raises(ValueError, match="query_offset=2 in self-attention without a cache"):
        layer.apply(variables, x[:, :2], mask=Mask(causal=True, query_offset=2))


@pytest.mark.slow
def test_examples_of_different_lengths_end_where_they_end(made):
    name, layer, variables, x, whole = made
    lengths = jnp.array([5, 3])
    _, cache = prefill(layer, variables, x[:, :5], Mask(key_lengths=lengths))
    np.testing.assert_array_equal(cache.length, lengths)
    new = jnp.stack([x[0, 5:8], x[1, 3:6]])
    extend = functools.partial(apply_method, layer.extend, variables)
    y, after = jax.jit(extend)(new, cache)
    np.testing.assert_allclose(y[1], whole[1, 3:6], atol=1e-5)
    np.testing.assert_array_equal(after.length, [8, 6])
    # A second turn, whose first example has nothing more to say.
    only = Mask(key_lengths=jnp.array([5, 4]))
    for mask in (only, Mask(key_valid=jnp.array([[False], [True]]))):
        y, after = extend(new[:, :1], cache, mask=mask)
        np.testing.assert_allclose(y[1, 0], whole[1, 3], atol=1e-5)
        np.testing.assert_array_equal(after.length, [5, 4])
    with pytest.raises(ValueError, match=f"it has {ROOM} entries for 3 tokens"):
        extend(new, cache, mask=Mask(key_valid=jnp.ones((2, ROOM), bool)))
    with pytest.raises(ValueError, match=r"position=5 but the cache holds \[5 3\] tokens"):
        extend(new[:, :1], cache, position=5)
    if name not in ENDLESS:  # the first example leaves the cache, the second does not
        y, _ = jax.jit(extend)(jnp.pad(new, ((0, 0), (0, 1), (0, 0))), cache)
        assert np.all(np.isnan(y[0]))
        np.testing.assert_allclose(y[1, :3], whole[1, 3:6], atol=1e-5)


@pytest.mark.parametrize("layer", [Attention(2, 3, alignment=Random(4)), SentenceFeedForward(4, 5)])
def test_queries_of_cross_attention_past_a_table(layer):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, D)), jnp.float32)
    kv = x[:, :3] + 1
    variables = layer.init(jax.random.key(0), x[:, :4], kv)
    whole = layer.apply(variables, x[:, :4], kv)
    extend = functools.partial(apply_method, layer.extend, variables)
    step = jax.jit(extend)
    cache = apply_method(layer.init_cache, variables, x, kv, max_length=4)
    for at in range(4):
        y, cache = step(x[:, at : at + 1], cache)
        np.testing.assert_allclose(y, whole[:, at : at + 1], atol=1e-5)
    y, _ = step(x[:, 4:], cache)
    assert np.all(np.isnan(y))
    with pytest.raises(ValueError, match="max_length=4 but was given 5 positions"):
        extend(x[:, 4:], cache)
    with pytest.raises(ValueError, match="max_length=4 but was given 5 positions"):
        apply_method(layer.init_cache, variables, x, kv, max_length=5)
