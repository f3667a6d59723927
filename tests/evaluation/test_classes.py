"""An encoder's classes as answers: ranked, scored, written to files, and the same on a mesh."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.placement import place_variables
from synthesizer_jax.cli.main import app
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.evaluation.prediction import Predictor, decoding_by
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.tasks.prepare import prepare
from tests.evaluation import runs
from tests.tasks.loading import quiet

RTE = ("entailment", "not_entailment")
VOCABULARY = Bytes().build()
TEXTS = ("a b", "rte", "the dog sleeps", "c", "d e f g")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data sets in ``data``, and a run that nobody trained in ``run``."""
    place = tmp_path_factory.mktemp("classes")
    runs.write_data(place / "data")
    prepared = PreparedTasks(place / "data", VOCABULARY)
    prepare("glue_rte_v002", prepared, evaluation_splits=("validation", "test"), log=quiet)
    runs.write_run(place / "run", runs.classifier(), steps=(4,))
    return place


def predictor_on(place, devices, *, mesh=None, **options):
    recipe = runs.classifier(mesh=mesh or MeshShape())
    made, layout = place_variables(
        recipe.model, recipe.example, recipe.mesh, devices=jax.devices()[:devices]
    )
    _, variables = restore_variables(place / "run" / "checkpoints", layout=layout)
    options = {"classes": recipe.data.classes, "batch_size": 2, "ranks": True, **options}
    return Predictor(
        *(recipe.model, variables, VOCABULARY),
        inputs_length=32,
        decoding=decoding_by("rank", 1),
        mesh=made,
        **options,
    )


@pytest.fixture(scope="module")
def predictor(place):
    return predictor_on(place, 1)


@pytest.fixture(scope="module")
def inputs(predictor):
    return [predictor.encode(text) for text in TEXTS]


def ids(word):
    return np.array([*VOCABULARY.encode(word), 1], np.int32)


def outputs(predictor, tokens):
    """Log-probabilities of `RTE`, in float64."""
    logits = jax.jit(predictor.model.apply)(predictor.variables, tokens[None]).outputs[0]
    logits = np.float64(logits)[::-1]
    return logits - np.log(np.exp(logits).sum())


def test_label_words_are_ranked_by_their_classes(predictor, inputs):
    found = predictor.rank(inputs, RTE)
    wanted = np.array([outputs(predictor, tokens) for tokens in inputs])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    np.testing.assert_array_equal(predictor.rank(inputs, RTE[1:]), found[:, 1:])
    answers = predictor.predict_with_scores(inputs, RTE)
    assert answers.texts == [RTE[i] for i in wanted.argmax(axis=1)]
    assert len(set(answers.texts)) == 2, "the random model prefers one class"
    np.testing.assert_array_equal(answers.scores, found.max(axis=1))
    every = predictor.predict_with_scores(inputs, None)  # SeqIO's tasks name no label words
    assert (every.texts, every.words) == (answers.texts, RTE[::-1])
    assert predictor.rank([], RTE).shape == (0, 2)


def test_targets_have_the_log_probability_of_their_class(predictor, inputs):
    found = predictor.log_probabilities(inputs, [ids(RTE[i % 2]) for i in range(len(inputs))])
    ranked = predictor.rank(inputs, RTE)
    np.testing.assert_array_equal(found, [row[i % 2] for i, row in enumerate(ranked)])


def test_what_is_no_class_is_one_sentence(predictor, inputs):
    with pytest.raises(ValueError, match=r"label word 'maybe' is none of data\.classes \(not_ent"):
        predictor.rank(inputs, ("entailment", "maybe"))
    with pytest.raises(ValueError, match=r"an example has the target 'maybe', which is none of"):
        predictor.log_probabilities(inputs, [ids("maybe")] * len(inputs))
    with pytest.raises(TypeError, match="Encoder generates no text"):
        predictor.generate_texts(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=4, tensor=2)])
def test_a_mesh_gives_the_answers_of_one_device(place, predictor, inputs, shape):
    shared = predictor_on(place, 8, mesh=shape)
    np.testing.assert_allclose(shared.rank(inputs, RTE), predictor.rank(inputs, RTE), atol=1e-4)


def evaluator_of(place, recipe):
    return Evaluator(
        *(recipe.model, recipe.data, recipe.evaluation),
        prepared=PreparedTasks(place / "data", VOCABULARY),
    )


def test_a_task_has_metrics_and_a_loss_per_class(place, predictor):
    evaluator = evaluator_of(place, runs.classifier())
    ((result,), overall) = evaluator.measure(predictor.variables)
    (examples,) = evaluator.sets
    ranked = np.array([outputs(predictor, tokens) for tokens in examples.inputs])
    right = np.arange(6) % 2  # the stored labels
    np.testing.assert_allclose(result.ranked, ranked, atol=1e-4)
    accuracy = 100 * np.mean(ranked.argmax(axis=1) == right)
    assert result.metrics == {"accuracy": pytest.approx(accuracy)}
    nats = -ranked[np.arange(6), right].mean()
    assert result.loss.tokens == 1
    assert overall["loss"] == pytest.approx(nats, rel=1e-4)
    assert overall["label_loss"] == pytest.approx(nats, rel=1e-4)
    assert overall["label_prior_entropy"] == pytest.approx(np.log(2))


def test_a_masked_language_model_is_evaluated_on_texts_alone(place):
    recipe = runs.classifier()
    masked = replace(
        recipe,
        model=recipe.model.copy(outputs=None, masked_lm=True),
        data=replace(recipe.data, classes=(), targets_length=32),
    )
    with pytest.raises(
        ValueError, match="glue_rte_v002 is not made for a masked language model, which predicts"
    ):
        evaluator_of(place, masked)


def call(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_eval_writes_predictions_and_hidden_labels_are_predicted(place):
    data = ("--workdir", place / "run", "--data-dir", place / "data", "--save-predictions")
    assert "accuracy" in call("eval", *data)
    assert "unlabeled: predicted, not scored" in call("eval", *data, "--split", "test")
    folder = place / "run" / "evaluation" / "4"
    for path, count in ((folder, 6), (folder / "test", 5)):
        text = (path / "glue_rte_v002.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["idx"] for line in lines] == list(range(count))
        for line in lines:
            assert set(line["scores"]) == set(RTE)
            assert line["score"] == line["scores"][line["prediction"]]


def test_generate_refuses_an_encoder(place):
    with pytest.raises(ValueError, match=r"holds an Encoder, which generates no text; .* predict"):
        call("generate", "--workdir", place / "run", "a text")
    with pytest.raises(ValueError, match="an Encoder decodes nothing; set evaluation"):
        call("eval", "--workdir", place / "run", "--data-dir", place / "data", "--method", "beam")
