"""Tests that static alignments are fitted optimally, and from sums of attention weights alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synthesizer_jax as sj
from synthesizer_jax.distillation.fit import (
    Statistics,
    collect_statistics,
    divergence,
    fit,
    is_static,
    position_logits,
)
from synthesizer_jax.distillation.replacement import STACKS
from synthesizer_jax.models import Size, t5
from tests.layers.oracles import softmax
from tests.training.tiny import VOCAB, CopyStream

N, HEADS, D = 6, 2, 8
MODEL = t5(Size(D, 2, 16, HEADS, 4), vocab_size=VOCAB)


def make_rows(*, causal, examples=40, seed=0):
    """Returns random attention weights, and the number of keys that each query sees.

    The examples have different lengths.

    Padding queries see 0 keys.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, N + 1, examples)
    weights = np.zeros((examples, HEADS, N, N))
    seen = np.zeros((examples, N), int)
    for b, length in enumerate(lengths):
        for q in range(length):
            seen[b, q] = q + 1 if causal else length
            logits = rng.normal(size=(HEADS, seen[b, q])) + 2 * np.cos(np.arange(seen[b, q]) + q)
            weights[b, :, q, : seen[b, q]] = softmax(logits)
    return weights, seen


def summed(weights, seen):
    """Returns the statistics of all rows, which are summed row by row."""
    rows = np.zeros((N, N + 1), np.float32)
    for b, q in zip(*np.nonzero(seen), strict=True):
        rows[q, seen[b, q]] += 1
    positive = np.where(weights > 0, weights, 1)
    negentropy = (weights * np.log(positive)).sum((0, 2, 3))
    return Statistics(np.float32(weights.sum(0)), np.float32(negentropy), rows)


def mean_divergence(logits, weights, seen):
    """Returns the mean KL divergence of all rows, which is computed row by row."""
    total = np.zeros(HEADS)
    for b, q in zip(*np.nonzero(seen), strict=True):
        n = seen[b, q]
        p = weights[b, :, q, :n]
        static = softmax(logits[:, q, :n])
        total += (p * (np.log(p) - np.log(static))).sum(-1)
    return total / (seen > 0).sum()


