"""What the papers say of each system, beyond the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax import (
    Attention,
    Dense,
    DotProduct,
    Gaussian,
    GaussianBias,
    LightweightConvolution,
    Linformer,
    Mask,
    Mixture,
    PerHead,
    Random,
    RelativeBias,
    SentenceFeedForward,
    TalkingHeads,
    TokenFeedForward,
)
from synthesizer_jax.alignments import AttentionContext
from synthesizer_jax.attention import Span, attend, attention_weights, low_rank
from synthesizer_jax.costs.summary import num_elements
from synthesizer_jax.initializers import Normal
from synthesizer_jax.parameters import apply_method


def gaussian_weights(n, offset, *, causal=False, q=None, **fields):
    """``[q, k]`` of one head."""
    layer = Gaussian((offset,), **fields)
    x = jnp.zeros((1, q or n, 1))
    terms = layer.apply({}, x, x, AttentionContext(1, 1, Span(0, q or n), Span(0, n)))
    mask = Mask(causal=causal)
    return np.asarray(attention_weights(terms, mask=mask, q_length=q or n, k_length=n)[0, 0])


def test_gaussian_row_sums_are_the_released_codes():
    """You et al. 2020; the numbers follow from the density (σ = 1)."""
    w = gaussian_weights(40, 0)
    np.testing.assert_allclose(
        w[20, 20:25], [0.398942, 0.241971, 0.053991, 0.004432, 0.000134], atol=5e-7
    )
    for offset, first in ((-1, 0.300529), (1, 0.941442)):
        w = gaussian_weights(40, offset)
        np.testing.assert_allclose(w[20].sum(), 1.0, atol=5e-7)
        np.testing.assert_allclose(w[0].sum(), first, atol=5e-7)
    for offset, inside, first in ((-1, 0.941442, 0.241971), (0, 0.699471, 0.398942)):
        w = gaussian_weights(40, offset, causal=True)
        np.testing.assert_allclose(w[20].sum(), inside, atol=5e-7)
        np.testing.assert_allclose(w[0].sum(), first, atol=5e-7)
    np.testing.assert_allclose(gaussian_weights(40, 1, causal=True)[20].sum(), 0.300529, atol=5e-7)


def test_gaussian_index_is_the_limit_of_a_small_sigma():
    narrow = gaussian_weights(9, -1, sigma=0.05, normalize=True)
    index = gaussian_weights(9, -1, sigma=0.0)
    np.testing.assert_allclose(narrow[1:], index[1:], atol=1e-6)
    assert not index[0].any()  # position −1 is padding


@given(ratio=st.sampled_from([0.7, 1.03606, 1.43]), offset=st.sampled_from([-1.0, 0.0, 1.0]))
@settings(max_examples=9, deadline=None, derandomize=True)
def test_gaussian_cross_attention_is_centred_on_the_ratio(ratio, offset):
    w = gaussian_weights(60, offset, ratio=ratio, q=30)
    i, j = np.arange(30)[:, None], np.arange(60)[None, :]
    full = np.exp(-0.5 * (j - (ratio * i + offset)) ** 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(w, full, atol=3e-7)


def test_gaussian_cross_attention_steps_are_the_full_pass():
    layer = Attention(2, 3, alignment=Gaussian(ratio=1.4))
    x, kv = (
        jnp.asarray(np.random.default_rng(s).normal(size=(2, 7, 5)), jnp.float32) for s in (0, 1)
    )
    mask = Mask(key_lengths=jnp.array([7, 4]))
    variables = layer.init(jax.random.key(0), x, kv)
    whole = layer.apply(variables, x, kv, mask=mask)
    cache = apply_method(layer.init_cache, variables, x, kv, max_length=7)
    parts = []
    for at in range(7):
        y, cache = apply_method(layer.extend, variables, x[:, at : at + 1], cache, mask=mask)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-5)


@pytest.mark.slow
def test_gaussian_decodes_with_a_constant_cache():
    x = jnp.zeros((1, 1, 8))
    for layer, room in (
        (Attention(2, 4, alignment=Gaussian((-1, 0))), 7),
        (LightweightConvolution(width=9), 8),
        (Attention(2, 4, alignment=Dense(max_length=500)), 500),
    ):
        variables = layer.init(jax.random.key(0), x)
        cache = apply_method(layer.init_cache, variables, x, max_length=500)
        _, cache = apply_method(layer.extend, variables, x, cache)
        assert cache.length == 1
        assert [a.shape[1] for a in jax.tree.leaves(cache) if np.ndim(a)] == [room]


def test_weights_do_not_mix_with_logits_and_the_error_says_what_does():
    x = jnp.zeros((1, 3, 8))
    for alignment in (
        Mixture((Gaussian(), DotProduct())),
        Mixture((PerHead((Gaussian((0,)), DotProduct())), DotProduct())),
    ):
        with pytest.raises(ValueError, match=r"cannot be part of a mixture.*GaussianBias.*PerHead"):
            Attention(2, 4, alignment=alignment).init(jax.random.key(0), x)
    context = AttentionContext(2, 4, Span(0, 3), Span(0, 3))
    bias, _ = RelativeBias().init_with_output(jax.random.key(0), x, x, context)
    with pytest.raises(ValueError, match="no logits to add a position bias to"):
        Attention(2, 4, alignment=Gaussian()).init(jax.random.key(0), x, bias=bias)
    ok = Attention(2, 4, alignment=Mixture((GaussianBias(), DotProduct())))
    ok.init(jax.random.key(0), x, bias=bias)
    some = Attention(2, 4, alignment=PerHead((Gaussian((0,)), DotProduct())))
    some.init(jax.random.key(0), x, bias=bias)


def tokens(n=7, d=10, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, n, d)), jnp.float32)


def test_talking_heads_with_identities_is_plain_attention():
    plain, talking = Attention(3, 4), TalkingHeads(3, 4)
    x, mask = tokens(), Mask(key_lengths=jnp.array([7, 3]))
    variables = talking.init(jax.random.key(0), x)
    params = dict(variables["params"])
    for name in ("logits_projection", "weights_projection"):
        params[name] = jnp.eye(3)
    y = talking.apply({"params": params}, x, mask=mask)
    rest = {k: v for k, v in params.items() if "projection" not in k}
    np.testing.assert_allclose(y, plain.apply({"params": rest}, x, mask=mask), atol=1e-5)


def test_talking_heads_gives_masked_keys_exactly_no_weight():
    layer, x = TalkingHeads(1, 4, softmax_heads=1, value_heads=1), tokens()
    variables = layer.init(jax.random.key(0), x)
    mask = Mask(causal=True, key_lengths=jnp.array([7, 3]))
    _, state = layer.apply(variables, x, mask=mask, mutable=["intermediates"])
    (weights,) = state["intermediates"]["attention_weights"]
    seen = np.tri(7, dtype=bool) & (np.arange(7) < np.array([7, 3])[:, None, None])
    assert np.all(np.asarray(weights)[:, 0][~seen] == 0)


def test_talking_heads_counts_extra_parameters():
    """h_k·h + h·h_v a layer (Shazeer et al. 2020, section 4)."""
    shapes = [
        jax.eval_shape(layer.init, jax.random.key(0), tokens())["params"]
        for layer in (TalkingHeads(3, 4, softmax_heads=5, value_heads=2), Attention(3, 4))
    ]
    values = 2 * (2 - 3) * 4 * 10
    assert num_elements(shapes[0]) - num_elements(shapes[1]) == 3 * 5 + 5 * 2 + values


@given(n=st.sampled_from([1, 2, 3, 5, 8]), seed=st.integers(0, 3))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_a_head_as_wide_as_the_length_makes_any_positive_attention(n, seed):
    """Bhojanapalli et al. 2020, theorem 1, with rows as tokens."""
    rng = np.random.default_rng(seed)
    d = n + 2
    x = rng.normal(size=(n, d))
    p = rng.dirichlet(np.ones(n), size=n)
    inverse = np.linalg.pinv(x)  # x @ inverse = identity: full row rank
    logits = np.sqrt(d) * np.log(p)
    left, values, right = np.linalg.svd(logits)
    query = inverse @ (left * values)
    key = inverse @ right.T
    pad = lambda w: jnp.asarray(np.pad(w, ((0, 0), (0, d - n)))[:, None], jnp.float32)
    params = {"align": {"query": {"kernel": pad(query)}, "key": {"kernel": pad(key)}}}
    params |= {"value": {"kernel": jnp.zeros((d, 1, d))}, "out": {"kernel": jnp.zeros((1, d, d))}}
    layer = Attention(1, d)
    _, state = layer.apply(
        {"params": params}, jnp.asarray(x[None], jnp.float32), mutable=["intermediates"]
    )
    found = np.asarray(state["intermediates"]["attention_weights"][0])[0, 0]
    np.testing.assert_allclose(found, p, atol=2e-3)


def test_a_narrower_head_cannot():
    """The theorem's counter-example: d = 1, two tokens, one of them zero: its row is uniform."""
    x = jnp.array([[[1.0], [0.0]]])
    for seed in range(5):
        layer = Attention(1, 1)
        variables = layer.init(jax.random.key(seed), x)
        _, state = layer.apply(variables, x, mutable=["intermediates"])
        weights = np.asarray(state["intermediates"]["attention_weights"][0])[0, 0]
        np.testing.assert_allclose(weights[1], [0.5, 0.5])


