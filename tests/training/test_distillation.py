"""Distillation: what is replaced, what is trained, and what the student becomes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import Attention, Gaussian, Random, SentenceFeedForward, TokenFeedForward
from synthesizer_jax.mixers import SITES
from synthesizer_jax.models import Size, t5, unroll, unroll_variables
from synthesizer_jax.registry import replace
from synthesizer_jax.training.distillation import (
    Distillation,
    DistillationTrainer,
    inherit,
    squared_error,
    student_of,
)
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.optimizers import AdamW
from synthesizer_jax.training.replacement import Replacement, student_model
from synthesizer_jax.training.schedules import Constant
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
    taught = replace(experiment(), model=MODEL)
    trainer = Trainer(taught, jax.devices()[:1])
    variables = {"params": trainer.init().params}
    return taught, unroll_variables(MODEL, variables)


def distilled(teacher, recipe, steps):
    taught, variables = teacher
    student = student_of(taught, recipe, teacher=None)
    trainer = DistillationTrainer(student, unroll(MODEL), variables, recipe, jax.devices()[:1])
    state, stream = inherit(variables)(trainer.init()), CopyStream()
    start = jax.tree.map(np.asarray, state.params)
    history = []
    for _ in range(steps):
        state, metrics = trainer.step(state, trainer.put(next(stream)))
        history.append({k: float(v) for k, v in metrics.items()})
    return trainer, start, state, history


@pytest.mark.parametrize(
    ("name", "together"),
    [*((name, False) for name in RECIPES), ("ALR", True), ("decoder and cross", True)],
)
def test_only_replacements_change_and_the_distance_falls(teacher, name, together):
    recipe = Distillation(RECIPES[name], TRAINING, together=together)
    trainer, start, state, history = distilled(teacher, recipe, 30)
    trained = {(s.stack, s.layer, s.mixer) for s in trainer.sites}
    moved = {
        tuple(k.key for k in path[:3])
        for (path, a), b in zip(
            jax.tree.leaves_with_path(start), jax.tree.leaves(state.params), strict=True
        )
        if np.any(a != b)
    }
    assert moved == trained
    limited = name in ("Random", "one layer")  # a table alone explains little of random tokens
    assert history[-1]["loss"] < (0.98 if limited else 0.9) * history[0]["loss"]
    assert all(np.isfinite(list(h.values())).all() for h in history)


def test_a_student_that_is_its_teacher_has_no_distance(teacher):
    same = Replacement(Attention(2, 4, alignment=MODEL.encoder.runs[0].block.self_mixer.alignment))
    for together in (False, True):
        recipe = Distillation((same,), TRAINING, together=together)
        _, _, _, history = distilled(teacher, recipe, 1)
        assert history[0]["loss"] < 1e-10


def test_the_distance_is_over_real_positions_only():
    rng = np.random.default_rng(0)
    target, found = rng.normal(size=(2, 3, 5, 2, 4))
    real = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    rows, other = target[real].reshape(4, -1), found[real].reshape(4, -1)
    error, share = squared_error(*map(jnp.asarray, (target, found, real)))
    np.testing.assert_allclose(error, np.mean((rows - other) ** 2), rtol=1e-5)
    np.testing.assert_allclose(
        share, np.mean((rows - other) ** 2) / np.mean((rows - rows.mean(0)) ** 2), rtol=1e-5
    )


def test_teacher_activations_are_those_of_its_own_pass(teacher):
    """Capturing changes nothing, and the heads are those before the output projection."""
    _, variables = teacher
    model = unroll(MODEL)
    batch = {k: jnp.asarray(v) for k, v in next(CopyStream()).items()}
    hidden, found = teacher_forced(model, variables, batch, collection=SITES)
    tokens = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    np.testing.assert_array_equal(hidden, model.apply(variables, *tokens, method="hidden"))
    layer = found[SITES]["encoder"]["layers_0"]
    kernel = variables["params"]["encoder"]["layers_0"]["attention"]["out"]["kernel"]
    np.testing.assert_allclose(
        jnp.einsum("bnhe,hed->bnd", layer["attention"]["heads"], kernel),
        layer["self_mixed"],
        atol=1e-5,
    )
    np.testing.assert_allclose(
        layer["self_input"] + layer["self_mixed"], layer["self_output"], atol=1e-6
    )


def test_packed_rows_are_told_apart(teacher):
    """Two examples in one row leave what each leaves alone."""
    taught, variables = teacher
    packed = replace(taught, data=replace(taught.data, pack=True, max_segments=2))
    recipe = Distillation(RECIPES["Random"], TRAINING)
    student = student_of(packed, recipe, teacher=None)
    trainer = DistillationTrainer(student, unroll(MODEL), variables, recipe, jax.devices()[:1])
    ids, tokens = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]]), jnp.arange(2, 10)[None]
    row = {"encoder_input_tokens": tokens, "decoder_input_tokens": tokens}
    for side in ("encoder", "decoder"):
        row |= {
            f"{side}_segment_ids": ids,
            f"{side}_positions": jnp.array([[0, 1, 2, 0, 1, 2, 3, 0]]),
        }
    together = trainer.activations(unroll(MODEL), variables, row)["encoder"]["layers_1"]["output"]
    for part in (slice(0, 3), slice(3, 7)):
        alone = {k: v[:, part] for k, v in row.items() if k.endswith("tokens")}
        separate = trainer.activations(unroll(MODEL), variables, alone)
        np.testing.assert_allclose(
            together[:, part], separate["encoder"]["layers_1"]["output"], atol=1e-5
        )


def test_constants_are_inherited():
    """A Fixed Random table that stays is the teacher's, not a fresh draw."""
    fixed = Random(max_length=8, trainable=False)
    model = unroll(t5(Size(8, 1, 16, 2, 4), encoder=fixed, vocab_size=VOCAB, relative_bias=False))
    taught = replace(experiment(), model=model)
    state = Trainer(replace(taught, training=replace(taught.training, seed=1)), jax.devices()[:1])
    variables = state.init().variables
    recipe = Distillation(RECIPES["Random"], TRAINING)
    student = student_of(taught, recipe, teacher=None)
    trainer = DistillationTrainer(student, model, variables, recipe, jax.devices()[:1])
    mine = inherit(variables)(trainer.init()).constants["decoder"]
    jax.tree.map(np.testing.assert_array_equal, mine, variables["constants"]["decoder"])