@pytest.mark.parametrize("causal", [False, True])
def test_divergence_is_the_mean_over_rows(causal):
    weights, seen = make_rows(causal=causal)
    logits = np.random.default_rng(1).normal(size=(HEADS, N, N)).astype(np.float32)
    found = divergence(jnp.asarray(logits), summed(weights, seen))
    np.testing.assert_allclose(found, mean_divergence(logits, weights, seen), rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_random_table_is_the_best_table(causal):
    weights, seen = make_rows(causal=causal)
    statistics = summed(weights, seen)
    attention = sj.Attention(HEADS, 4, alignment=sj.Random(max_length=N))
    _, logits = fit(attention, statistics, d_model=D, causal=causal)
    kl = divergence(logits, statistics)
    logits = np.asarray(logits)
    np.testing.assert_allclose(kl, mean_divergence(logits, weights, seen), rtol=1e-3)
    # No random step away from the fit improves the divergence by more than the prior costs.
    for seed in range(5):
        step = 0.1 * np.random.default_rng(seed).normal(size=logits.shape)
        assert (mean_divergence(logits + step, weights, seen) > np.asarray(kl) - 2e-3).all()


FORMS = {
    "table": (sj.Random(max_length=N + 3), None),
    "factors": (sj.FactorizedRandom(max_length=N + 3, rank=2), None),
    "relative": (
        sj.RelativeBias(num_buckets=8, max_distance=16),
        {"rel_embedding": jax.random.normal(jax.random.key(0), (HEADS, 8))},
    ),
    "Gaussian": (
        sj.GaussianBias(trainable=True),
        {"offset": jnp.asarray([-1.5, 2.0]), "precision": jnp.asarray([0.7, 0.1])},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_fit_recovers_a_form(name):
    """If logits have the form of an alignment, fitting recovers them.

    All rows have the same length.

    The logits are the sum of a fixed bias and either an alignment's form or a table of rank two.
    """
    alignment, params = FORMS[name]
    rng = np.random.default_rng(0)
    logits = np.einsum("hqr,hkr->hqk", *rng.normal(size=(2, HEADS, N, 2)))
    if params is not None:
        logits = position_logits(alignment, params, num_heads=HEADS, length=N, d_model=D)
    bias = rng.normal(size=(HEADS, N, N))
    weights = np.broadcast_to(softmax(np.asarray(logits) + bias), (500, HEADS, N, N))
    statistics = summed(weights, np.full((500, N), N))
    attention = sj.Attention(HEADS, 4, alignment=alignment)
    found, logits = fit(attention, statistics, d_model=D, causal=False, bias=bias)
    assert divergence(logits + bias, statistics).max() < 1e-3
    np.testing.assert_allclose(softmax(np.asarray(logits) + bias), weights[0], atol=0.01)
    for name, x in params.items() if isinstance(alignment, sj.GaussianBias) else ():
        np.testing.assert_allclose(found[name], x, rtol=0.1)


LAYERS = {
    "soft cap": {"soft_cap": 3.0},
    "window": {"window": 3},
    "uneven window": {"window": (1, 2)},
    "sinks": {"sinks": True},
    "all": {"soft_cap": 2.0, "window": 3, "sinks": True},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_fit_recovers_a_table_in_a_layer_with(name, causal):
    """Fitting recovers the table of an attention layer. Rows have different lengths.

    The attention weights are computed in float64 from a table, a bias and sinks.
    """
    fields = LAYERS[name]
    rng = np.random.default_rng(0)
    cap, window = fields.get("soft_cap"), fields.get("window", N)
    before, after = (window - 1, window - 1) if isinstance(window, int) else window
    table, bias = rng.normal(size=(2, HEADS, N, N))
    sinks = rng.normal(size=HEADS) if "sinks" in fields else None
    logits = table + bias if cap is None else cap * np.tanh((table + bias) / cap)
    weights, seen = np.zeros((300, HEADS, N, N)), np.zeros((300, N), int)
    for b, length in enumerate(rng.integers(2, N + 1, 300)):
        for q in range(length):
            seen[b, q] = q + 1 if causal else length
            keys = [k for k in range(seen[b, q]) if q - before <= k <= q + after]
            of_keys = logits[:, q, keys]
            if sinks is not None:
                of_keys = np.concatenate([of_keys, sinks[:, None]], axis=1)
            weights[b, :, q, keys] = softmax(of_keys)[:, : len(keys)].T
    statistics = summed(weights, seen)
    left = np.maximum((seen > 0)[:, None] - weights.sum(-1), 0)
    if sinks is not None:
        of_sinks = (left * np.log(np.where(left > 0, left, 1))).sum((0, 2))
        statistics = statistics._replace(negentropy=np.float32(statistics.negentropy + of_sinks))
    attention = sj.Attention(HEADS, 4, alignment=sj.Random(max_length=N), **fields)
    options = {"bias": bias, "sinks": None if sinks is None else jnp.asarray(sinks)}
    _, found = fit(attention, statistics, d_model=D, causal=causal, **options)
    found = np.asarray(found) + bias
    capped = found if cap is None else cap * np.tanh(found / cap)
    for b in range(20):
        for q, n in enumerate(seen[b]):
            keys = [k for k in range(n) if q - before <= k <= q + after]
            of_keys = np.concatenate(
                [capped[:, q, keys], *([] if sinks is None else [sinks[:, None]])], 1
            )
            if keys:
                expected = weights[b, :, q, keys].T
                np.testing.assert_allclose(softmax(of_keys)[:, : len(keys)], expected, atol=0.02)
    kept = {"soft_cap": cap, "window": fields.get("window"), "sinks": options["sinks"]}
    assert (divergence(jnp.asarray(found), statistics, **kept) < 2e-3).all()


def test_statistics_are_those_of_the_weights():
    stream = CopyStream()
    batches = [{k: jnp.asarray(v) for k, v in next(stream).items()} for _ in range(3)]
    whole = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    tokens = whole["encoder_input_tokens"], whole["decoder_input_tokens"]
    variables = jax.jit(MODEL.init)(jax.random.key(0), *tokens)
    layers = {
        (stack, i): getattr(MODEL, stack).runs[0].block.self_mixer
        for stack, i in (("encoder", 1), ("decoder", 0))
    }
    layers["encoder", 0] = layers["encoder", 1].copy(window=2)
    found = collect_statistics(MODEL, variables, batches, layers)
    _, sown = jax.jit(functools.partial(MODEL.apply, mutable=["intermediates"]))(variables, *tokens)
    real = whole["decoder_target_tokens"] != 0
    for stack, layer in layers:
        (weights,) = sown["intermediates"][stack][f"layers_{layer}"][STACKS[stack]][
            "attention_weights"
        ]
        weights = np.asarray(weights) * real[:, None, :, None]
        if (stack, layer) == (
            "encoder",
            0,
        ):  # the student sees fewer keys, so its weights must be larger
            weights = weights * np.tri(8, k=1) * np.tri(8, k=1).T
            weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
        expected = weights.sum(0)
        np.testing.assert_allclose(found[stack, layer].mass, expected, rtol=1e-4, atol=1e-5)
        seen = (real.sum(1, keepdims=True) if stack == "encoder" else np.arange(1, 9)) * real
        for q in range(8):
            counts = np.bincount(seen[:, q][seen[:, q] > 0], minlength=9)
            np.testing.assert_array_equal(found[stack, layer].queries[q], counts)


def test_only_alignments_that_read_no_tokens_are_static():
    static = sj.Mixture((sj.Random(4), sj.PerHead((sj.RelativeBias(), sj.FactorizedRandom(4)))))
    assert is_static(static) and not is_static(sj.Mixture((sj.Random(4), sj.Dense(4))))
    assert is_static(sj.GaussianBias(trainable=True)) and not is_static(sj.GaussianBias())
    assert not is_static(sj.Random(4, trainable=False))
    params = {"rel_embedding": jnp.arange(2.0)[:, None] * jnp.ones((2, 32))}
    logits = position_logits(sj.RelativeBias(), params, num_heads=2, length=3, d_model=8)
    np.testing.assert_array_equal(logits, np.arange(2.0)[:, None, None] * np.ones((2, 3, 3)))