@pytest.mark.parametrize("head_dim", [1, 3, 5])
def test_the_rank_of_the_logits_is_at_most_the_head_size(head_dim):
    x = tokens(n=9, d=12)
    layer = DotProduct(head_dim=head_dim)
    context = AttentionContext(2, 4, Span(0, 9), Span(0, 9))
    (term,), _ = layer.init_with_output(jax.random.key(0), x, x, context)
    logits = np.einsum("bqhr,bkhr->bhqk", term.queries, term.keys)
    assert np.all(np.linalg.matrix_rank(logits, rtol=1e-4) == head_dim)


def test_a_standard_layer_lives_inside_a_wider_one():
    """FixedMultiHead holds the standard class when d_p ≥ d/h (section 5 of the paper)."""
    x, narrow, wide = tokens(d=12), Attention(3, 4), Attention(3, 7)
    params = narrow.init(jax.random.key(0), x)["params"]
    pad = lambda w: jnp.pad(w, ((0, 0), (0, 0), (0, 3)))
    query = pad(params["align"]["query"]["kernel"]) * np.sqrt(7 / 4)
    wider = {
        "align": {
            "query": {"kernel": query},
            "key": {"kernel": pad(params["align"]["key"]["kernel"])},
        },
        "value": {"kernel": pad(params["value"]["kernel"])},
        "out": {"kernel": jnp.pad(params["out"]["kernel"], ((0, 0), (0, 3), (0, 0)))},
    }
    np.testing.assert_allclose(
        wide.apply({"params": wider}, x), narrow.apply({"params": params}, x), atol=1e-5
    )
    odd = Attention(5, 7)  # heads that do not divide d_model
    assert odd.init_with_output(jax.random.key(0), x)[0].shape == x.shape


