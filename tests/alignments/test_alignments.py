"""Every alignment through one set of contracts, and against NumPy written from the paper."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax import (
    ALIGNMENTS,
    Attention,
    Dense,
    DotProduct,
    FactorizedDense,
    FactorizedRandom,
    Mask,
    Mixture,
    Random,
    RelativeBias,
)
from synthesizer_jax.alignments.factorized_dense import balanced_factors
from synthesizer_jax.alignments.relative_bias import relative_buckets
from synthesizer_jax.attention import attention_weights
from synthesizer_jax.initializers import Normal
from synthesizer_jax.registry import from_json, to_json

HEADS, WIDTH, D, ROOM = 3, 5, 7, 24
BATCH, LENGTH = 2, 11

CASES = {
    "DotProduct": DotProduct(),
    "DotProduct, free width": DotProduct(head_dim=13),
    "Dense": Dense(max_length=ROOM),
    "Dense, shared heads": Dense(max_length=ROOM, share_heads=True, hidden_dim=4),
    "Random": Random(max_length=ROOM, table_init=Normal(1.0)),
    "Fixed Random": Random(max_length=ROOM, trainable=False, table_init=Normal(1.0)),
    "FactorizedRandom": FactorizedRandom(max_length=ROOM, rank=2, factor_init=Normal(1.0)),
    "FactorizedDense": FactorizedDense(max_length=ROOM),
    "RelativeBias": RelativeBias(num_buckets=8, max_distance=16, table_init=Normal(1.0)),
    "Mixture": Mixture((DotProduct(), Random(max_length=ROOM), Dense(max_length=ROOM))),
    "Mixture, sigmoid": Mixture((DotProduct(), Random(max_length=ROOM)), weights="sigmoid"),
    "Mixture, sum, shared query": Mixture(
        (DotProduct(), Dense(max_length=ROOM)), weights="sum", share_query=True
    ),
    "Mixture of everything": Mixture(
        (
            FactorizedDense(max_length=ROOM),
            FactorizedRandom(max_length=ROOM),
            RelativeBias(),
            Mixture((DotProduct(), Random(max_length=ROOM, trainable=False))),
        )
    ),
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


@pytest.fixture(scope="module", params=CASES)
def case(request):
    layer = layer_of(request.param)
    x = tokens()
    return request.param, layer, layer.init(jax.random.key(1), x), x


def test_every_registered_alignment_has_a_case():
    used = {type(a).__name__ for a in CASES.values()}
    assert used == set(ALIGNMENTS)


def test_route_chosen_equals_reference(case):
    _, layer, variables, x = case
    mask = Mask(key_lengths=jnp.array([LENGTH, 6]))
    reference = layer.copy(implementation="reference").apply(variables, x, mask=mask)
    np.testing.assert_allclose(layer.apply(variables, x, mask=mask), reference, atol=2e-5)


def test_nothing_leaks_from_masked_or_future_tokens(case):
    _, layer, variables, x = case
    mask = Mask(causal=True, key_lengths=jnp.array([LENGTH, 6]))

    def output(x, row, position):
        return layer.apply(variables, x, mask=mask)[row, position].sum()

    for row, position, end in ((0, 4, 5), (1, 5, 6)):
        g = np.asarray(jax.grad(output)(x, row, position))
        assert np.any(g[row, :end] != 0)
        assert np.all(g[row, end:] == 0), "a later or padded token has influence"
        assert np.all(g[1 - row] == 0), "another example has influence"


def test_padding_queries_give_zeros(case):
    _, layer, variables, x = case
    y = layer.apply(variables, x, mask=Mask(key_lengths=jnp.array([LENGTH, 6])))
    assert np.all(np.asarray(y[1, 6:]) == 0) and np.all(np.any(np.asarray(y[1, :6]) != 0, -1))


def test_shorter_inputs_use_the_top_left_corner(case):
    name, layer, variables, x = case
    whole = layer.apply(variables, x, mask=Mask(causal=True))
    part = layer.apply(variables, x[:, :7], mask=Mask(causal=True))
    np.testing.assert_allclose(part, whole[:, :7], atol=2e-5, err_msg=name)


def test_gradient_reaches_every_trained_parameter_and_no_constant(case):
    name, layer, variables, x = case
    target = tokens(3)
    constants = {k: v for k, v in variables.items() if k != "params"}
    assert bool(constants) == ("Fixed" in name or "everything" in name)

    def loss(params):
        return jnp.sum(layer.apply({"params": params, **constants}, x) * target)

    for path, g in jax.tree.leaves_with_path(jax.grad(loss)(variables["params"])):
        assert np.all(np.isfinite(g)) and np.any(np.asarray(g) != 0), jax.tree_util.keystr(path)


def test_bfloat16_is_near_float32(case):
    name, layer, variables, x = case
    exact = np.asarray(layer.apply(variables, x))
    rounded = layer.apply(variables, x.astype(jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.08, err_msg=name)


def test_json_round_trip(case):
    _, layer, _, _ = case
    again = from_json(json.loads(json.dumps(to_json(layer))))
    assert again == layer and hash(again) == hash(layer)


def test_steps_equal_the_full_pass(case):
    from synthesizer_jax.mixers import NewCache

    name, layer, variables, x = case
    if "RelativeBias" in name or "everything" in name:
        layer = Attention(HEADS, WIDTH, alignment=CASES[name])
    whole = layer.apply(variables, x, mask=Mask(causal=True))
    y, cache = layer.apply(variables, x[:, :3], mask=Mask(causal=True), cache=NewCache(ROOM))
    parts = [y]
    step = jax.jit(
        lambda x, cache, at: layer.apply(
            variables, x, mask=Mask(causal=True, query_offset=at), cache=cache, position=at
        )
    )
    for at in range(3, LENGTH):
        y, cache = step(x[:, at : at + 1], cache, jnp.asarray(at))
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=2e-5)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def params_of(variables):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"]["align"])


def logits_of(alignment, p, x):
    """The paper's formulas, one head and one pair of positions at a time."""
    b, n, _ = x.shape
    s = np.zeros((b, HEADS, n, n))
    for h in range(HEADS):
        for i in range(n):
            for j in range(n):
                s[:, h, i, j] = one_logit(alignment, p, x, h, i, j)
    return s


