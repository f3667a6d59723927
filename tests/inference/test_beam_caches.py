"""Tests caches that the beams of an example share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.attention.beams import share_among_beams
from synthesizer_jax.primitives.parameters import apply_method
from tests.layers.contract import general

VOCAB, BATCH, BEAMS, LENGTH, WIDTH = 7, 2, 3, 5, 8

SHARED = {
    "dot product": sj.Attention(2, 4),
    "rotary": sj.Attention(2, 4, alignment=sj.DotProduct(rotary_base=100.0, normalize_qk=True)),
    "grouped": sj.Attention(4, 4, num_kv_heads=2, soft_cap=2.0, sinks=True),
    "window": sj.Attention(2, 4, window=2),
    "random": sj.Attention(2, 4, alignment=sj.Random(max_length=8)),
    "factorized random": sj.Attention(2, 4, alignment=sj.FactorizedRandom(max_length=8, rank=3)),
    "dense": sj.Attention(2, 4, alignment=sj.Dense(max_length=8)),
    "factorized dense": sj.Attention(2, 4, alignment=sj.FactorizedDense(max_length=8)),
    "mixture": sj.Attention(2, 4, alignment=sj.Mixture((sj.Random(max_length=8), sj.DotProduct()))),
    "split": sj.Attention(
        2, 4, alignment=sj.PerHead((sj.Random(max_length=8), sj.DotProduct()), (1, 1))
    ),
    "merged": sj.MergedAttention(2, 4, sj.DotProduct(rotary_base=50.0), num_kv_heads=1),
    "merged random": sj.MergedAttention(
        2, 4, sj.Random(max_length=8), cross_alignment=sj.DotProduct()
    ),
    "talking heads": sj.TalkingHeads(2, 4, dynamic=("x2l", "m2w")),
}
"""Mixers whose caches the beams of an example can share."""

UNSHARED = {
    "gaussian": sj.Attention(2, 4, alignment=sj.Gaussian((-1, 0))),
    "gaussian and dot product": sj.Attention(
        2, 4, alignment=sj.PerHead((sj.Gaussian((-1,)), sj.DotProduct()), (1, 1))
    ),
    "sentence": sj.SentenceFeedForward(8, 12, 2, 4, causal=True),
}
"""Mixers whose caches have one row for each beam."""


def decoder_of(mixer, bias):
    block = sj.Block(mixer, sj.FeedForward(12))
    encoder = sj.Stack((sj.Run(block.copy(self_mixer=sj.Attention(2, 4)), 1),))
    cross = None if mixer.reads_memory else sj.Attention(2, 4)
    decoder = sj.Stack((sj.Run(block.copy(cross_mixer=cross), 2),), bias=bias)
    return sj.EncoderDecoder(vocab_size=VOCAB, d_model=WIDTH, encoder=encoder, decoder=decoder)


@pytest.mark.parametrize("name", [*SHARED, *UNSHARED])
def test_shared_rows_equal_copied_rows(name):
    """Beams that share a row of the cache compute the same as beams with rows of their own.

    In every step, each beam takes over the past of any beam of its example.
    """
    mixer = (SHARED | UNSHARED)[name]
    bias = sj.RelativeBias() if mixer.bias_heads and name != "rotary" else None
    model = decoder_of(mixer, bias)
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.integers(2, VOCAB, (BATCH, 6))).at[1, 4:].set(0)
    variables = general(model.init, source, source)
    tokens = rng.integers(1, VOCAB, (LENGTH, BATCH * BEAMS, 1))
    beams = rng.integers(0, BEAMS, (LENGTH, BATCH, BEAMS))

    @jax.jit
    def step(tokens, cache):
        return apply_method(model.extend, variables, tokens, cache)

    cache = apply_method(model.init_cache, variables, source, max_length=LENGTH)
    _, cache = step(tokens[0][::BEAMS], cache)
    shared = cache.share_among_beams(BEAMS)
    copied = cache.map_rows(lambda x: jnp.repeat(x, BEAMS, axis=0))
    is_shared = getattr(shared.layers[0].self_attention, "beams", 1) == BEAMS
    assert is_shared == (name in SHARED)

    for token, source_beams in zip(tokens[1:], beams[1:], strict=True):
        y, shared = step(token, shared)
        expected, copied = step(token, copied)
        np.testing.assert_allclose(y, expected, atol=1e-5)
        rows = (np.arange(BATCH)[:, None] * BEAMS + source_beams).reshape(-1)
        shared = shared.reorder_beams(jnp.asarray(source_beams))
        copied = copied.map_rows(lambda x, rows=rows: x[rows])


def test_shared_rows_can_be_decoded_again_from_an_earlier_position():
    """As in caches of separate rows, the length of the cache is then the end of the new tokens."""
    layer = SHARED["dot product"]
    x = jax.random.normal(jax.random.key(0), (LENGTH, BATCH * BEAMS, 1, WIDTH))
    variables = general(layer.init, x[0])

    @jax.jit
    def step(x, cache, position=None):
        return apply_method(layer.extend, variables, x, cache, position=position)

    cache = apply_method(layer.init_cache, variables, x[0][::BEAMS], max_length=LENGTH)
    _, cache = step(x[0][::BEAMS], cache)
    shared = share_among_beams(cache, BEAMS)
    expected, shared = step(x[1], shared)
    _, shared = step(x[2], shared)
    y, shared = step(x[1], shared, position=1)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert shared.length == 2


@pytest.mark.parametrize("name", ["dot product", "merged"])
def test_shared_rows_sow_the_weights_of_all_beams(name):
    """The weights of a query are the same as with rows of its own, and zero in all other slots."""
    layer = SHARED[name]
    tokens = jax.random.normal(jax.random.key(0), (BATCH * BEAMS, 1, WIDTH))
    first = tokens[::BEAMS]
    memory = jax.random.normal(jax.random.key(1), (BATCH, 6, WIDTH)) if name == "merged" else None
    variables = general(layer.init, first, memory)
    cache = apply_method(layer.init_cache, variables, first, memory, max_length=LENGTH)
    _, cache = apply_method(layer.extend, variables, first, cache)

    def weights(change):
        """Returns the weights of a step after a change of the cache of the layer's own tokens."""
        if memory is None:
            changed = change(cache)
        else:
            changed = dataclasses.replace(cache, own=change(cache.own))
        options = {"method": layer.extend, "mutable": ["intermediates"]}
        _, sown = layer.apply(variables, tokens, changed, **options)
        return sown["intermediates"]["attention_weights"][0]

    def copy(cache):
        """Returns a cache with a row for each beam."""
        return jax.tree.map(lambda x: jnp.repeat(x, BEAMS, axis=0) if jnp.ndim(x) else x, cache)

    shared = weights(lambda cache: share_among_beams(cache, BEAMS))
    shared = shared.reshape(BATCH, 2, BEAMS, LENGTH, BEAMS)
    own = jnp.diagonal(
        shared, axis1=2, axis2=4
    )  # [b, h, m, n], because no beams have been reordered
    expected = weights(copy).reshape(BATCH, BEAMS, 2, LENGTH)
    np.testing.assert_allclose(own, expected.transpose(0, 2, 3, 1), atol=1e-6)
    np.testing.assert_allclose(shared.sum(), own.sum(), rtol=1e-6)
