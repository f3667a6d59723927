"""Tests what the papers and their code say beyond the formulas of the contract.

The tests also cover what layers refuse.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.alignments import Alignment
from synthesizer_jax.alignments.relative_bias import alibi_slopes
from synthesizer_jax.attention import relative
from synthesizer_jax.attention.relative_table import relative_buckets
from synthesizer_jax.costs.summary import num_elements
from synthesizer_jax.primitives.parameters import apply_method
from tests.layers import oracles
from tests.layers.contract import general

KEY = jax.random.key(0)
X = jnp.ones((2, 7, 10))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_are_t5s(bidirectional):
    distance = np.arange(-300, 300)
    t5s = sj.RelativeBias(bidirectional=bidirectional)
    ours = relative_buckets(distance, num_buckets=32, max_distance=128, bidirectional=bidirectional)
    assert ours.tolist() == [oracles.bucket(d, t5s) for d in distance]


def test_alibi_slopes_are_the_released_codes():
    """ALiBi's slopes equal those of the released code (Press et al. 2022).

    With 12 heads, these are the slopes for 8 heads, and every second slope for 16 heads.
    """
    exponents = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    np.testing.assert_allclose(alibi_slopes(12), [2**-e for e in exponents])


def test_caches_hold_what_they_need():
    for layer, shapes in (
        (sj.Attention(2, 4, alignment=sj.Gaussian((-1, 0))), [(2, 2, 7, 4)]),
        (sj.LightweightConvolution(width=9), [(2, 10, 8, 1)]),
        (sj.Attention(2, 4, alignment=sj.Dense(max_length=500)), [(2, 2, 500, 4)]),
        (sj.Attention(4, 3, num_kv_heads=2), [(2, 2, 500, 3)] * 2),  # shared heads are stored once
    ):

        def init(x, y=layer):
            """Returns the cache of the layer."""
            return apply_method(y.init_cache, y.init(KEY, x), x, max_length=500)

        arrays = jax.tree.leaves(jax.eval_shape(init, X[:, :1]))
        assert [a.shape for a in arrays if a.ndim] == shapes


def test_heads_of_two_kinds_share_keys_that_are_values():
    """A layer may combine heads of two kinds that share keys, which also serve as values.

    Keys that several query heads share are divided among the kinds like the queries.
    """
    two = sj.PerHead((sj.DotProduct(), sj.DotProduct()), heads=(1, 3))
    layers = [
        sj.Attention(4, 3, alignment=alignment, num_kv_heads=2, shared_key_value=True)
        for alignment in (sj.DotProduct(), two)
    ]
    x = jax.random.normal(KEY, X.shape)
    params = jax.jit(layers[1].init)(KEY, x)["params"]
    kernels = [params["align"][f"part_{i}"]["query"]["kernel"] for i in range(2)]
    whole = params | {"align": {"query": {"kernel": jnp.concatenate(kernels, axis=1)}}}
    outputs = (
        jax.jit(y.apply)({"params": p}, x) for y, p in zip(layers, (whole, params), strict=True)
    )
    np.testing.assert_allclose(*outputs, atol=1e-6)


SIZES = {  # Bozic et al. 2023: hidden widths of the released code, and the resulting parameters
    "encoder": {25: 339_275, 50: 659_350, 800: 10_261_600, 3200: 40_988_800, 12800: 163_897_600},
    "decoder": {25: 176_203, 50: 339_478, 800: 5_237_728, 3200: 20_912_128, 12800: 83_609_728},
    "cross": {50: 992_150, 100: 1_952_300, 1600: 30_756_800, 6400: 122_931_200, 25600: 491_628_800},
    "heads": {200: 8 * 1_454_200, 400: 8 * 2_894_800, 800: 8 * 5_776_000, 1600: 8 * 11_538_400},
}


@pytest.mark.parametrize("where", SIZES)
def test_attention_replacements_have_the_released_sizes(where):
    """Replacements of attention have as many parameters as in the released code.

    The sizes are d_model 128, 8 heads of width 16, and 50 tokens. The output projection is kept.
    """
    mask = sj.Mask(causal=where == "decoder")
    x = jax.ShapeDtypeStruct((1, 50, 128), jnp.float32)
    for hidden, size in SIZES[where].items():
        layer = sj.SentenceFeedForward(
            50, hidden, 8, 16, separate_heads=where == "heads", causal=where == "decoder"
        )

        def init(*a, layer=layer):
            """Returns the parameters of the layer."""
            return layer.init(KEY, *a, mask=mask)["params"]

        shapes = jax.eval_shape(init, *((x, x) if where == "cross" else (x,)))
        assert num_elements(shapes["network"]) == size
        assert num_elements(shapes["out"]) == 128 * 128


def test_attention_replacement_in_cross_attention():
    """In cross-attention, position i reads the encoder's states and i + 1 decoder states.

    Decoding steps give the same outputs as a full pass.
    """
    layer = sj.SentenceFeedForward(9, 6, 2, 3)
    rng = np.random.default_rng(0)
    x, kv = (np.float32(rng.normal(size=(2, n, 4))) for n in (5, 7))
    mask = sj.Mask(key_lengths=jnp.array([7, 3]))
    variables = general(layer.init, x, kv)

    @jax.jit
    def run(x, kv):
        cache = apply_method(layer.init_cache, variables, x, kv, max_length=9, mask=mask)
        parts = []
        for span in (slice(0, 2), slice(2, 3), slice(3, 5)):
            y, cache = apply_method(layer.extend, variables, x[:, span], cache, mask=mask)
            parts.append(y)
        return layer.apply(variables, x, kv, mask=mask), jnp.concatenate(parts, axis=1)

    whole, steps = run(x, kv)
    p = variables["params"]
    for row, length in ((0, 7), (1, 3)):
        for i in range(5):
            read = np.zeros((18, 4))
            read[:length] = kv[row, :length]
            read[9 : 9 + i + 1] = x[row, : i + 1]
            heads = oracles.sentence_network(p["network"], read.reshape(-1), 0)[i].reshape(2, 3)
            expected = np.einsum("he,hed->d", heads, p["out"]["kernel"])
            np.testing.assert_allclose(whole[row, i], expected, atol=1e-4)
    np.testing.assert_allclose(steps, whole, atol=1e-5)


def test_sentences_of_tokens_that_hardly_differ():
    """The norm of tokens that hardly differ is finite.

    For large, nearly equal numbers, rounding may make the computed variance negative.
    """
    x = 1000 + 0.01 * np.random.default_rng(0).normal(size=(2, 12, 8)).astype(np.float32)
    y, _ = sj.SentenceFeedForward(12, 8).init_with_output(KEY, x)
    assert np.all(np.isfinite(y))


OWN = sj.Mask.padded(jnp.array([7]))
CAUSAL, PACKED = sj.Mask(causal=True), sj.Mask(key_segments=jnp.ones((2, 7), int))
BIAS = (relative(jnp.ones((2, 13)), first=-6),)
ATTENTION = sj.Attention(2, 4)
DOT = sj.DotProduct()
REFUSED = [
    (sj.Linformer(2, 4, max_length=7), {"mask": CAUSAL}, "use another mixer in decoders"),
    (sj.Linformer(2, 4, max_length=7), {"kv": X}, "Use Attention as cross_mixer"),
    (sj.Linformer(2, 4, max_length=7), {"mask": PACKED}, "data.pack=false"),
    (sj.Linformer(2, 4, max_length=6), {}, "max_length=6, but it was given 7"),
    (sj.SentenceFeedForward(7, 3), {"mask": CAUSAL}, "Set its field causal=True in decoders"),
    (sj.SentenceFeedForward(7, 3, causal=True), {}, "plain causal mask"),
    (sj.SentenceFeedForward(6, 3), {}, "max_length=6, but it was given 7"),
    (
        sj.LightweightConvolution(groups=3),
        {},
        "groups is 3, but it must divide d_model, which is 10",
    ),
    (sj.TokenFeedForward(3, 2, 4), {"kv": X}, "Use Attention as cross_mixer"),
    (sj.TalkingHeads(2, 4, dynamic=("x3l",)), {}, "one of 'x2l', 'm2l', 'x2w', 'm2w'"),
    (
        sj.TalkingHeads(2, 4, softmax_heads=3, project_logits=False),
        {},
        "2 heads before and 3 heads after",
    ),
    (sj.Random(6), {}, r"Random/align has max_length=6, but it was given 7 .*max_length to 7"),
    (sj.Gaussian((-1, 0, 1)), {}, "3 offsets, but their number must divide"),
    (sj.PerHead((DOT,), heads=(3,)), {}, "The sum of the numbers"),
    (sj.Mixture(()), {}, r"alignment.parts is \(\), but it must be not empty"),
    (sj.Mixture((DOT,), weights="mean"), {}, "one of 'softmax', 'sigmoid', 'sum'"),
    (sj.Mixture((DOT,), weights="sigmoid"), {}, "two parts, but it has 1"),
    (sj.Mixture((DOT, sj.Dense)), {}, "alignment.parts is .*, but tuple.* is expected"),
    (sj.Mixture((sj.Gaussian(), DOT)), {}, r"cannot be part of a mixture.*GaussianBias.*PerHead"),
    (sj.Gaussian(), {"bias": BIAS}, "no logits to which a position bias can be added"),
    (
        sj.Attention(2, 4, window=3),
        {"mask": sj.Mask(window=2)},
        "has window=3 and the mask has window=2",
    ),
    (
        sj.Attention(4, 3, DOT, num_kv_heads=3),
        {},
        "num_kv_heads is 3, but it must divide num_heads",
    ),
    (
        sj.Attention(4, 3, sj.Random(7), num_kv_heads=3),
        {},
        "num_kv_heads is 3, but it must divide num_heads, which is 4",
    ),
    (ATTENTION.copy(alignment=sj.Random), {}, "alignment is .*Random.*, but Alignment is expected"),
    (ATTENTION, {"mask": sj.Mask(query_offset=2)}, "query_offset is 2, but in self-attention"),
    (ATTENTION, {"kv": X, "mask": OWN}, "made for self-attention, but kv is given. .*queries"),
    (ATTENTION, {"kv": X[0]}, r"tokens have shape \(7, 10\), but they must be \[batch,"),
    (ATTENTION, {"is_causal": True}, r"no argument is_causal\. .* pass mask=Mask\(causal=True\)"),
    (
        ATTENTION,
        {"bias": BIAS[0]},
        "bias is a single Relative term, but it must be a tuple of terms",
    ),
]


@pytest.mark.parametrize(("layer", "arguments", "message"), REFUSED)
def test_arguments_that_do_not_fit_give_one_sentence(layer, arguments, message):
    layer = sj.Attention(2, 4, alignment=layer) if isinstance(layer, Alignment) else layer
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(lambda: layer.init(KEY, X, **arguments))
    if isinstance(layer, sj.Linformer) and "mask" in arguments:
        with pytest.raises(ValueError, match="use another mixer in decoders"):
            jax.eval_shape(lambda: apply_method(layer.init_cache, {}, X, max_length=7))
