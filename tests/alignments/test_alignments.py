"""What is particular to each Synthesizer alignment; the contract is in tests/layers."""

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
    FactorizedDense,
    FactorizedRandom,
    Mask,
    Mixture,
    Random,
)
from synthesizer_jax.alignments.factorized_dense import balanced_factors
from synthesizer_jax.attention import attention_weights
from synthesizer_jax.attention.relative import relative_buckets
from synthesizer_jax.initializers import Normal

HEADS, WIDTH, D, ROOM = 3, 5, 7, 24
BATCH, LENGTH = 2, 11

CASES = {
    "Dense": Dense(max_length=ROOM),
    "Random": Random(max_length=ROOM, table_init=Normal(1.0)),
    "Fixed Random": Random(max_length=ROOM, trainable=False, table_init=Normal(1.0)),
    "FactorizedRandom": FactorizedRandom(max_length=ROOM, rank=2, factor_init=Normal(1.0)),
    "FactorizedDense": FactorizedDense(max_length=ROOM),
}


def tokens(seed=0, batch=BATCH, length=LENGTH):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, D)), jnp.float32)


def layer_of(case):
    return Attention(HEADS, WIDTH, alignment=CASES[case])


def weights_of(layer, variables, x, mask=None):
    """The attention weights of a self-attention pass, [batch, heads, q, k]."""
    _, state = layer.apply(variables, x, mask=mask, mutable=["intermediates"])
    weights = np.asarray(state["intermediates"]["attention_weights"][0])
    return np.broadcast_to(weights, (x.shape[0], *weights.shape[1:]))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def params_of(variables):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"]["align"])


def test_mixture_starts_with_equal_weights_and_keeps_equal_parts_apart():
    part = Random(max_length=ROOM, table_init=Normal(1.0))
    layer = Attention(HEADS, WIDTH, alignment=Mixture((part, part)))
    p = layer.init(jax.random.key(0), tokens())["params"]["align"]
    assert not np.any(p["weights"])
    assert np.any(p["part_0"]["table"] != p["part_1"]["table"])


def test_random_ignores_the_tokens_and_dense_the_other_tokens():
    for name, same in (("Random", True), ("Fixed Random", True), ("Dense", False)):
        layer = layer_of(name)
        variables = layer.init(jax.random.key(0), tokens())
        one, other = (weights_of(layer, variables, tokens(s)) for s in (1, 2))
        assert np.allclose(one, other) == same
    layer, x = layer_of("Dense"), tokens(1)
    variables = layer.init(jax.random.key(0), x)
    shuffled = x.at[:, 3:].set(x[:, 3:][:, ::-1])
    np.testing.assert_allclose(
        weights_of(layer, variables, x)[:, :, :3],
        weights_of(layer, variables, shuffled)[:, :, :3],
        atol=1e-6,
    )


def test_rank_of_factorized_random():
    layer = layer_of("FactorizedRandom")
    p = params_of(layer.init(jax.random.key(0), tokens()))
    table = np.einsum("hqr,hkr->hqk", p["query_factor"], p["key_factor"])
    assert all(np.linalg.matrix_rank(t) == 2 for t in table)


@given(st.integers(1, 2000))
@settings(deadline=None, max_examples=50)
def test_balanced_factors_are_the_most_balanced(n):
    a, b = balanced_factors(n)
    assert a * b == n and a <= b
    assert all(n % c for c in range(a + 1, b) if c * c <= n)


def test_factorized_dense_uses_every_pair_once():
    a, b = 4, 6
    pairs = [(j // b, j % b) for j in range(a * b)]
    assert len(set(pairs)) == a * b
    with pytest.raises(ValueError, match="multiply to 20"):
        layer = Attention(1, 2, alignment=FactorizedDense(max_length=24, factors=(4, 5)))
        layer.init(jax.random.key(0), tokens())


def bucket_of(distance, bidirectional, buckets=32, far=128):
    """Raffel et al. 2020, transcribed for one distance."""
    bucket, n = 0, -distance
    if bidirectional:
        buckets //= 2
        bucket, n = (buckets if n < 0 else 0), abs(n)
    n = max(n, 0)
    if n < buckets // 2:
        return bucket + n
    exact = buckets // 2
    log = np.log(n / exact) / np.log(far / exact) * (buckets - exact)
    return bucket + min(exact + int(log + 1e-5), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_are_t5s(bidirectional):
    distance = np.arange(-300, 300)
    ours = relative_buckets(distance, num_buckets=32, max_distance=128, bidirectional=bidirectional)
    assert ours.tolist() == [bucket_of(d, bidirectional) for d in distance]


@pytest.mark.parametrize("name", ["Dense", "Random", "FactorizedRandom", "FactorizedDense"])
def test_longer_inputs_than_the_table_are_one_sentence(name):
    layer = layer_of(name)
    with pytest.raises(ValueError, match=rf"{name}.*max_length=24.*25 positions.*max_length>=25"):
        layer.init(jax.random.key(0), tokens(length=25))


def test_mixture_errors_name_what_is_allowed():
    for alignment, text in (
        (Mixture(()), "parts is empty"),
        (Mixture((DotProduct(),), weights="mean"), "softmax, sigmoid, sum"),
        (Mixture((DotProduct(),), weights="sigmoid"), "two parts, not 1"),
    ):
        with pytest.raises(ValueError, match=text):
            Attention(1, 2, alignment=alignment).init(jax.random.key(0), tokens())


def test_shared_key_value_projection_has_no_key_of_its_own():
    layer, x = Attention(HEADS, WIDTH, shared_key_value=True), tokens()
    variables = layer.init(jax.random.key(0), x)
    assert set(variables["params"]["align"]) == {"query"}
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"])
    x64 = np.asarray(x, np.float64)
    q = np.einsum("bqd,dhe->bhqe", x64, p["align"]["query"]["kernel"])
    v = np.einsum("bkd,dhe->bhke", x64, p["value"]["kernel"])
    w = softmax(np.einsum("bhqe,bhke->bhqk", q, v) / np.sqrt(WIDTH))
    y = np.einsum("bhqk,bhke,hed->bqd", w, v, p["out"]["kernel"])
    np.testing.assert_allclose(layer.apply(variables, x), y, atol=1e-5)


def test_weights_function_agrees_with_what_is_sown():
    layer, x = layer_of("Random"), tokens()
    variables = layer.init(jax.random.key(0), x)
    from synthesizer_jax.attention import static

    table = variables["params"]["align"]["table"][:, :LENGTH, :LENGTH]
    expected = attention_weights((static(table),), mask=Mask())
    np.testing.assert_allclose(weights_of(layer, variables, x)[0], expected[0], atol=1e-6)
