"""Mistakes of a variant's author, each told in a sentence; and tables of packed rows."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import synthesizer_jax as sj
from synthesizer_jax import nnx as snnx
from synthesizer_jax.attention import static

X = jax.random.normal(jax.random.key(0), (2, 12, 8))


class Returns(sj.Alignment):
    """An alignment that returns what it is told to."""

    what: str

    @nn.compact
    def __call__(self, queries, keys, context):
        logits = jnp.zeros((2, 12, 12))
        return {"array": logits, "term": static(logits), "nothing": None}[self.what]


@pytest.mark.parametrize(
    ("alignment", "message"),
    [
        (Returns("array"), "terms are of type JitTracer|terms are of type ArrayImpl"),
        (Returns("term"), r"terms are a bare Static; return a tuple of terms, such as \(static"),
        (Returns("nothing"), "terms are of type NoneType"),
        (sj.Random, r"Attention: alignment is the class Random; .* such as Random\(...\)"),
        ("random", r"Attention: alignment is 'random'; give an alignment object"),
        (sj.Mixture((sj.Random(12), sj.Dense)), "Mixture: an entry of parts is the class Dense"),
        (sj.PerHead((sj.Random(12), "dense")), "PerHead: an entry of parts is 'dense'"),
    ],
)
def test_mistakes_are_one_sentence(alignment, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        sj.Attention(2, 4, alignment).init(jax.random.key(0), X)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (static(jnp.zeros((2, 12, 12))), "bias is a bare Static; give a tuple of terms"),
        (np.zeros((2, 12, 12)), "bias is of type ndarray; give a tuple of terms"),
    ],
)
def test_a_bias_is_a_tuple_of_terms(bias, message: str) -> None:
    layer = sj.Attention(2, 4)
    with pytest.raises(TypeError, match=message):
        layer.init(jax.random.key(0), X, bias=bias)


@pytest.mark.parametrize(
    "layer",
    [
        sj.Attention(2, 4),
        sj.TalkingHeads(2, 4),
        sj.SentenceFeedForward(max_length=12, hidden_dim=5, num_heads=2, head_dim=4),
        sj.TokenFeedForward(hidden_dim=5, num_heads=2, head_dim=4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_masks_of_numbers(layer) -> None:
    """What is not zero is True, in every mixer."""
    real = np.arange(12) < np.array([[12], [7]])
    variables = layer.init(jax.random.key(0), X)
    for make in (lambda r: r[:, None, None], lambda r: sj.Mask(key_valid=r)):
        expected = layer.apply(variables, X, mask=make(jnp.asarray(real)))
        for numbers in (2 * real, real.astype(np.float32)):
            found = layer.apply(variables, X, mask=make(jnp.asarray(numbers)))
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("layer", [sj.Attention(2, 4), sj.MultiHeadAttention(num_heads=2)])
def test_a_mask_to_be_added_is_refused(layer) -> None:
    added = jnp.where(jnp.tri(12, dtype=bool), 0.0, -1e9)
    with pytest.raises(ValueError, match=r"the mask contains -1000000000.0; .* give mask == 0"):
        layer.init(jax.random.key(0), X, mask=added)
    if isinstance(layer, sj.Attention):
        with pytest.raises(ValueError, match=r"the mask contains 0.5"):
            layer.init(jax.random.key(0), X, mask=sj.Mask(key_valid=np.full((2, 12), 0.5)))


@pytest.mark.parametrize("layer", [sj.Attention(2, 4), sj.TalkingHeads(2, 4)])
def test_flax_argument_of_causal_attention(layer) -> None:
    message = r"has no argument is_causal; give mask=Mask\(causal=True\)"
    with pytest.raises(TypeError, match=message):
        layer.init(jax.random.key(0), X, is_causal=True)
    module = snnx.to_nnx(layer, in_features=8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=message):
        module(X, is_causal=True)


def test_a_network_over_the_sentence_names_its_causal_form() -> None:
    with pytest.raises(ValueError, match="set its field causal=True in decoders"):
        sj.SentenceFeedForward(12, 5).init(jax.random.key(0), X, mask=sj.Mask(causal=True))


def test_sentences_of_tokens_that_hardly_differ() -> None:
    """The variance of large, equal numbers, which rounding may make negative."""
    x = 1000 + 0.01 * X
    layer = sj.SentenceFeedForward(max_length=12, hidden_dim=8)
    y, _ = layer.init_with_output(jax.random.key(0), x)
    assert np.all(np.isfinite(y))


@pytest.mark.slow
@pytest.mark.parametrize(
    "alignment",
    [
        sj.Random(4),
        sj.Dense(4),
        sj.FactorizedRandom(4, rank=2),
        sj.FactorizedDense(4),
        sj.Mixture((sj.DotProduct(), sj.Random(4), sj.RelativeBias(8, 8))),
    ],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("mixer", [sj.Attention, sj.TalkingHeads])
def test_tables_need_the_positions_of_a_segment(alignment, mixer) -> None:
    """A row of twelve tokens with segments of up to four fits tables of four positions."""
    segments = jnp.array(
        [[1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 0, 0], [1] * 3 + [2] * 4 + [3] * 2 + [0] * 3]
    )
    layer = mixer(2, 4, alignment)
    variables = layer.init(jax.random.key(1), X[:, :4])
    mask = sj.Mask.packed(segments, segments=3, segment_length=4)
    out = layer.apply(variables, X, mask=mask)
    for row, number in ((0, 1), (0, 3), (1, 2)):
        own = np.flatnonzero(np.asarray(segments[row]) == number)
        alone = layer.apply(variables, X[row : row + 1, own])
        np.testing.assert_allclose(out[row, own], alone[0], atol=2e-5)
    with pytest.raises(ValueError, match=r"max_length=4 but was given 12 positions|covers|reach"):
        sj.Attention(2, 4, sj.Random(4)).apply(
            sj.Attention(2, 4, sj.Random(4)).init(jax.random.key(0), X[:, :4]), X
        )
