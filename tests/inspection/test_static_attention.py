"""What static forms miss of a model's heads, and the loss when tables replace them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synthesizer_jax.reports.static_attention import sentences_about, write_static_attention

from synthesizer_jax.alignments import DotProduct, GaussianBias, Mixture, PerHead, Random
from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.distillation.replacement import Replacement, student_model
from synthesizer_jax.inspection.static_attention import (
    BIAS,
    TABLE,
    UNIFORM,
    attention_layers,
    measure_static_attention,
    numbers_of_heads,
    static_forms,
)
from synthesizer_jax.models import Size, UniversalStack, t5
from synthesizer_jax.training.step import loss_sums
from tests.training.tiny import VOCAB, CopyStream

MODEL = t5(Size(9, 2, 16, 3, 4), vocab_size=VOCAB)
"""Three heads, which no number of offsets but one and three divides."""
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
    assert len(found.heads) == 12 and (found.fitted, found.held_out) == (32, 16)
    assert {(h.stack, h.layer) for h in found.heads[:3]} == {("encoder", 0)}
    for head in found.heads[:3]:
        assert head.divergences[TABLE] < min(0.02, 0.05 * head.divergences[UNIFORM])
    values = [h.divergences[TABLE] for h in found.heads]
    assert values == sorted(values) and values[3] > 0.02
    for head in found.heads:
        assert head.divergences.keys() == {UNIFORM, BIAS, *static_forms(8, causal=False)}
        assert np.isfinite(list(head.divergences.values())).all() and head.divergences[BIAS] >= 0


def test_points_are_the_models_loss_and_cost_with_tables(found, batches, variables):
    first, last = found.points[0], found.points[-1]
    assert [point.replaced for point in found.points] == list(range(13))
    sums = [loss_sums(MIXED, variables, b, z_loss=0.0, label_smoothing=0.0) for b in batches[4:]]
    expected = sum(float(s.loss) for s in sums) / sum(float(s.weight) for s in sums)
    assert first.loss == pytest.approx(expected, rel=1e-5) == first.reversed_loss
    assert abs(found.points[3].loss / first.loss - 1.0) < 0.01  # the layer of tables
    pure = student_model(MODEL, (Replacement(Random(8)), Replacement(Random(8), place="decoder")))
    assert first.costs == summarize(MIXED, inputs_length=8, targets_length=8)
    assert last.costs == summarize(pure, inputs_length=8, targets_length=8)
    many = numbers_of_heads(288)
    assert (many[0], many[-1]) == (0, 288) and len(set(many)) == len(many) <= 18


def test_the_tolerance_ends_at_the_first_point_beyond_it(found):
    losses = [1.0, 1.005, 1.2, 1.0]
    points = [p._replace(loss=x) for p, x in zip(found.points, losses, strict=False)]
    made = dataclasses.replace(found, points=points)
    for tolerance, replaced in ((0.0, 0), (0.01, 1), (0.5, 3)):
        within = dataclasses.replace(made, tolerance=tolerance)
        assert within.replaceable.replaced == replaced
        count = f"Of 12 heads, the {replaced}" if replaced else "None of 12 heads"
        assert sentences_about(within)[0].startswith(f"{count} ")


def test_a_model_that_does_not_use_its_attention_is_named(found, batches, variables, tmp_path):
    assert found.uniform_loss > found.highest_loss and len(sentences_about(found)) == 1
    blind = jax.tree_util.tree_map_with_path(
        lambda path, x: 0 * x if {"query", "table", "rel_embedding"} & {p.key for p in path} else x,
        variables,
    )
    said = {}
    seen = measure_static_attention(
        *(MIXED, blind),
        fit_to=batches[:4],
        held_out=batches[4:],
        phase=lambda title, total: said.setdefault(title, []).append,
    )
    assert seen.uniform_loss == pytest.approx(seen.points[0].loss, rel=1e-6)
    assert list(map(sum, said.values())) == [4, 2, 4, 13]
    assert next(iter(said)) == "attention of 32 training examples"
    better = [h.divergences | {UNIFORM: h.divergences[TABLE] - 0.1} for h in found.heads]
    heads = [h._replace(divergences=x) for h, x in zip(found.heads, better, strict=True)]
    seen = dataclasses.replace(seen, heads=heads, tolerance=0.02)
    write_static_attention(tmp_path / "page.html", seen, title="<script>")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "this model does not use its attention" in page and "tolerance 2.0%" in page
    assert "describe 12 of 12 heads better than the table: 32 examples are too few" in page
    assert "&lt;script&gt;" in page and "<script" not in page
    assert page.count("<svg") == 1 and page.count("<figure") == 2  # losses, forms of two stacks
    assert all(f">{head.name}</td>" in page for head in heads)


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
def test_only_layers_that_tables_can_replace_head_by_head_are_measured(alignment):
    changed = student_model(MODEL, (Replacement(alignment, layers=(1,)),))
    assert attention_layers(changed) == (("encoder", 0), ("decoder", 0), ("decoder", 1))
    both = (Replacement(alignment), Replacement(alignment, place="decoder"))
    with pytest.raises(ValueError, match=r"no self-attention that tables could replace; give one"):
        measure_static_attention(student_model(MODEL, both), {}, fit_to=[], held_out=[])


def test_layers_that_share_parameters_and_losses_that_are_no_numbers_are_errors(batches, variables):
    shared = MODEL.copy(encoder=UniversalStack(MODEL.encoder.runs))
    with pytest.raises(ValueError, match="whose layers have no alignments of their own"):
        measure_static_attention(shared, {}, fit_to=[], held_out=[])
    broken = jax.tree.map(lambda x: x, variables)
    broken["params"]["logits_kernel"] = broken["params"]["logits_kernel"] * np.nan
    with pytest.raises(ValueError, match=r"not finite.*; give an earlier step"):
        measure_static_attention(MIXED, broken, fit_to=batches[:1], held_out=batches[1:2])
