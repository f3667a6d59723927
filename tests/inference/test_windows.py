"""Tests that attention with a window needs only the window's tokens in its cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import synthesizer_jax as sj
from synthesizer_jax import nnx as snnx
from synthesizer_jax.inference import Decoding, decode_sequences
from synthesizer_jax.inference.decoding import run_decoding
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.models import Block, FeedForward, LanguageModel, Run, Size, Stack, t5
from synthesizer_jax.primitives.parameters import apply_method

VOCAB, WINDOW, LENGTH = 13, 3, 9
INPUTS = np.random.default_rng(0).integers(2, VOCAB, (4, 7))
INPUTS[1, 4:] = INPUTS[2, 1:] = INPUTS[3, :2] = 0


def blocks(windows, cross=None):
    options = {"num_kv_heads": 1, "sinks": True}
    layers = [
        sj.Attention(2, 4, sj.DotProduct(rotary_base=10.0), window=w, **options) for w in windows
    ]
    return Stack(
        tuple(Run(Block(layer, FeedForward(16), cross_mixer=cross), 1) for layer in layers)
    )


def encoder_decoder():
    base = t5(Size(8, 1, 16, 2, 4), vocab_size=VOCAB)
    return base.copy(decoder=blocks((WINDOW, 1), base.decoder.runs[0].block.cross_mixer))


def language_model(**options):
    return LanguageModel(vocab_size=VOCAB, d_model=8, decoder=blocks((WINDOW, None)), **options)


@pytest.mark.parametrize(
    ("make", "beams", "room"),
    [(encoder_decoder, 1, 0), (language_model, 3, LENGTH + INPUTS.shape[1])],
)
def test_texts_are_those_of_the_whole_cache(make, beams, room, monkeypatch):
    """Texts are the same with a cache of the window and with a complete cache.

    The test covers greedy decoding and beam search. Inputs may be longer than the window and differ
    in length.
    """
    model = make()
    decoding = Decoding(max_length=LENGTH, min_length=7, beams=beams, samples=beams)
    variables = jax.tree.map(
        lambda x: 1.5 * x, jax.jit(model.init)(jax.random.key(0), INPUTS, INPUTS)
    )
    init_cache = functools.partial(apply_method, model.init_cache, max_length=LENGTH)
    cache = jax.eval_shape(init_cache, variables, INPUTS)
    assert [layer.self_attention.capacity for layer in cache.layers] == [WINDOW - 1, room]

    def run():
        """Decodes the inputs."""
        return decode_sequences(variables, jnp.asarray(INPUTS), model=model, decoding=decoding)

    found = run()
    monkeypatch.setattr(AttentionBase, "shorten", lambda self, cache: cache)
    run_decoding.clear_cache()
    whole = run()
    run_decoding.clear_cache()
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_allclose(found.scores, whole.scores, rtol=1e-4, atol=1e-5)
    assert len({tuple(row) for row in np.asarray(found.tokens[:, 0]).tolist()}) > 2


@pytest.mark.parametrize(
    ("layer", "is_nnx"),
    [
        (sj.Attention(2, 4, window=3), False),
        (sj.Attention(2, 4, window=3), True),
        (sj.Attention(2, 4, alignment=sj.Gaussian(offsets=(-1, 0), sigma=0.3)), False),
        (sj.LightweightConvolution(width=3), False),
    ],
    ids=["window", "window of NNX", "Gaussian", "convolution"],
)
def test_padding_of_a_prompt_has_no_effect_in_a_window(layer, is_nnx):
    """In a window, the padding of a prompt has no effect.

    Padding may be at the end or in front, and any field of the mask may say which tokens are real.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 6)), jnp.float32)
    causal = sj.Mask(causal=True)
    variables = jax.jit(functools.partial(layer.init, mask=causal))(jax.random.key(0), x)
    at_end = jnp.arange(5) < jnp.array([[5], [2]])
    right = jnp.where(at_end[..., None], x[:, :5], jnp.nan)
    left = right.at[1].set(jnp.roll(right[1], 3, axis=0))
    prompts = [
        (right, sj.Mask(key_lengths=jnp.array([5, 2]))),
        (right, sj.Mask(key_valid=at_end)),
        (left, sj.Mask(key_valid=~jnp.isnan(left[..., 0]))),
    ]

    module = snnx.Attention(2, 4, window=3, in_features=6, rngs=nnx.Rngs(0)) if is_nnx else None
    variables = variables if module is None else snnx.linen_variables(module)

    def method(name):
        if module is not None:
            return getattr(module, name)
        return functools.partial(apply_method, getattr(layer, name), variables)

    @jax.jit
    def run():
        found = []
        for prompt, mask in prompts:
            cache = method("init_cache")(prompt, max_length=8, whole=False)
            y, cache = method("extend")(prompt, cache, mask=mask)
            new = jnp.stack([x[0, 5:7], x[1, 2:4]])
            first, cache = method("extend")(new[:, :1], cache)
            second, _ = method("extend")(new[:, 1:], cache)
            found.append(jnp.concatenate([y, first, second], axis=1))
        return found, layer.apply(variables, x, mask=causal)

    found, whole = run()
    for (prompt, _), y in zip(prompts, found, strict=True):
        real = ~np.isnan(prompt[..., 0])
        for example, n in enumerate((5, 2)):
            np.testing.assert_allclose(y[example, :5][real[example]], whole[example, :n], atol=1e-5)
            np.testing.assert_array_equal(y[example, :5][~real[example]], 0)
            np.testing.assert_allclose(y[example, 5:], whole[example, n : n + 2], atol=1e-5)


@pytest.mark.parametrize("beams", [False, True], ids=["rows", "beams"])
def test_a_prefix_is_seen_beyond_a_window(beams):
    """Targets see a prefix even if it is longer than the window.

    The test covers decoding steps and training, with two rows of targets for each prefix.
    """
    model = language_model(prefix=True)
    targets = np.random.default_rng(1).integers(2, VOCAB, (2 * len(INPUTS), 4))
    inputs = np.repeat(INPUTS, 2, axis=0)

    @jax.jit
    def run(variables):
        cache = apply_method(model.init_cache, variables, INPUTS, max_length=4)
        if beams:
            cache = cache.share_among_beams(2)
        else:
            cache = cache.map_rows(lambda x: jnp.repeat(x, 2, axis=0))

        def step(cache, token):
            """Decodes one token."""
            return apply_method(model.extend, variables, token[:, None], cache)[::-1]

        _, states = jax.lax.scan(step, cache, jnp.asarray(targets.T))
        return states[:, :, 0].swapaxes(0, 1), model.apply(
            variables, inputs, targets, method=model.hidden
        )

    stepped, whole = run(jax.jit(model.init)(jax.random.key(0), inputs, targets))
    np.testing.assert_allclose(stepped, whole, atol=1e-5)


def test_a_window_has_no_room_for_a_bias_of_all_positions():
    layer = sj.Attention(2, 4, window=3)
    x = jnp.ones((1, 5, 8))
    variables = layer.init(jax.random.key(0), x)
    short = apply_method(layer.init_cache, variables, x, max_length=8, whole=False)
    assert short.capacity == 2
    assert apply_method(layer.init_cache, variables, x, max_length=8).capacity == 8
    with pytest.raises(ValueError, match="create the cache with whole=True"):
        apply_method(
            layer.extend, variables, x, short, bias=(sj.attention.static(jnp.ones((2, 5, 8))),)
        )
