"""Measures of attention weights against NumPy, and what static forms miss of a model's heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from synthesizer_jax.alignments import DotProduct, GaussianBias, Mixture, PerHead, Random
from synthesizer_jax.distillation.replacement import Replacement, student_model
from synthesizer_jax.inspection.measures import EDGES, Rows, attention_sums, measure
from synthesizer_jax.inspection.run import Place, mixers_of, sums_of
from synthesizer_jax.inspection.static_attention import can_be_static, measure_static_attention
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Size, t5
from synthesizer_jax.reports.inspection import sentence
from synthesizer_jax.training.step import loss_sums
from tests.training.tiny import VOCAB, CopyStream

MODEL = t5(Size(9, 2, 16, 3, 4), vocab_size=VOCAB)
MIXED = student_model(MODEL, (Replacement(Random(8), layers=(0,)),))
"""Its first encoder layer has tables."""


@pytest.fixture(scope="module")
def batches():
    stream = CopyStream()
    return [{k: jnp.asarray(v) for k, v in next(stream).items()} for _ in range(6)]


@pytest.fixture(scope="module")
def variables(batches):
    tokens = (batches[0]["encoder_input_tokens"], batches[0]["decoder_input_tokens"])
    made = jax.jit(MIXED.init)(jax.random.key(0), *tokens)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.5 * rng.standard_normal(x.shape).astype(np.float32), made)


def test_measures_equal_numpy():
    """Causal weights of three texts of six, four and two tokens, with padding."""
    rng, lengths = np.random.default_rng(0), np.array([6, 4, 2])
    logits = rng.standard_normal((3, 2, 6, 6)).astype(np.float32)
    logits[:, 1] = logits[:, 1, :, :1] * logits[:, 1, :1, :]  # of rank 1
    position = np.arange(6)
    seen = np.broadcast_to(position + 1, (3, 6))
    weights = np.exp(logits) * (position < seen[..., None])[:, None]
    weights /= weights.sum(-1, keepdims=True)
    real = position < lengths[:, None]
    rows = Rows(jnp.asarray(real), jnp.asarray(seen), jnp.asarray(position * np.ones((3, 1))))
    sums = attention_sums(jnp.asarray(weights), jnp.asarray(logits), rows)
    found = measure(jax.tree.map(np.asarray, sums), None)
    queries = [(b, i) for b, i in zip(*np.nonzero(real), strict=True)]
    for head in range(2):
        each = [weights[b, head, i, : i + 1].astype(np.float64) for b, i in queries]
        several = [w for w in each if len(w) > 1]
        pairs = np.concatenate(several)
        relative = np.concatenate([w * len(w) for w in several])
        expected = {
            "entropy": np.mean([stats.entropy(w) for w in each]),
            "spread": np.mean([np.exp(stats.entropy(w)) / len(w) for w in several]),
            "near": np.mean([w[-3:].sum() for w in each]),
            "off_diagonal": np.mean([len(w) - 1 - w.argmax() for w in each]),
            "mean": relative.mean(),
            "deviation": relative.std(),
            "skewness": stats.skew(relative),
            "kurtosis": stats.kurtosis(relative),
            "rank": (6, 1)[head] / 6,
        }
        for name, value in expected.items():
            assert found[name][head] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        shares = np.histogram(np.clip(pairs, EDGES[0], 1), EDGES)[0] / len(pairs)
        np.testing.assert_allclose(found["histogram"][head], shares, atol=1e-6)
    alike = [
        np.dot(x, y) / np.linalg.norm(x) / np.linalg.norm(y)
        for x, y in ((weights[b, 0, i], weights[b, 1, i]) for b, i in queries)
    ]
    np.testing.assert_allclose(found["similarity"][0], [1, np.mean(alike)], rtol=1e-5)
    assert found["keys"] == pytest.approx(np.mean([i + 1 for _, i in queries]))


def test_a_layer_of_tables_is_static_and_others_are_not(batches, variables):
    even, odd = sums_of(MIXED, variables, batches)
    found = {place: measure(even[place], odd[place]) for place in even}
    tables = Place("encoder", False, 0)
    assert len(found) == 6 and found[tables]["static"].min() > 0.95
    assert max(m["static"].min() for place, m in found.items() if place != tables) < 0.9
    assert "static: positions explain" in sentence(
        {"mixer": "Attention: Random", "end": found[tables]}
    )

    layers = [p for p, mixer in mixers_of(MIXED).items() if not p.cross and can_be_static(mixer)]
    assert len(layers) == 4
    fit_to, measure_on = (
        {(p.stack, p.layer): half[p]["statistics"] for p in layers} for half in (even, odd)
    )
    static = measure_static_attention(
        MIXED, variables, fit_to=fit_to, measure_on=measure_on, batches=batches[1::2]
    )
    places = list(static["divergences"])
    assert {place[:2] for place in places[:3]} == {("encoder", 0)} and len(places) == 12
    sums = [loss_sums(MIXED, variables, b, z_loss=0.0, label_smoothing=0.0) for b in batches[1::2]]
    loss = sum(float(s.loss) for s in sums) / sum(float(s.weight) for s in sums)
    assert static["loss"][0] == pytest.approx(loss, rel=1e-5)
    assert static["loss"][static["replaced"].index(3)] == pytest.approx(loss, rel=0.01)
    assert static["loss"][-1] > 1.01 * loss


@pytest.mark.parametrize(
    "alignment",
    [
        Random(8, trainable=False),
        GaussianBias((0.0,)),
        PerHead((DotProduct(), Random(8)), heads=(1, 2)),
        Mixture((DotProduct(), Random(8, trainable=False))),
    ],
    ids=lambda alignment: type(alignment).__name__,
)
def test_only_layers_that_tables_can_replace_head_by_head_are_fitted(alignment):
    changed = student_model(MODEL, (Replacement(alignment, layers=(1,)),))
    static = [p for p, mixer in mixers_of(changed).items() if not p.cross and can_be_static(mixer)]
    assert [(p.stack, p.layer) for p in static] == [("encoder", 0), ("decoder", 0), ("decoder", 1)]
    assert can_be_static(Attention(2, 4))
    for options in ({"sinks": True}, {"soft_cap": 5.0}, {"window": 3}):  # no softmax of all logits
        assert not can_be_static(Attention(2, 4, **options))
