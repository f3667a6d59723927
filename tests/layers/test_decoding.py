"""Tests that decoding cannot be misused.

The cache knows how full it is, and errors say what is wrong.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.primitives.parameters import apply_method
from tests.layers.contract import general

ROOM, D = 8, 6
MIXTURE = sj.Mixture((sj.DotProduct(), sj.Random(max_length=ROOM), sj.RelativeBias()))
LAYERS = {
    "mixture": sj.Attention(2, 3, alignment=MIXTURE),
    "convolution": sj.LightweightConvolution(width=3),  # a convolution can decode forever
    "sentence": sj.SentenceFeedForward(ROOM, 5, 2, 3, causal=True),
}
X = np.float32(np.random.default_rng(0).normal(size=(2, ROOM + 5, D)))


class Made:
    """A layer with variables, the outputs of a full pass, and compiled decoding steps."""

    def __init__(self, layer):
        self.layer = layer
        self.endless = isinstance(layer, sj.LightweightConvolution)
        self.variables = general(layer.init, X[:, :ROOM], mask=sj.Mask(causal=True))
        self.whole = self.apply(X[:, :ROOM], mask=sj.Mask(causal=True))
        self.step = jax.jit(self.extend)

    def apply(self, x, **options):
        return jax.jit(functools.partial(self.layer.apply, self.variables))(x, **options)

    def extend(self, x, cache, **options):
        return apply_method(self.layer.extend, self.variables, x, cache, **options)

    def start(self, x, **options):
        init = functools.partial(apply_method, self.layer.init_cache, self.variables, x)
        cache = jax.jit(functools.partial(init, max_length=ROOM))()
        return self.step(x, cache, **options)

    def refuses(self, message, *arguments, **options):
        """Checks that a call raises an error, and that a compiled call returns NaN."""
        with pytest.raises(ValueError, match=message):
            self.extend(*arguments, **options)
        y, cache = self.step(*arguments, **options)
        assert np.all(np.isnan(y))
        return cache


@pytest.fixture(scope="module", params=LAYERS)
def made(request):
    return Made(LAYERS[request.param])


def test_steps_follow_the_cached_tokens(made):
    _, cache = made.start(X[:, :4])
    made.refuses("position is 5, but the cache holds 4 tokens", X[:, 5:6], cache, position=5)
    if isinstance(made.layer, sj.Attention):  # decoding can restart from an earlier position
        y, again = made.step(X[:, 3:4], cache, position=3)
        np.testing.assert_allclose(y, made.whole[:, 3:4], atol=1e-5)
        assert again.length == 4
    else:
        made.refuses("position is 3, but the cache holds 4 tokens", X[:, 3:4], cache, position=3)
    if made.endless:
        y, _ = made.step(X[:, 4:9], cache)
        assert np.all(np.isfinite(y))
    else:
        message = f"max_length={ROOM}, but (it was given )?{ROOM + 1} positions"
        after = made.refuses(message, X[:, 4:9], cache)
        assert np.all(np.isnan(made.step(X[:, :1], after)[0]))


def test_examples_of_different_lengths_fill_the_cache_at_different_steps(made):
    _, cache = made.start(X[:, :5], mask=sj.Mask(key_lengths=jnp.array([5, 3])))
    np.testing.assert_array_equal(cache.length, [5, 3])
    # The first example fills the cache, but the second example does not.
    new = jnp.stack([X[0, 5:9], X[1, 3:7]])
    y, after = made.step(new, cache)
    np.testing.assert_allclose(y[1], made.whole[1, 3:7], atol=1e-5)
    assert np.all(np.isnan(y[0])) != made.endless
    # The second turn of a dialogue, in which the first example has no new tokens.
    for mask in (
        sj.Mask(key_lengths=jnp.array([5, 4])),
        sj.Mask(key_valid=jnp.array([[False], [True]])),
    ):
        y, after = made.step(new[:, :1], cache, mask=mask)
        np.testing.assert_allclose(y[1, 0], made.whole[1, 3], atol=1e-5)
        np.testing.assert_array_equal(after.length, [5, 4])
    with pytest.raises(ValueError, match=f"it has {ROOM} entries for 4 tokens"):
        made.extend(new, cache, mask=sj.Mask(key_valid=jnp.ones((2, ROOM), bool)))


def test_a_mask_of_a_prefix_only_opens_decoded_tokens():
    made = Made(LAYERS["mixture"])
    x = X[:, :3]
    closed, _ = made.start(x, mask=sj.Mask(key_lengths=jnp.array([ROOM, ROOM])))
    np.testing.assert_allclose(closed, made.whole[:, :3], atol=1e-5)
    seen, _ = made.start(x, mask=sj.Mask(prefix_lengths=jnp.array([6, 6])))
    np.testing.assert_allclose(seen, made.apply(x), atol=1e-5)


TABLES = [sj.Attention(2, 3, sj.Random(4)), sj.SentenceFeedForward(4, 5)]


@pytest.mark.parametrize("layer", [*TABLES, sj.Attention(2, 3), sj.TalkingHeads(2, 3)])
def test_queries_of_cross_attention_past_the_end(layer):
    x, kv = X[:, :5], X[:, 5:8]
    variables = general(layer.init, x[:, :4], kv)
    init = functools.partial(apply_method, layer.init_cache, variables, x, kv)
    extend = functools.partial(apply_method, layer.extend, variables)
    _, cache = jax.jit(lambda: extend(x[:, :4], init(max_length=4)))()
    assert np.all(np.isnan(jax.jit(extend)(x[:, 4:], cache)[0]))
    steps = [lambda: extend(x[:, 4:], cache), lambda: init(max_length=5)]
    for step in steps if layer in TABLES else steps[:1]:
        with pytest.raises(ValueError, match=r"max_length=4, but (it was given )?5 positions"):
            jax.eval_shape(step)


@pytest.mark.parametrize("kind", ["self", "cross", "positions of examples"])
def test_steps_copy_no_keys_and_padding_of_a_memory_has_no_effect(kind):
    """Decoding steps do not copy cached keys, and padding of a memory has no effect.

    Storing keys as ``[b, h, width, k]`` would require a copy of the cache in every step.
    """
    layer = sj.Attention(2, 3)
    variables = general(layer.init, X[:, :ROOM])
    memory, length = ((X,), X.shape[1]) if kind == "cross" else ((), ROOM)
    given = {"mask": sj.Mask(key_lengths=jnp.array([11, 13]))} if memory else {}

    def decode(x, *memory):
        cache = apply_method(layer.init_cache, variables, x, *memory, max_length=ROOM, **given)

        def step(cache, i):
            at = {"position": jnp.array([i, i])} if "positions" in kind else {}
            token = jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)
            y, cache = apply_method(layer.extend, variables, token, cache, **given, **at)
            return dataclasses.replace(cache, length=i + 1), y[:, 0]

        return jax.lax.scan(step, dataclasses.replace(cache, length=0), jnp.arange(ROOM))[1]

    compiled = jax.jit(decode).lower(X[:, :ROOM], *memory).compile()
    assert not re.search(rf"= f32\[2,(1,)?2,3,{length}\]", compiled.as_text())
    if memory:
        unknown = np.where(np.arange(length)[None, :, None] < [[[11]], [[13]]], X, np.nan)
        np.testing.assert_array_equal(compiled(X[:, :ROOM], unknown), compiled(X[:, :ROOM], X))


def test_a_mask_of_another_memory_is_named_and_one_that_is_missing():
    layer = sj.Attention(2, 3)
    mask = sj.Mask(key_valid=jnp.ones((2, 9), bool))
    variables = general(layer.init, X, X)
    init = functools.partial(apply_method, layer.init_cache, variables, X, X, max_length=ROOM)
    with pytest.raises(
        ValueError, match=r"Mask.key_valid has shape \(2, 9\), but it must be .*\[2 or 1, 13\]"
    ):
        init(mask=mask)
    cache = init(mask=sj.Mask(key_lengths=jnp.array([11, 13])))
    with pytest.raises(ValueError, match=r"created with a mask of its keys\. Pass the same mask"):
        apply_method(layer.extend, variables, X[:, :1], cache)
