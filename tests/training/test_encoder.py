"""Encoders in the training loop: losses against NumPy, meshes, micro-batches, rules, restarts, mistakes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.placement import place_variables
from synthesizer_jax.cli.settings import override
from synthesizer_jax.costs.chips import parse_topology
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.evaluation.evaluator import check_masked_tasks
from synthesizer_jax.models import Run, UniversalStack, stacks_of
from synthesizer_jax.optimizers import OptimizerRule
from synthesizer_jax.registry import from_json, replace, to_json
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.runs.progress import summary_lines
from synthesizer_jax.runtime.preemption import StopSignal
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training import step
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.plan import advise, make_plan
from synthesizer_jax.training.step import loss_sums
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import experiment as text_to_text
from tests.training.tiny_encoder import HEADS, STREAMS, ClassStream, encoder, experiment

Z, SMOOTHING = 0.01, 0.1
BOTH = pytest.mark.parametrize("head", ["classes", "masked"])


def initialized(model, batch):
    """Variables with no zero among the parameters, so that biases count."""
    variables = model.init(jax.random.key(0), batch["encoder_input_tokens"])
    leaves, tree = jax.tree.flatten(variables)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, moved)


def oracle(logits, batch):
    """The loss and the z-loss in float64, target by target."""
    loss = z_loss = 0.0
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    for place in zip(*np.nonzero(weights), strict=True):
        row = np.float64(logits[place])
        log_z = np.log(np.exp(row).sum())
        y = np.full(len(row), SMOOTHING / (len(row) - 1))
        y[targets[place]] = 1 - SMOOTHING
        loss += log_z - y @ row + (y * np.log(y)).sum()
        z_loss += Z * log_z**2
    return loss, z_loss


def sums_of(model, variables, batch):
    return loss_sums(model, variables, batch, z_loss=Z, label_smoothing=SMOOTHING)


@pytest.mark.parametrize("tied", [True, False])
@BOTH
def test_the_loss_is_the_cross_entropy_of_the_head(head, tied):
    model, batch = encoder(**HEADS[head]).copy(tied=tied), next(STREAMS[head]())
    variables = initialized(model, batch)
    encoded = model.apply(variables, batch["encoder_input_tokens"])
    logits = encoded.token_logits if head == "masked" else encoded.outputs[:, None]
    sums = sums_of(model, variables, batch)
    loss, z_loss = oracle(np.asarray(logits), batch)
    np.testing.assert_allclose([sums.loss, sums.z_loss], [loss, z_loss], rtol=1e-5)
    weights = batch["decoder_loss_weights"]
    hits = (np.asarray(logits).argmax(-1) == batch["decoder_target_tokens"]) * weights
    assert (sums.correct, sums.weight, sums.penalty) == (hits.sum(), weights.sum(), 0)


@pytest.mark.slow
def test_a_large_vocabulary_is_projected_in_chunks(monkeypatch):
    model, batch = encoder(masked_lm=True), next(STREAMS["masked"]())
    variables = initialized(model, batch)

    def loss_and_gradient():
        return jax.value_and_grad(lambda v: sums_of(model, v, batch).total)(variables)

    dense = loss_and_gradient()
    monkeypatch.setattr(step, "DENSE_LOGITS", 0)
    chunked = loss_and_gradient()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), dense, chunked)


@BOTH
def test_dropout_acts_where_there_is_a_key(head):
    model, batch = encoder(dropout_rate=0.5, **HEADS[head]), next(STREAMS[head]())
    variables = initialized(model, batch)
    options = {"z_loss": 0.0, "label_smoothing": 0.0}
    losses = [
        float(loss_sums(model, variables, batch, **options, dropout_key=key).loss)
        for key in (None, None, jax.random.key(1), jax.random.key(2))
    ]
    assert losses[0] == losses[1] and len(set(losses)) == 3


def test_a_ponder_cost_of_the_encoder_is_part_of_the_loss():
    plain, batch = encoder(), next(ClassStream())
    block = plain.encoder.runs[0].block
    shared = UniversalStack((Run(block, 3),), halting_threshold=0.9, ponder_cost=1.0)
    model = plain.copy(encoder=shared)
    sums = sums_of(model, initialized(model, batch), batch)
    assert sums.penalty / sums.weight >= 1


def stepped(recipe, stream, devices=1, steps=3):
    """The state after some steps, and the last metrics."""
    trainer = Trainer(recipe, jax.devices()[:devices])
    state = trainer.init()
    for _ in range(steps):
        state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
    return state, {name: float(value) for name, value in metrics.items()}


def assert_same(found, wanted):
    params = [state.averaged_variables["params"] for state, _ in (found, wanted)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), *params)
    assert found[1] == pytest.approx(wanted[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(data=2, fsdp=2, tensor=2)])
@pytest.mark.parametrize("chunked", [False, True])
@BOTH
def test_a_mesh_makes_the_update_of_one_device(head, mesh, chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(step, "DENSE_LOGITS", 0)
    recipe = experiment(encoder(**HEADS[head]), ema=0.9)
    alone = stepped(recipe, STREAMS[head]())
    assert_same(stepped(replace(recipe, mesh=mesh), STREAMS[head](), devices=8), alone)


@pytest.mark.slow
@BOTH
def test_micro_batches_make_the_same_update(head):
    model = encoder(**HEADS[head])
    one, four = (experiment(model, micro_batches=parts) for parts in (1, 4))
    assert_same(stepped(four, STREAMS[head]()), stepped(one, STREAMS[head]()))


def test_rules_train_the_head_alone():
    recipe = experiment(rules=(OptimizerRule("(?!output_dense).*", frozen=True),))
    trainer = Trainer(recipe, jax.devices()[:1])
    before = jax.tree.map(np.asarray, trainer.init().params)
    state, _ = stepped(recipe, ClassStream())
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, state.params)
    assert {name for name in changed if any(jax.tree.leaves(changed[name]))} == {"output_dense"}


def run(directory, stream, model=None, **changes):
    with StopSignal() as stop:
        trainer = Trainer(experiment(model, **changes), jax.devices()[:1])
        return train(trainer, stream, directory, stop=stop, visible=False)


def losses(directory):
    records = read_metrics(directory / METRICS_FILE)
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


@pytest.mark.slow
@BOTH
def test_the_loop_trains_a_head_and_continues(head, tmp_path):
    model = encoder(dropout_rate=0.1, **HEADS[head])
    whole = run(tmp_path / "whole", STREAMS[head](), model, steps=40)
    found = losses(tmp_path / "whole")
    assert np.mean([found[s] for s in range(31, 41)]) < 0.7 * found[1]
    run(tmp_path / "parts", STREAMS[head](), model, steps=20)
    parts = run(tmp_path / "parts", STREAMS[head](), model, steps=40)
    assert losses(tmp_path / "parts") == found
    jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)
    recipe = experiment(model)
    _, layout = place_variables(model, recipe.example, recipe.mesh, devices=jax.devices()[:1])
    number, variables = restore_variables(tmp_path / "parts" / "checkpoints", layout=layout)
    assert number == 40
    jax.tree.map(np.testing.assert_array_equal, variables["params"], whole.params)


@BOTH
def test_costs_of_an_encoder_are_those_of_its_inputs(head):
    recipe = experiment(encoder(**HEADS[head]))
    plan = make_plan(recipe, parse_topology("v5e:2x2"))
    assert plan.fits and plan.needs.activations > 0
    assert plan.flops == Trainer(recipe, jax.devices()[:1]).step_flops() > 0
    assert advise(recipe, parse_topology("v5e:2x2"))
    lengths = {"inputs_length": 4, "targets_length": min(4, recipe.data.targets_length)}
    shorter = replace(recipe, data=replace(recipe.data, **lengths))
    assert make_plan(shorter, parse_topology("v5e:2x2")).flops < plan.flops


@pytest.mark.parametrize(("prompt", "commands"), [("", ["eval", "generate"]), (None, ["eval"])])
def test_the_next_commands_are_possible(prompt, commands, tmp_path):
    (tmp_path / METRICS_FILE).touch()
    text = summary_lines(tmp_path, steps=4, saved=[4], data_dir=None, prompt=prompt)
    assert text.endswith(' ""') == (prompt == "")
    assert re.findall("synthesizer-jax ([a-z]+)", text) == commands


def test_an_encoder_is_saved_as_json():
    recipe = experiment()
    assert from_json(to_json(recipe)) == recipe
    assert len(recipe.example) == 1 and set(stacks_of(recipe.model)) == {"encoder"}
    assert override(recipe, "model.pooling=first").model.pooling == "first"


CLASSIFIER, MASKED = experiment(), experiment(encoder(masked_lm=True))


@pytest.mark.parametrize(
    ("recipe", "assignment", "message"),
    [
        (CLASSIFIER, "model.outputs=4", "model.outputs is 4 and data.classes has 3 label words"),
        (CLASSIFIER, "model.outputs=none", "model.outputs=None and model.masked_lm=False; set one"),
        (CLASSIFIER, "model.masked_lm=true", "model.outputs=3 and model.masked_lm=True; set one"),
        (CLASSIFIER, "data.classes=[]", "model.outputs is 3 and data.classes has 0 label words"),
        (MASKED, "data.pack=true", "an Encoder reads one text a row; set data.pack=false"),
        (CLASSIFIER, "evaluation.method=greedy", "an Encoder decodes nothing; set evaluation.meth"),
        (
            CLASSIFIER,
            "model=t5_tiny",
            "EncoderDecoder models learn label words as text, set data.classes",
        ),
        (MASKED, "data.targets_length=4", "set it to data.inputs_length=8, also in data.buckets"),
        (MASKED, "data.buckets=[[4, 2]]", "set it to data.inputs_length=8, also in data.buckets"),
    ],
)
def test_mistakes_are_one_sentence(recipe, assignment, message):
    with pytest.raises(ValueError, match=message) as error:
        override(recipe, assignment)
    assert "\n" not in str(error.value)


def test_a_classifier_is_given_other_classes():
    changed = override(CLASSIFIER, "data.classes=('bad', 'good')", "model.outputs=2")
    assert changed.model.outputs == len(changed.data.classes) == 2


@pytest.mark.parametrize("recipe", [MASKED, text_to_text()])
def test_a_published_bert_can_be_a_recipes_model(recipe):
    assert override(recipe, "model=bert_large").model.masked_lm


def test_a_masked_model_is_given_no_other_objective():
    """An objective of the task itself comes before `data.objective`."""
    masked = replace(MASKED.data, objective=OBJECTIVES["masked_lm"])
    check_masked_tasks(MASKED.model, replace(masked, mixture="lm1b_v100_full_lm"))
    check_masked_tasks(CLASSIFIER.model, replace(MASKED.data, mixture="glue_rte_v002"))
    for mixture in ("c4_v220_span_corruption", "glue_rte_v002"):
        with pytest.raises(ValueError, match=f"{mixture} is not made for a masked language model"):
            check_masked_tasks(MASKED.model, replace(masked, mixture=mixture))


def test_the_loss_weights_of_a_masked_model_choose_its_targets():
    model, batch = encoder(masked_lm=True), next(STREAMS["masked"]())
    variables = initialized(model, batch)
    elsewhere = {**batch, "decoder_target_tokens": batch["decoder_target_tokens"].copy()}
    elsewhere["decoder_target_tokens"][batch["decoder_loss_weights"] == 0] = -100
    first, second = (sums_of(model, variables, b) for b in (batch, elsewhere))
    assert jnp.isfinite(second.total) and first == second
