"""Compares measures of attention weights with NumPy, and tests fits of static forms."""

import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from synthesizer_jax.alignments import DotProduct, GaussianBias, Mixture, PerHead, Random
from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed
from synthesizer_jax.distillation.fit import Statistics
from synthesizer_jax.distillation.replacement import Replacement, student_model
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet
from synthesizer_jax.inspection import run
from synthesizer_jax.inspection.measures import EDGES, QueryView, attention_sums, measure
from synthesizer_jax.inspection.page import sentences_about, write_inspection
from synthesizer_jax.inspection.run import Place, inspect_run, mixers_of, sums_of
from synthesizer_jax.inspection.static_attention import can_be_static, measure_static_attention
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Run, Size, alignment, t5
from synthesizer_jax.models.zoo import language_model
from synthesizer_jax.runs.metrics import METRICS_FILE
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.training.run_directory import save_run
from synthesizer_jax.training.step import loss_sums
from tests.training.tiny import VOCAB, CopyStream, experiment

MODEL = t5(Size(9, 1, 16, 3, 4), vocab_size=VOCAB)
MIXED = student_model(MODEL, (Replacement(Random(8), layers=(0,)),))
"""A model whose encoder layer has tables."""


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
    """All measures equal those that NumPy computes.

    The attention weights are causal, and belong to three padded texts of six, four and two tokens.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([6, 4, 2])
    logits = rng.standard_normal((3, 2, 6, 6)).astype(np.float32)
    logits[:, 1] = logits[:, 1, :, :1] * logits[:, 1, :1, :]  # has rank 1
    position = np.arange(6)
    seen = np.broadcast_to(position + 1, (3, 6))
    weights = np.exp(logits) * (position < seen[..., None])[:, None]
    weights /= weights.sum(-1, keepdims=True)
    real = position < lengths[:, None]
    view = QueryView(jnp.asarray(real), jnp.asarray(seen), jnp.asarray(position * np.ones((3, 1))))
    sums = attention_sums(jnp.asarray(weights), jnp.asarray(logits), view)
    assert sums["histogram"].dtype == jnp.int32
    other = attention_sums(jnp.asarray(weights), jnp.asarray(logits[:, :1]), view)
    assert np.isnan(other["rank"]).all()  # the rank is not defined for talking heads
    found = measure(jax.tree.map(np.asarray, sums), None)
    queries = [(b, i) for b, i in zip(*np.nonzero(real), strict=True)]
    for head in range(2):
        each = [weights[b, head, i, : i + 1].astype(np.float64) for b, i in queries]
        several = [w for w in each if len(w) > 1]
        pairs = np.concatenate(several)
        expected = {
            "entropy": np.mean([stats.entropy(w) for w in each]),
            "spread": np.mean([np.exp(stats.entropy(w)) / len(w) for w in several]),
            "near": np.mean([w[-3:].sum() for w in each]),
            "off_diagonal": np.mean([len(w) - 1 - w.argmax() for w in each]),
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
    assert len(found) == 3 and found[tables]["static"].min() > 0.95
    assert max(m["static"].min() for place, m in found.items() if place != tables) < 0.9
    assert "static: positions explain" in sentences_about(
        {"mixer": "Attention: Random", "end": found[tables]}
    )

    layers = [p for p, mixer in mixers_of(MIXED).items() if not p.cross and can_be_static(mixer)]
    assert len(layers) == 2
    fit_to, measure_on = (
        {(p.stack, p.layer): half[p]["statistics"] for p in layers} for half in (even, odd)
    )
    static = measure_static_attention(
        MIXED, variables, fit_to=fit_to, measure_on=measure_on, batches=batches[1::2]
    )
    places = list(static["divergences"])
    assert {place[:2] for place in places[:3]} == {("encoder", 0)} and len(places) == 6
    loss = jax.jit(lambda b: loss_sums(MIXED, variables, b, z_loss=0.0, label_smoothing=0.0))
    sums = [loss(b) for b in batches[1::2]]
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
    changed = student_model(MODEL, (Replacement(alignment),))
    static = [p for p, mixer in mixers_of(changed).items() if not p.cross and can_be_static(mixer)]
    assert [(p.stack, p.layer) for p in static] == [("decoder", 0)]
    assert can_be_static(Attention(2, 4))
    # In these layers, the weights are not a softmax of the plain logits.
    for options in ({"sinks": True}, {"soft_cap": 5.0}, {"window": 3}):
        assert not can_be_static(Attention(2, 4, **options))


def test_forms_of_a_prefix_language_model_read_later_keys():
    """In a prefix language model, a static form may look at later keys.

    In this test, a head attends to the next key, for queries that see all keys.
    """
    logits = jnp.where(jnp.eye(8, k=1) > 0, 3.0, 0.0)[None]
    mass = jax.nn.softmax(logits)
    queries = jnp.zeros((8, 9)).at[:, 8].set(1.0)
    one = Statistics(1e3 * mass, 1e3 * (mass * jnp.log(mass)).sum((1, 2)), 1e3 * queries)
    model = language_model("v", Size(8, 1, 16, 1, 4), prefix=True)
    bias = {"params": {"decoder": {"relpos_bias": {"rel_embedding": jnp.zeros((1, 32))}}}}
    own = {("decoder", 0): one}
    found = measure_static_attention(model, bias, fit_to=own, measure_on=own, batches=())
    assert found["divergences"]["decoder", 0, 0]["Relative bias"] < 0.01


def rows_of(task, lengths):
    """Returns an evaluation set whose inputs have the given lengths."""
    texts = {"inputs_pretokenized": "i", "targets_pretokenized": "True", "targets": [1]}
    rows = [{**texts, "inputs": np.full(n, 3, np.int32)} for n in lengths]
    return EvaluationSet(task_registry.find_task(task), "validation", rows)


def test_a_run_is_inspected_up_to_a_step(tmp_path, monkeypatch):
    """A run is inspected at all steps up to a given step.

    Values that are unknown or undefined are left out.

    Only examples that have been read are counted.
    """
    recipe = experiment(
        t5(Size(8, 1, 16, 2, 4), encoder=alignment("rv", head_dim=4), vocab_size=VOCAB)
    )
    (layer,) = recipe.model.encoder.runs
    block = replace(layer.block, self_mixer=replace(layer.block.self_mixer, window=3))
    encoder = replace(recipe.model.encoder, runs=(Run(block, 1),))
    recipe = replace(recipe, model=replace(recipe.model, encoder=encoder))
    save_run(recipe, tmp_path)
    tokens = jnp.ones((1, 8), jnp.int32)
    variables = jax.jit(recipe.model.init)(jax.random.key(0), tokens, tokens)

    state = {"params": variables["params"], "constants": {}, "opt_state": {}}
    for step in (0, 2, 4):
        saved = jax.tree.map(Unread.of, {"step": np.int32(step), **state})
        save_streamed(tmp_path / "checkpoints", step, saved)
    sets = [rows_of("glue_rte_v002", range(1, 1 + n)) for n in (3, 20)]
    monkeypatch.setattr(run, "open_evaluator", lambda *_: SimpleNamespace(sets=sets))

    def inspect(step):
        """Inspects the checkpoint of a step."""
        return inspect_run(tmp_path / "checkpoints" / str(step), examples=8, batch_size=4)

    (tmp_path / METRICS_FILE).touch()
    assert inspect(0)["start"] == "not known"  # as for a converted model
    found = inspect(2)
    assert found["start"] == "those saved at step 0" and found["examples"] == 7
    assert found["mixtures"]["encoder 1"]["steps"] == [0, 2]
    shutil.rmtree(tmp_path / "checkpoints" / "0")
    assert inspect(2)["start"] == "those that the experiment’s seed 0 makes"

    numbers = json.loads(write_inspection(tmp_path / "page.html", found, title="x").read_text())
    window, own, cross = (
        numbers["layers"][name]["end"] for name in ("encoder 1", "decoder 1", "decoder 1 cross")
    )
    known = own["near"] + own["spread"] + cross["spread"] + window["near"] + cross["off_diagonal"]
    assert None not in known
    assert set(cross["near"] + cross["profile"][0] + window["spread"]) == {None}
    said = {name: sentences_about(layer) for name, layer in found["layers"].items()}
    assert "local" not in said["decoder 1 cross"] and "off the diagonal" in said["decoder 1 cross"]
    # The sequences are too short to call a head local or sharp. Pretend that they are longer, so
    # that a head with equal weights would rarely look near the query.
    layer = found["layers"]["decoder 1"]
    assert not {"local", "sharp"} & set(re.findall(r"\w+", said["decoder 1"]))
    long = {**layer, "end": {**layer["end"], "near_of_equal": 0.5, "keys": 9.0}}
    assert "local" in sentences_about(long) and "sharp" in sentences_about(long)
    assert "local" not in said["encoder 1"] and "nan" not in " ".join(said.values())