def one_logit(alignment, p, x, h, i, j):
    if isinstance(alignment, DotProduct):
        q, k = x[:, i] @ p["query"]["kernel"][:, h], x[:, j] @ p["key"]["kernel"][:, h]
        return (q * k).sum(-1) / np.sqrt(q.shape[-1])
    if isinstance(alignment, Dense):
        hidden = np.maximum(x[:, i] @ p["hidden"]["kernel"][:, h], 0)
        return hidden @ p["table"][0 if alignment.share_heads else h, j]
    if isinstance(alignment, Random):
        return p["table"][h, i, j]
    if isinstance(alignment, FactorizedRandom):
        return p["query_factor"][h, i] @ p["key_factor"][h, j]
    assert isinstance(alignment, FactorizedDense)
    hidden = np.maximum(x[:, i] @ p["hidden"]["kernel"][:, h], 0)
    a, b = hidden @ p["first"][h], hidden @ p["second"][h]
    return a[:, j // b.shape[-1]] * b[:, j % b.shape[-1]]


@pytest.mark.parametrize(
    "name",
    [
        "DotProduct",
        "DotProduct, free width",
        "Dense",
        "Dense, shared heads",
        "Random",
        "FactorizedRandom",
        "FactorizedDense",
    ],
)
def test_weights_are_the_papers(name):
    layer, x = layer_of(name), tokens(5)
    variables = layer.init(jax.random.key(2), x)
    expected = softmax(logits_of(layer.alignment, params_of(variables), np.asarray(x, np.float64)))
    np.testing.assert_allclose(weights_of(layer, variables, x), expected, atol=1e-5)


@pytest.mark.parametrize("weights", ["softmax", "sigmoid", "sum"])
def test_mixture_is_a_weighted_sum_inside_one_softmax(weights):
    parts = (DotProduct(), Random(max_length=ROOM, table_init=Normal(1.0)))
    layer, x = Attention(HEADS, WIDTH, alignment=Mixture(parts, weights=weights)), tokens(6)
    variables = layer.init(jax.random.key(3), x)
    p = params_of(variables)
    if weights == "softmax":
        p["weights"] = np.random.default_rng(0).normal(size=(HEADS, 2))
        alpha = softmax(p["weights"])
    elif weights == "sigmoid":
        p["gate"] = np.array([0.7])
        gate = 1 / (1 + np.exp(-0.7))
        alpha = np.tile([1 - gate, gate], (HEADS, 1))
    else:
        alpha = np.ones((HEADS, 2))
    x64 = np.asarray(x, np.float64)
    expected = softmax(
        sum(
            alpha[None, :, i, None, None] * logits_of(part, p[f"part_{i}"], x64)
            for i, part in enumerate(parts)
        )
    )
    variables["params"]["align"] = jax.tree.map(jnp.float32, p)
    np.testing.assert_allclose(weights_of(layer, variables, x), expected, atol=1e-5)


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


def test_relative_bias_is_a_lookup_by_distance():
    layer = layer_of("RelativeBias")
    x = tokens()
    variables = layer.init(jax.random.key(0), x)
    table = params_of(variables)["rel_embedding"]
    s = np.array(
        [[[table[h, bucket_of(j - i, True, 8, 16)] for j in range(LENGTH)] for i in range(LENGTH)]
         for h in range(HEADS)]
    )  # fmt: skip
    np.testing.assert_allclose(weights_of(layer, variables, x)[0], softmax(s), atol=1e-5)


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