SIZES = {  # Bozic et al. 2023: hidden widths of the released code, parameters from them
    "encoder": {25: 339_275, 50: 659_350, 800: 10_261_600, 3200: 40_988_800, 12800: 163_897_600},
    "decoder": {25: 176_203, 50: 339_478, 800: 5_237_728, 3200: 20_912_128, 12800: 83_609_728},
    "cross": {50: 992_150, 100: 1_952_300, 1600: 30_756_800, 6400: 122_931_200, 25600: 491_628_800},
    "heads": {200: 8 * 1_454_200, 400: 8 * 2_894_800, 800: 8 * 5_776_000, 1600: 8 * 11_538_400},
}


@pytest.mark.parametrize(("where", "hidden"), [(w, h) for w, sizes in SIZES.items() for h in sizes])
def test_attention_replacements_have_the_released_sizes(where, hidden):
    """d = 128, 8 heads of 16, 50 tokens; without the output projection, which stays."""
    layer = SentenceFeedForward(
        50, hidden, 8, 16, separate_heads=where == "heads", causal=where == "decoder"
    )
    x = jax.ShapeDtypeStruct((1, 50, 128), jnp.float32)
    arguments = (x, x) if where == "cross" else (x,)
    mask = Mask(causal=where == "decoder")
    shapes = jax.eval_shape(lambda *a: layer.init(jax.random.key(0), *a, mask=mask), *arguments)[
        "params"
    ]
    assert num_elements(shapes["network"]) == SIZES[where][hidden]
    assert num_elements(shapes["out"]) == 128 * 128


