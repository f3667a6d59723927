"""Replacements, the training of students, and their initialization from the teacher."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import Attention, Gaussian, Random, SentenceFeedForward, TokenFeedForward
from synthesizer_jax.distillation.distill import (
    Distillation,
    DistillationTrainer,
    _initialize_from,
    _squared_error,
    _student_experiment,
)
from synthesizer_jax.distillation.replacement import Replacement, student_model
from synthesizer_jax.mixers import TAPS
from synthesizer_jax.models import Size, t5, unroll, unroll_variables
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.registry import replace
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.step import teacher_forced
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import VOCAB, CopyStream, experiment

TRAINING = Training(steps=40, optimizer=AdamW(learning_rate=Constant(0.01)))
MODEL = t5(Size(8, 2, 16, 2, 4), vocab_size=VOCAB, relative_bias=False, scan=True)

RECIPES = {
    "ALR": (Replacement(SentenceFeedForward(8, 12, 2, 4)),),
    "ALSR": (Replacement(SentenceFeedForward(8, 12, 2, 4, separate_heads=True)),),
    "ALRR": (Replacement(SentenceFeedForward(8, 12), scope="sublayer"),),
    "ELR": (Replacement(SentenceFeedForward(8, 12), scope="layer"),),
    "per token": (Replacement(TokenFeedForward(12, 2, 4)),),
    "Random": (Replacement(Random(max_length=8)),),
    "one layer": (Replacement(Random(max_length=8), layers=(1,)),),
    "decoder and cross": (
        Replacement(SentenceFeedForward(8, 12, 2, 4, causal=True), place="decoder"),
        Replacement(SentenceFeedForward(8, 12, 2, 4), place="cross"),
    ),
}


@pytest.fixture(scope="module")
def teacher():
    teacher_experiment = replace(experiment(), model=MODEL)
    trainer = Trainer(teacher_experiment, jax.devices()[:1])
    variables = {"params": trainer.init().params}
    return teacher_experiment, unroll_variables(MODEL, variables)


def make_trainer(student, model, variables, recipe):
    return DistillationTrainer(
        student, teacher=model, variables=variables, recipe=recipe, devices=jax.devices()[:1]
    )


def distill_steps(teacher, recipe, steps):
    """The trainer, the initial parameters, the final state and the metrics of every step."""
    teacher_experiment, variables = teacher
    student = _student_experiment(teacher_experiment, recipe, teacher=None)
    trainer = make_trainer(student, unroll(MODEL), variables, recipe)
    state, stream = _initialize_from(variables)(trainer.init()), CopyStream()
    initial_params = jax.tree.map(np.asarray, state.params)
    history = []
    for _ in range(steps):
        state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
        history.append({k: float(v) for k, v in metrics.items()})
    return trainer, initial_params, state, history


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "together"),
    [*((name, False) for name in RECIPES), ("ALR", True), ("decoder and cross", True)],
)
def test_only_replacements_change_and_the_loss_decreases(teacher, name, together):
    recipe = Distillation(RECIPES[name], TRAINING, together=together)
    trainer, initial_params, state, history = distill_steps(teacher, recipe, 30)
    replaced = {(pair.stack, pair.layer, pair.mixer) for pair in trainer.tap_pairs}
    changed = {
        tuple(k.key for k in path[:3])
        for (path, a), b in zip(
            jax.tree.leaves_with_path(initial_params), jax.tree.leaves(state.params), strict=True
        )
        if np.any(a != b)
    }
    assert changed == replaced
    is_table = name in ("Random", "one layer")  # a table does not depend on the random tokens
    assert history[-1]["loss"] < (0.98 if is_table else 0.9) * history[0]["loss"]
    assert all(np.isfinite(list(metrics.values())).all() for metrics in history)


@pytest.mark.slow
def test_a_student_that_is_its_teacher_has_no_loss(teacher):
    same = Replacement(Attention(2, 4, alignment=MODEL.encoder.runs[0].block.self_mixer.alignment))
    for together in (False, True):
        recipe = Distillation((same,), TRAINING, together=together)
        _, _, _, history = distill_steps(teacher, recipe, 1)
        assert history[0]["loss"] < 1e-10


def test_the_error_excludes_padding():
    rng = np.random.default_rng(0)
    target, output = rng.normal(size=(2, 3, 5, 2, 4))
    not_padding = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    x, y = target[not_padding].reshape(4, -1), output[not_padding].reshape(4, -1)
    error, ratio = _squared_error(*map(jnp.asarray, (target, output, not_padding)))
    np.testing.assert_allclose(error, np.mean((x - y) ** 2), rtol=1e-5)
    expected = np.mean((x - y) ** 2) / np.mean((x - x.mean(0)) ** 2)
    np.testing.assert_allclose(ratio, expected, rtol=1e-5)


def test_teacher_activations_are_those_of_its_own_pass(teacher):
    """Sowing does not change the results; the tap of the heads precedes the output projection."""
    _, variables = teacher
    model = unroll(MODEL)
    batch = {k: jnp.asarray(v) for k, v in next(CopyStream()).items()}
    hidden, sown = teacher_forced(model, variables, batch, collection=TAPS)
    tokens = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    np.testing.assert_array_equal(hidden, model.apply(variables, *tokens, method=model.hidden))
    layer = sown[TAPS]["encoder"]["layers_0"]
    kernel = variables["params"]["encoder"]["layers_0"]["attention"]["out"]["kernel"]
    np.testing.assert_allclose(
        jnp.einsum("bnhe,hed->bnd", layer["attention"]["heads"], kernel),
        layer["self_mixed"],
        atol=1e-5,
    )
    np.testing.assert_allclose(
        layer["self_input"] + layer["self_mixed"], layer["self_output"], atol=1e-6
    )


@pytest.mark.slow
def test_segments_of_a_packed_row_are_independent(teacher):
    """Two examples in a packed row have the same activations as separately."""
    teacher_experiment, variables = teacher
    data = replace(teacher_experiment.data, pack=True, max_segments=2)
    packed = replace(teacher_experiment, data=data)
    recipe = Distillation(RECIPES["Random"], TRAINING)
    student = _student_experiment(packed, recipe, teacher=None)
    trainer = make_trainer(student, unroll(MODEL), variables, recipe)
    ids, tokens = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]]), jnp.arange(2, 10)[None]
    row = {"encoder_input_tokens": tokens, "decoder_input_tokens": tokens}
    for side in ("encoder", "decoder"):
        row |= {
            f"{side}_segment_ids": ids,
            f"{side}_positions": jnp.array([[0, 1, 2, 0, 1, 2, 3, 0]]),
        }
    in_packed_row = trainer.activations(unroll(MODEL), variables, row)["encoder"]["layers_1"][
        "output"
    ]
    for segment in (slice(0, 3), slice(3, 7)):
        example = {k: v[:, segment] for k, v in row.items() if k.endswith("tokens")}
        separate = trainer.activations(unroll(MODEL), variables, example)
        np.testing.assert_allclose(
            in_packed_row[:, segment], separate["encoder"]["layers_1"]["output"], atol=1e-5
        )


def test_constants_are_inherited():
    """A Fixed Random table that is not replaced is that of the teacher."""
    fixed = Random(max_length=8, trainable=False)
    model = unroll(t5(Size(8, 1, 16, 2, 4), encoder=fixed, vocab_size=VOCAB, relative_bias=False))
    teacher_experiment = replace(experiment(seed=1), model=model)
    variables = Trainer(teacher_experiment, jax.devices()[:1]).init().variables
    recipe = Distillation(RECIPES["Random"], TRAINING)
    student = _student_experiment(teacher_experiment, recipe, teacher=None)
    trainer = make_trainer(student, model, variables, recipe)
    constants = _initialize_from(variables)(trainer.init()).constants["decoder"]
    jax.tree.map(np.testing.assert_array_equal, constants, variables["constants"]["decoder"])


def test_parameters_that_are_not_replaced_are_inherited(teacher):
    _, variables = teacher
    recipe = Distillation(RECIPES["ALR"], TRAINING)
    _, student_params, _, _ = distill_steps(teacher, recipe, 0)
    teacher_params = variables["params"]
    for path in (("embedding",), ("decoder",), ("encoder", "layers_0", "mlp")):
        found, expected = student_params, teacher_params
        for name in path:
            found, expected = found[name], expected[name]
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    out = lambda tree: tree["encoder"]["layers_1"]["attention"]["out"]["kernel"]
    np.testing.assert_array_equal(out(student_params), out(teacher_params))


def test_a_position_bias_is_removed_if_no_layer_has_logits():
    biased = t5(Size(8, 2, 16, 2, 4), vocab_size=VOCAB)
    all_layers = student_model(biased, (Replacement(Gaussian()),))
    assert all_layers.encoder.bias is None and all_layers.decoder.bias is not None
    one_layer = student_model(biased, (Replacement(Gaussian(), layers=(0,)),))
    assert one_layer.encoder.bias is not None
    tokens = jnp.ones((1, 4), int)
    for model in (all_layers, one_layer):
        model.init_with_output(jax.random.key(0), tokens, tokens)


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (Replacement(Gaussian(), place="middle"), "'encoder' or 'decoder' or 'cross'"),
        (Replacement(Gaussian(), place="decoder", scope="layer"), "for encoders only"),
        (Replacement(Gaussian(), layers=(2,)), "layers 0 to 1"),
    ],
)
def test_errors(replacement, message):
    with pytest.raises(ValueError, match=message):
        student_model(unroll(MODEL), (replacement,))


def test_an_alignment_needs_attention():
    student = student_model(MODEL, RECIPES["ALR"])
    with pytest.raises(ValueError, match="instead of attention; use a mixer"):
        student_model(student, (Replacement(Gaussian()),))
