"""Tests replacements, the training of students, and their initialization from the teacher."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import (
    Attention,
    Block,
    DotProduct,
    FeedForward,
    Gaussian,
    MergedAttention,
    PerHead,
    Random,
    RelativeBias,
    Run,
    SentenceFeedForward,
    TokenFeedForward,
    UniversalStack,
)
from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.contents import read_contents
from synthesizer_jax.distillation.distill import Distillation, DistillationTrainer, squared_error
from synthesizer_jax.distillation.replacement import Replacement, blocks_of, student_model
from synthesizer_jax.distillation.teacher import read_teacher
from synthesizer_jax.mixers import TAPS
from synthesizer_jax.models import Size, t5, unroll, unroll_variables
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.initial_parameters import restore_run
from synthesizer_jax.training.step import teacher_forced
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import VOCAB, CopyStream, encoder, experiment, save

TRAINING = Training(steps=40, optimizer=AdamW(learning_rate=Constant(0.01)), ema=0.9)
MODEL = t5(Size(8, 2, 16, 2, 4), vocab_size=VOCAB, relative_bias=False, scan=True)
DOT = MODEL.encoder.runs[0].block.self_mixer.alignment

ALR = (Replacement(SentenceFeedForward(8, 12, 2, 4)),)
RECIPES = {
    "ALR": ALR,
    "ALSR, per token, Random, cross": (
        Replacement(SentenceFeedForward(8, 12, 2, 4, separate_heads=True), layers=(0,)),
        Replacement(TokenFeedForward(12, 2, 4), layers=(1,)),
        Replacement(Random(max_length=8), place="decoder", layers=(1,)),
        Replacement(SentenceFeedForward(8, 12, 2, 4), place="cross"),
    ),
    "ALRR, ELR": (
        Replacement(SentenceFeedForward(8, 12), scope="sublayer", layers=(0,)),
        Replacement(SentenceFeedForward(8, 12), scope="layer", layers=(1,)),
    ),
}


@pytest.fixture(scope="module")
def teacher():
    taught = replace(experiment(), model=MODEL)
    variables = {"params": Trainer(taught, jax.devices()[:1]).init().params}
    return taught, unroll_variables(MODEL, variables)


def make_trainer(taught, variables, replacements, **options):
    recipe = Distillation(replacements, TRAINING, **options)
    return DistillationTrainer(taught, variables, recipe, jax.devices()[:1])


def distill_steps(trainer, steps):
    """Returns the initial averages, the final parameters, and the metrics of all steps."""
    state = trainer.init(trainer.inherited_variables())
    stream = CopyStream()
    averages = jax.tree.map(np.asarray, state.ema)
    history = []
    for _ in range(steps):
        state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
        history.append({k: float(v) for k, v in metrics.items()})
    return averages, state.params, history


@pytest.mark.parametrize(
    ("name", "together"), [*((name, False) for name in RECIPES), ("ALR", True)]
)
def test_only_replacements_change_and_the_loss_decreases(teacher, name, together):
    """Distillation changes only the replacements, and the loss decreases.

    All other parameters are inherited from the teacher. This includes the output projection behind
    ALR's heads.
    """
    trainer = make_trainer(*teacher, RECIPES[name], together=together)
    initial, params, history = distill_steps(trainer, 30)
    replaced = {(pair.stack, pair.layer, pair.mixer) for pair in trainer.tap_pairs}
    moved = jax.tree.map(lambda a, b: np.any(a != b), initial, params)
    changed = {tuple(k.key for k in path[:3]) for path, x in jax.tree.leaves_with_path(moved) if x}
    assert changed == replaced
    assert history[-1]["loss"] < 0.95 * history[0]["loss"]
    assert all(np.isfinite(list(metrics.values())).all() for metrics in history)
    if name == "ALR":
        taught = teacher[1]["params"]

        def projection(tree):
            """Returns the output projection of the replaced attention."""
            return tree["encoder"]["layers_1"]["attention"]["out"]["kernel"]

        for part in (lambda p: (p["embedding"], p["decoder"]), projection):
            jax.tree.map(np.testing.assert_array_equal, part(initial), part(taught))


def test_a_student_that_is_its_teacher_has_no_loss(teacher):
    trainer = make_trainer(*teacher, (Replacement(Attention(2, 4, alignment=DOT)),))
    assert distill_steps(trainer, 1)[2][0]["loss"] < 1e-10


def test_the_error_excludes_padding():
    rng = np.random.default_rng(0)
    target, output = rng.normal(size=(2, 3, 5, 2, 4))
    not_padding = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    x, y = target[not_padding].reshape(4, -1), output[not_padding].reshape(4, -1)
    error, ratio = squared_error(*map(jnp.asarray, (target, output, not_padding)))
    np.testing.assert_allclose(error, np.mean((x - y) ** 2), rtol=1e-5)
    expected = np.mean((x - y) ** 2) / np.mean((x - x.mean(0)) ** 2)
    np.testing.assert_allclose(ratio, expected, rtol=1e-5)


def test_teacher_activations_are_those_of_its_own_pass(teacher):
    """Recording the teacher's activations does not change its outputs.

    The outputs of heads are recorded before the output projection.
    """
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


def test_segments_of_a_packed_row_are_independent(teacher):
    """Two examples in a packed row have the same activations as in separate rows."""
    taught, variables = teacher
    packed = replace(taught, data=replace(taught.data, pack=True, max_segments=2))
    trainer = make_trainer(packed, variables, (Replacement(Random(max_length=8)),))
    ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    tokens = jnp.arange(2, 10)[None]
    row = {"encoder_input_tokens": tokens, "decoder_input_tokens": tokens}
    row |= {f"{side}_segment_ids": ids for side in ("encoder", "decoder")}
    output = "encoder/layers_1/output"
    activations = jax.jit(functools.partial(trainer.activations, unroll(MODEL)))
    in_packed_row = activations(variables, row)[output]
    for segment in (slice(0, 3), slice(3, 7)):
        example = {k: v[:, segment] for k, v in row.items() if k.endswith("tokens")}
        separate = activations(variables, example)
        np.testing.assert_allclose(in_packed_row[:, segment], separate[output], atol=1e-5)


def test_constants_are_inherited():
    """A Fixed Random table that is not replaced is inherited from the teacher."""
    fixed = Random(max_length=8, trainable=False)
    model = unroll(t5(Size(8, 1, 16, 2, 4), encoder=fixed, vocab_size=VOCAB, relative_bias=False))
    taught = replace(experiment(seed=1), model=model)
    variables = Trainer(taught, jax.devices()[:1]).init().variables
    trainer = make_trainer(taught, variables, (Replacement(Random(max_length=8)),))
    constants = trainer.inherited_variables()["constants"]["decoder"]
    jax.tree.map(np.testing.assert_array_equal, constants, variables["constants"]["decoder"])


def test_a_position_bias_is_removed_if_no_layer_has_logits():
    biased = t5(Size(8, 2, 16, 2, 4), vocab_size=VOCAB)
    all_layers = student_model(biased, (Replacement(Gaussian()),))
    assert all_layers.encoder.bias is None and all_layers.decoder.bias is not None
    one_layer = student_model(biased, (Replacement(Gaussian(), layers=(0,)),))
    assert one_layer.encoder.bias is not None
    jax.eval_shape(all_layers.init, jax.random.key(0), *[jnp.ones((1, 4), int)] * 2)


@pytest.fixture(scope="module")
def taught_run(tmp_path_factory):
    """The directory of a run with checkpoints of steps 2 and 4, whose arrays differ."""
    directory = tmp_path_factory.mktemp("taught") / "run"
    recipe = experiment(encoder())
    for step in (2, 4):
        state = Trainer(recipe, jax.devices()[:1]).init()
        state = jax.tree.map(lambda x, step=step: x + jnp.asarray(step, x.dtype), state)
        save(directory, recipe, state)
    return directory


@pytest.fixture
def begun(taught_run, tmp_path):
    """A copy of the teacher's run, and the directory of a student that started from its step 2.

    The student already has a checkpoint.
    """
    run = shutil.copytree(taught_run, tmp_path / "run")
    teacher, _ = read_teacher(run / "checkpoints" / "2", tmp_path / "student", finished=False)
    (tmp_path / "student" / "checkpoints" / "1").mkdir(parents=True)
    teacher.save(tmp_path / "student")
    return run, tmp_path / "student", teacher


def test_a_distillation_continues_with_its_first_teacher(begun, tmp_path):
    run, directory, teacher = begun
    found, variables = read_teacher(run, directory, finished=False)
    assert found == teacher and found.step == 2
    jax.tree.map(np.testing.assert_array_equal, variables, restore_run(run, step=2)[1])
    assert read_teacher(run, tmp_path / "new", finished=False)[0].step == 4, "one that begins"
    with pytest.raises(
        ValueError, match=r"began with step 2 of its teacher, but --teacher names step 4\. Use"
    ):
        read_teacher(run / "checkpoints" / "4", directory, finished=False)
    (directory / "teacher.json").unlink()  # earlier versions did not write this file
    assert read_teacher(run, directory, finished=False)[0].step == 4


@pytest.mark.parametrize("change", ["no longer exists", "contains other parameters now"])
def test_a_missing_teacher_is_refused_until_the_distillation_is_finished(begun, change):
    run, directory, teacher = begun
    old = run / "checkpoints" / "2"
    if change == "no longer exists":
        shutil.rmtree(old)
    else:
        record = old / "contents" / "contents.json"
        content = read_contents(old)
        name = min(content.arrays)
        other = content._replace(arrays=content.arrays | {name: content.arrays[name] ^ 1})
        record.write_text(json.dumps(other.to_json()))
    with pytest.raises(
        ValueError, match=f"step 2 of its teacher, but .*/checkpoints/2 {change}. Put the old"
    ):
        read_teacher(run, directory, finished=False)
    assert read_teacher(run, directory, finished=True) == (teacher, None)


def test_what_can_be_fitted_and_why_the_rest_cannot(teacher):
    """Fitting works if the teacher has a soft cap, sinks or a window.

    Otherwise, an error says why fitting is impossible.
    """
    taught, variables = teacher
    limited = student_model(
        MODEL, (Replacement(Attention(2, 4, sinks=True, soft_cap=5.0, window=3)),)
    )
    taught = replace(taught, model=limited)
    variables = unroll_variables(limited, Trainer(taught, jax.devices()[:1]).init().variables)
    table = Random(max_length=8)
    replacements = (
        Replacement(table, layers=(0,)),
        Replacement(SentenceFeedForward(8, 12, 2, 4), layers=(1,)),
        Replacement(PerHead((RelativeBias(), Gaussian((0,)))), place="decoder", layers=(0,)),
        Replacement(Attention(4, 2, alignment=table), place="decoder", layers=(1,)),
        Replacement(table, place="cross"),
    )
    fitted, others = make_trainer(taught, variables, replacements, fit_batches=1).fitted_layers()
    assert list(fitted) == [("encoder", 0)]
    assert fitted["encoder", 0] == Attention(
        2, 4, alignment=table, sinks=True, soft_cap=5.0, window=3
    )
    assert others == {
        "SentenceFeedForward has no alignment": ["encoder/layers_1/attention"],
        "PerHead is not made of trained logits of positions": ["decoder/layers_0/self_attention"],
        "4 heads replace 2": ["decoder/layers_1/self_attention"],
        "only self-attention can be fitted": [
            f"decoder/layers_{i}/encoder_decoder_attention" for i in (0, 1)
        ],
    }


def test_merged_attention_keeps_its_logits_of_the_memory(teacher):
    """If the tokens of a decoder lose their dot product, the encoder's outputs keep it."""
    dot = DotProduct(rotary_base=50.0)
    decoder = MODEL.decoder.copy(
        runs=(Run(Block(MergedAttention(2, 4, alignment=dot), FeedForward(12)), 2),)
    )
    taught = replace(teacher[0], model=MODEL.copy(decoder=decoder))
    scanned = Trainer(taught, jax.devices()[:1]).init().variables
    variables = unroll_variables(taught.model, scanned)
    table = Random(max_length=8)
    recipe = (Replacement(table, place="decoder", layers=(1,)),)
    trainer = make_trainer(taught, variables, recipe, fit_batches=1)
    mixer = blocks_of(trainer.student, "decoder")[1].self_mixer
    assert mixer == MergedAttention(2, 4, alignment=table, cross_alignment=dot)
    fitted, others = trainer.fitted_layers()
    assert not fitted and others == {
        "attention that shares its softmax with the memory cannot be fitted": [
            "decoder/layers_1/self_attention"
        ]
    }
    params, old = (
        x["params"]["decoder"]["layers_1"]["self_attention"]
        for x in (trainer.inherited_variables(), variables)
    )
    jax.tree.map(np.testing.assert_array_equal, params["cross_align"], old["align"])


def test_a_universal_stack_is_refused(teacher):
    shared = MODEL.copy(encoder=UniversalStack(MODEL.encoder.runs))
    with pytest.raises(
        ValueError, match="The encoder is a UniversalStack, whose layers share their param"
    ):
        make_trainer(replace(teacher[0], model=shared), {}, (Replacement(Random(max_length=8)),))


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (Replacement(Gaussian(), place="middle"), "'encoder' or 'decoder' or 'cross'"),
        (
            Replacement(Gaussian(), place="decoder", scope="layer"),
            "only possible in the encoder, but the place is 'decoder'",
        ),
        (Replacement(Gaussian(), layers=(2,)), "layers 0 to 1"),
    ],
)
def test_impossible_replacements_are_errors(replacement, message):
    with pytest.raises(ValueError, match=message):
        student_model(unroll(MODEL), (replacement,))


def test_an_alignment_needs_attention():
    with pytest.raises(ValueError, match=r"instead of an Attention\. Use a mixer"):
        student_model(student_model(MODEL, ALR), (Replacement(Gaussian()),))
