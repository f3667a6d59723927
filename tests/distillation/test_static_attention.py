"""What static forms miss of a model's heads, and the loss when tables replace them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.alignments import Random
from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.distillation.replacement import Replacement, student_model
from synthesizer_jax.distillation.static_attention import (
    FORMS,
    TABLE,
    measure_static_attention,
    numbers_of_heads,
)
from synthesizer_jax.models import Size, t5
from synthesizer_jax.reports.static_attention import (
    summarize_static_attention,
    write_static_attention,
)
from synthesizer_jax.training.step import loss_sums
from tests.training.tiny import VOCAB, CopyStream

MODEL = t5(Size(8, 2, 16, 2, 4), vocab_size=VOCAB)
"""Its encoder's first layer reads tables alone."""
MIXED = student_model(MODEL, (Replacement(Random(8), layers=(0,)),))


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


@pytest.fixture(scope="module")
def found(batches, variables):
    return measure_static_attention(MIXED, variables, fit_to=batches[:4], held_out=batches[4:])


def test_a_static_layer_is_explained_whole_and_others_are_not(found):
    assert len(found.heads) == 8
    heads = {(h.stack, h.layer, h.head): h for h in found.heads}
    for head in range(2):
        assert heads["encoder", 0, head].divergences[TABLE] < 0.02
        assert heads["encoder", 0, head].explained(TABLE) > 0.95
    assert {(h.stack, h.layer) for h in found.heads[:2]} == {("encoder", 0)}
    values = [h.divergences[TABLE] for h in found.heads]
    assert values == sorted(values) and values[2] > 0.02
    for head in found.heads:
        assert head.divergences.keys() == FORMS.keys()
        assert np.isfinite(list(head.divergences.values())).all()
        assert head.bias is not None and head.bias >= 0
        np.testing.assert_allclose(head.attention.sum(-1), 1, rtol=1e-3)
        np.testing.assert_allclose(head.table.sum(-1), 1, rtol=1e-3)


def test_points_are_the_models_loss_and_cost_with_tables(found, batches, variables):
    first, last = found.points[0], found.points[-1]
    assert [point.replaced for point in found.points] == list(range(9))
    sums = [loss_sums(MIXED, variables, b, z_loss=0.0, label_smoothing=0.0) for b in batches[4:]]
    expected = sum(float(s.loss) for s in sums) / sum(float(s.weight) for s in sums)
    assert first.loss == pytest.approx(expected, rel=1e-5) == first.reversed_loss
    assert last.loss == pytest.approx(last.reversed_loss, rel=1e-6)
    assert abs(found.points[2].loss / first.loss - 1.0) < 0.01  # the layer of tables
    pure = student_model(MODEL, (Replacement(Random(8)), Replacement(Random(8), place="decoder")))
    assert first.costs == summarize(MIXED, inputs_length=8, targets_length=8)
    assert last.costs == summarize(pure, inputs_length=8, targets_length=8)


def test_the_tolerance_ends_at_the_first_point_beyond_it(found):
    losses = [1.0, 1.005, 1.2, 1.0]
    points = [dataclasses.replace(p, loss=x) for p, x in zip(found.points, losses, strict=False)]
    made = dataclasses.replace(found, points=points)
    assert [made.replaceable(t).replaced for t in (0.0, 0.01, 0.5)] == [0, 1, 3]
    assert "the 1 most static can read a fitted table" in summarize_static_attention(made, 0.01)


def test_measured_numbers_are_spread_from_none_to_all():
    assert numbers_of_heads(3) == [0, 1, 2, 3]
    many = numbers_of_heads(288)
    assert (many[0], many[-1]) == (0, 288) and len(set(many)) == len(many) <= 18


def test_the_page_shows_every_head_and_escapes_its_title(found, tmp_path):
    write_static_attention(
        tmp_path / "page.html",
        found,
        title="<script>",
        lengths={"inputs": 8, "targets": 8},
        tolerance=0.01,
        facts={"jax": jax.__version__},
    )
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;" in page and "<script" not in page
    assert page.count("<svg") == 5  # forms and pictures of two stacks, losses
    for head in found.heads:
        assert f"<td>{head.name}</td>" in page