def test_kept_parts_are_inherited(teacher):
    _, variables = teacher
    recipe = Distillation(RECIPES["ALR"], TRAINING)
    _, start, _, _ = distilled(teacher, recipe, 0)
    theirs = variables["params"]
    for path in (("embedding",), ("decoder",), ("encoder", "layers_0", "mlp")):
        mine, other = start, theirs
        for name in path:
            mine, other = mine[name], other[name]
        jax.tree.map(np.testing.assert_array_equal, mine, other)
    out = lambda tree: tree["encoder"]["layers_1"]["attention"]["out"]["kernel"]
    np.testing.assert_array_equal(out(start), out(theirs))


def test_a_position_bias_goes_when_nothing_is_left_to_add_it_to():
    biased = t5(Size(8, 2, 16, 2, 4), vocab_size=VOCAB)
    whole = student_model(biased, (Replacement(Gaussian()),))
    assert whole.encoder.bias is None and whole.decoder.bias is not None
    part = student_model(biased, (Replacement(Gaussian(), layers=(0,)),))
    assert part.encoder.bias is not None
    tokens = jnp.ones((1, 4), int)
    for model in (whole, part):
        model.init_with_output(jax.random.key(0), tokens, tokens)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Replacement(Gaussian(), place="middle"), "encoder, decoder, cross"),
        (Replacement(Gaussian(), place="decoder", scope="layer"), "for encoders only"),
        (Replacement(Gaussian(), layers=(2,)), "layers 0 to 1"),
    ],
)
def test_mistakes_are_one_sentence(change, text):
    with pytest.raises(ValueError, match=text):
        student_model(unroll(MODEL), (change,))


def test_an_alignment_needs_attention_to_go_into():
    student = student_model(MODEL, RECIPES["ALR"])
    with pytest.raises(ValueError, match="give a whole mixer"):
        student_model(student, (Replacement(Gaussian()),))