@pytest.mark.slow
def test_attention_replacement_in_cross_attention():
    """Position i reads the encoder and the first i + 1 decoder states; steps agree with the pass."""
    from tests.layers.oracles import sentence_network

    layer = SentenceFeedForward(9, 6, 2, 3)
    x, kv = tokens(n=5, d=4), tokens(n=7, d=4, seed=1)
    mask = Mask(key_lengths=jnp.array([7, 3]))
    variables = layer.init(jax.random.key(0), x, kv)
    whole = layer.apply(variables, x, kv, mask=mask)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"])
    for row, length in ((0, 7), (1, 3)):
        for i in range(5):
            read = np.zeros((18, 4))
            read[:length] = kv[row, :length]
            read[9 : 9 + i + 1] = x[row, : i + 1]
            heads = sentence_network(p["network"], read.reshape(-1), 0)[i].reshape(2, 3)
            expected = np.einsum("he,hed->d", heads, p["out"]["kernel"])
            np.testing.assert_allclose(whole[row, i], expected, atol=1e-4)
    cache = apply_method(layer.init_cache, variables, x, kv, max_length=9, mask=mask)
    parts = []
    for span in (slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)):
        y, cache = apply_method(layer.extend, variables, x[:, span], cache, mask=mask)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-5)


def test_mixers_say_where_they_do_not_fit():
    x = tokens()
    causal, packed = Mask(causal=True), Mask(key_segments=jnp.ones((2, 7), int))
    for layer, arguments, options, text in (
        (Linformer(2, 4, max_length=7), (x,), {"mask": causal}, "use it in encoders"),
        (Linformer(2, 4, max_length=7), (x, x), {}, "use Attention as cross_mixer"),
        (Linformer(2, 4, max_length=7), (x,), {"mask": packed}, "data.pack=false"),
        (Linformer(2, 4, max_length=6), (x,), {}, "max_length=6 but was given 7"),
        (SentenceFeedForward(7, 3), (x,), {"mask": causal}, "use it in encoders"),
        (SentenceFeedForward(7, 3, causal=True), (x,), {}, "plain causal mask"),
        (SentenceFeedForward(6, 3), (x,), {}, "max_length=6 but was given 7"),
        (LightweightConvolution(groups=3), (x,), {}, "groups must divide d_model=10"),
        (LightweightConvolution(), (x, x), {}, "use Attention as cross_mixer"),
        (TokenFeedForward(3, 2, 4), (x, x), {}, "use Attention as cross_mixer"),
        (TalkingHeads(2, 4, dynamic=("x3l",)), (x,), {}, "x2l, m2l, x2w, m2w"),
        (TalkingHeads(2, 4, softmax_heads=3, project_logits=False), (x,), {}, "2 and 3"),
        (Attention(3, 4, alignment=Gaussian()), (x,), {}, "2 offsets for 3 heads"),
        (Attention(2, 4, alignment=PerHead((DotProduct(),), heads=(3,))), (x,), {}, "adding up"),
    ):
        with pytest.raises(ValueError, match=text):
            layer.init(jax.random.key(0), *arguments, **options)


def test_linformer_with_every_position_kept_is_attention():
    """k = N and E = F = identity."""
    x, n = tokens(), 7
    layer = Linformer(2, 4, max_length=n, projected_length=n)
    params = dict(layer.init(jax.random.key(0), x)["params"])
    params["key_length_projection"] = jnp.eye(n)
    own = {"align": {k: params[k] for k in ("query", "key")}}
    own |= {"value": params["value"], "out": params["out"]}
    y = Attention(2, 4).apply({"params": own}, x)
    np.testing.assert_allclose(layer.apply({"params": params}, x), y, atol=1e-5)


@pytest.mark.slow
@given(
    lengths=st.tuples(*[st.sampled_from([1, 2, 3, 5, 8, 13])] * 2),
    heads=st.sampled_from([1, 2, 3]),
    causal=st.booleans(),
    kind=st.sampled_from(["dot", "random", "gaussian", "per head"]),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_any_lengths_and_heads(lengths, heads, causal, kind):
    """The engine's choice equals the reference for whatever sizes come."""
    n, real = max(lengths), min(lengths)
    alignment = {
        "dot": DotProduct(),
        "random": Random(max_length=13, table_init=Normal(1.0)),
        "gaussian": Gaussian((0,), normalize=True),
        "per head": PerHead((DotProduct(),) * heads),
    }[kind]
    layer, x = Attention(heads, 3, alignment=alignment), tokens(n=n, d=5)
    variables = layer.init(jax.random.key(0), x)
    mask = Mask(causal=causal, key_lengths=jnp.array([n, real]))
    expected = layer.copy(implementation="reference").apply(variables, x, mask=mask)
    np.testing.assert_allclose(layer.apply(variables, x, mask=mask), expected, atol=1e-5)


def test_attend_serves_without_flax():
    q, k, v = (tokens(d=6, seed=s)[:, :, None] for s in range(3))
    y = attend((low_rank(q, k, token_keys=True),), v, mask=Mask(causal=True))
    assert y.shape == v.shape
