"""Tests what an evaluation reads, measures and writes.

The tests cover groups of examples, hidden labels, losses, classes and files.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.placement import place_variables
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation import scoring
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet, metric_groups
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.evaluation.prediction import Predictor, _pad_tokens
from synthesizer_jax.inference import Decoding, score_targets
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.task import Task
from tests.evaluation import runs
from tests.tasks.loading import BYTES, quiet
from tests.tasks.loading import load as load_prepared


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("evaluation_data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(task_registry.MIXTURES, runs.MIXTURE, runs.RATES)
        runs.write_data(place)
        prepare(runs.MIXTURE, PreparedTasks(place, BYTES), log=quiet)
        yield place


@pytest.fixture(scope="module")
def load(data_dir):
    def load(name, split="validation", data_dir=data_dir, **options):
        lengths = {"inputs": 32, "targets": 8}
        return load_prepared(name, split, data_dir, lengths=lengths, **options)

    return load


@pytest.mark.parametrize(
    ("task", "asked", "found"),
    [
        ("multi30k_en_de", 1, 1),  # rows without idx
        ("multi30k_en_de", 70, 7),
        ("glue_rte_v002", 2, 2),
        ("super_glue_multirc_v102", 1, 3),  # three answers to one question
        ("super_glue_multirc_v102", 4, 6),
        ("super_glue_record_v102", 2, 3),  # the second query has two answers
    ],
)
def test_max_examples_is_obeyed_and_groups_stay_whole(load, task, asked, found):
    assert len(load(task, max_examples=asked).inputs) == found


@pytest.mark.parametrize(
    ("task", "groups"),
    [
        (Task("taxgroups", "imported/taxgroups"), [(0,), (1,), (2,)]),
        (task_registry.TASKS["super_glue_axg_v102"], [(0,), (0,), (1,)]),
    ],
)
def test_rows_are_pairs_where_a_metric_compares_pairs(task, groups):
    assert metric_groups(task, [{"idx": np.int64(i)} for i in range(3)]) == groups


def test_only_labeled_examples_are_scored(load):
    for task in ("glue_rte_v002", "glue_stsb_v002", "super_glue_multirc_v102"):
        hidden, known = load(task, "test"), load(task)
        assert hidden.labeled == () and known.labeled == tuple(range(len(known.inputs)))
        assert hidden.score(["entailment"] * len(hidden.inputs)) == {}
        assert set(known.score(known.target_words)) > set()
    known, hidden = load("glue_rte_v002"), load("glue_rte_v002", "test")
    mixed = dataclasses.replace(known, examples=hidden.examples + known.examples)
    assert mixed.score(["contradiction"] * 5 + known.target_words) == {"accuracy": 100.0}
    assert len(mixed.labeled_part(100).inputs) == 6
    assert [e["idx"] for e in mixed.labeled_part(3).examples] == [0, 2, 4]
    with pytest.raises(
        ValueError, match="1 predictions for the 6 examples of the task glue_rte_v002"
    ):
        known.score(["entailment"])
    wrong = dataclasses.replace(known.task, metrics=(lambda *_: {"mine": "good"},))
    with pytest.raises(
        ValueError,
        match="The metric 'mine' of the task glue_rte_v002 is 'good', which is not a number",
    ):
        dataclasses.replace(known, task=wrong).score(known.target_words)
    for part, functions in (
        ("The postprocess_fn", {"postprocess_fn": lambda text, **_: int(text)}),
        ("The metric fails", {"metrics": (fails,)}),
    ):
        wrong = dataclasses.replace(known, task=dataclasses.replace(known.task, **functions))
        with pytest.raises(
            ValueError, match=f"^{part} of the task 'glue_rte_v002' raised ValueError"
        ):
            wrong.score(known.target_words)


def fails(targets, predictions):
    return {"number": float("many")}


def test_a_record_of_a_prediction_describes_its_example(load):
    multirc = load("super_glue_multirc_v102").record(1, "True")
    assert multirc["idx"] == {"paragraph": 0, "question": 0, "answer": 1}
    assert (multirc["target"], multirc["label"], multirc["target_label"]) == ("True", 1, 1)
    shown = {"input": "rte sentence1: a 3 sentence2: b 3", "target": None, "prediction": "nonsense"}
    record = load("glue_rte_v002", "test").record(3, "nonsense")
    assert record == {"idx": 3, **shown, "label": -1, "target_label": None}
    assert set(load("multi30k_en_de").record(2, "x")) == {"idx", "input", "target", "prediction"}


def test_answers_after_a_sentinel_in_bytes_are_those_of_seqio():
    """With a byte vocabulary, answers after a sentinel are the same as SeqIO's.

    Bytes have no text for the sentinel, so SeqIO strips every answer.
    """
    row = {"targets_pretokenized": "True", "inputs_pretokenized": "boolq", "label": 1}
    task = task_registry.find_task("super_glue_boolq_v102_1_sentinel")
    examples = EvaluationSet(task, "validation", [row])
    in_bytes = dataclasses.replace(examples, vocabulary=Bytes())
    assert examples.score([" True"]) == {"accuracy": 0}
    assert in_bytes.score([" True"]) == {"accuracy": 100}
    assert in_bytes.record(0, " True")["label"] == 1


def evaluator_of(experiment, data_dir, **options):
    parts = (experiment.model, experiment.data, experiment.evaluation)
    return Evaluator(*parts, prepared=PreparedTasks(data_dir, BYTES), **options)


@pytest.fixture(scope="module")
def measured(data_dir):
    """An evaluator, together with its variables and its results.

    The evaluator measures the loss on two batches of two examples.
    """
    recipe = runs.experiment()
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, batch_size=2, loss_batches=2))
    evaluator = evaluator_of(recipe, data_dir)
    example = jnp.ones((1, 8), int)
    variables = jax.jit(recipe.model.init)(jax.random.key(0), example, example)
    return evaluator, variables, evaluator.measure(variables)


def test_the_loss_of_a_task_uses_a_limited_number_of_batches(measured):
    evaluator, variables, (results, overall) = measured
    assert [r.task for r in results] == [task for task, rate in runs.RATES.items() if rate]
    assert [len(s.inputs) for s in evaluator.loss_sets] == [4] * 5
    assert evaluator.lacking == ["glue_ax_v002"]
    nats, tokens = 0.0, 0.0
    for examples, result in zip(evaluator.loss_sets, results, strict=True):
        sources, targets = (
            _pad_tokens(examples.inputs, 4, 32, 0),
            _pad_tokens(examples.targets, 4, 40, 0),
        )
        logp = score_targets(variables, sources, targets=targets, model=evaluator.model).sum()
        length = sum(map(len, examples.targets))
        np.testing.assert_allclose(result.loss.per_token, -logp / length, rtol=1e-5)
        rate = runs.RATES[result.task]
        nats = nats - rate * logp / 4
        tokens = tokens + rate * length / 4
    np.testing.assert_allclose(overall["loss"], nats / tokens, rtol=1e-5)
    assert overall["joint_label_prior_entropy"] > overall["label_prior_entropy"]


def test_without_loss_batches_there_is_no_loss(measured, data_dir):
    evaluator, variables, _ = measured
    settings = replace(evaluator.evaluation, loss_batches=0, max_examples=2)
    experiment = replace(runs.experiment(), evaluation=settings)
    results, overall = evaluator_of(experiment, data_dir).measure(variables)
    assert [r.loss for r in results] == [None] * 5
    assert "loss" not in overall and "score" in overall


def test_scores_are_the_log_probabilities_of_the_answers(measured):
    """Scores of beam search without length penalty are the log-probabilities of the answers.

    For greedy scores, see tests/evaluation/test_prediction.py.
    """
    evaluator, variables, _ = measured
    options = {"inputs_length": 32, "decoding": Decoding(max_length=8, beams=4), "batch_size": 4}
    predictor = Predictor(evaluator.model, variables, BYTES, **options)
    inputs = evaluator.sets[0].inputs[:4]
    batch = _pad_tokens(inputs, 4, 32, 0)
    tokens = predictor._generate(range(4), jnp.asarray(batch)).tokens[:, 0]
    wanted = score_targets(variables, batch, targets=tokens, model=predictor.model)
    np.testing.assert_allclose(predictor.predict(inputs).scores, wanted, rtol=1e-4)


def test_an_evaluation_decodes_as_it_says(measured, data_dir):
    evaluator, variables, _ = measured
    settings = {"beams": 3, "alpha": 0.2, "relative_length": 0.1, "extra_length": 2}
    settings |= {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}
    evaluation = replace(evaluator.evaluation, method="beam", loss_batches=0, **settings)
    recipe = replace(runs.experiment(), evaluation=evaluation)
    asked = evaluator_of(recipe, data_dir, only=["multi30k_en_de"])
    ((result,), _) = asked.measure(variables)
    decoding = Decoding(max_length=8, **settings)
    options = {"inputs_length": 32, "decoding": decoding, "batch_size": 2}
    expected = Predictor(asked.model, variables, BYTES, **options).predict(asked.sets[0].inputs)
    assert list(result.predictions) == list(expected.texts)
    for ids, answer in zip(asked.sets[0].inputs, expected.tokens, strict=True):
        assert len(answer) <= round(0.1 * len(ids)) + 2 < 8


def strict(text):
    """Parses JSON, and refuses NaN, which Python's parser would accept."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_results_and_predictions_are_files_of_json(measured, load, tmp_path):
    """Results and predictions are valid JSON, in which numbers that are not finite become null.

    The progress of an evaluation is reported.
    """
    evaluator, variables, _ = measured
    said, done = [], []

    def phase(title, total):
        said.append((title, total))
        return done.append

    sets = load("glue_rte_v002"), load("glue_rte_v002", "test")
    options = {"inputs_length": 32, "decoding": Decoding(max_length=8), "batch_size": 2}
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), variables)
    for values in (variables, broken):
        predictor = Predictor(evaluator.model, values, BYTES, ranks=True, **options)
        known, hidden = scoring.evaluate_tasks(predictor, sets, phase=phase)
        path = scoring.write_predictions(tmp_path / "new", known, examples=sets[0])
        assert path == tmp_path / "new" / "glue_rte_v002.jsonl"
        lines = [strict(line) for line in path.read_text().splitlines()]
        assert [line["idx"] for line in lines] == list(range(6))
        assert all(set(line["scores"]) == {"entailment", "not_entailment"} for line in lines)
        for line in lines if values is variables else ():
            assert line["score"] == line["scores"][line["prediction"]]
        assert list((tmp_path / "new").iterdir()) == [path]
    titles = [
        f"glue_rte_v002, {split}: {n} examples" for split, n in (("validation", 6), ("test", 5))
    ]
    assert said == list(zip(titles, (6, 5), strict=True)) * 2 and sum(done) == 22
    metrics = {"accuracy": np.float32("nan"), "f1": np.inf}
    assert scoring.flatten_results([known]) == {"glue_rte_v002/accuracy": known.metrics["accuracy"]}
    known = dataclasses.replace(known, metrics=metrics)
    path = scoring.write_results(
        tmp_path, 7, [known, hidden], overall={"score": 50.0, "loss": -np.inf}
    )
    written = strict(path.read_text())
    assert (written["step"], written["score"], written["loss"]) == (7, 50.0, None)
    scored = {"task": "glue_rte_v002", "split": "validation", "n": 6, "labeled": 6}
    scored |= {"metrics": {"accuracy": None, "f1": None}, "loss": None}
    other = {"split": "test", "n": 5, "labeled": 0, "metrics": {}}
    assert written["tasks"] == [scored, scored | other]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of an untrained classifier."""
    directory = tmp_path_factory.mktemp("classifier")
    runs.write_run(directory, runs.classifier(), steps=(4,))
    return directory


def test_a_classifier_has_metrics_and_a_loss_per_class(run, data_dir):
    recipe = runs.classifier()
    evaluator = evaluator_of(recipe, data_dir)
    step, variables = restore_variables(run / "checkpoints")
    assert step == 4
    (device,) = {d for leaf in jax.tree.leaves(variables) for d in leaf.devices()}
    assert device == jax.local_devices()[0]
    ((result,), overall) = evaluator.measure(variables)
    (examples,) = evaluator.sets
    outputs = jax.jit(recipe.model.apply)(variables, _pad_tokens(examples.inputs, 6, 32, 0)).outputs
    ranked = np.asarray(jax.nn.log_softmax(outputs[:, ::-1]))
    right = np.arange(6) % 2  # the labels in the data
    np.testing.assert_allclose(result.ranked, ranked, atol=1e-4)
    accuracy = 100 * np.mean(ranked.argmax(axis=1) == right)
    assert result.metrics == {"accuracy": pytest.approx(accuracy)}
    nats = -ranked[np.arange(6), right].mean()
    assert result.loss.tokens == 1
    assert overall["loss"] == overall["label_loss"] == pytest.approx(nats, rel=1e-4)
    assert overall["label_prior_entropy"] == pytest.approx(np.log(2))
    data = replace(recipe.data, classes=(), targets_length=32)
    masked = replace(recipe, model=recipe.model.copy(outputs=None, masked_lm=True), data=data)
    with pytest.raises(
        ValueError, match="The task glue_rte_v002 cannot be used with a masked language model"
    ):
        evaluator_of(masked, data_dir)


@pytest.mark.parametrize(
    ("trained", "devices", "expected"),
    [
        (MeshShape(), 8, (8, 1, 1)),
        (MeshShape(data=16, fsdp=2), 8, (4, 2, 1)),
        (MeshShape(data=2, dcn_data=4, tensor=2), 8, (4, 1, 2)),
        (MeshShape(data=1, fsdp=-1, dcn_fsdp=2), 8, (1, 8, 1)),
        (MeshShape(fsdp=32), 3, (3, 1, 1)),  # the model's widths are not multiples of three
        (MeshShape(fsdp=4), 1, (1, 1, 1)),
    ],
)
def test_the_mesh_of_the_training_is_fitted_to_the_devices(trained, devices, expected):
    run = runs.classifier(mesh=trained)
    mesh, layout = place_variables(
        run.model, run.example, run.mesh, devices=jax.devices()[:devices]
    )
    assert tuple(mesh.shape[axis] for axis in ("data", "fsdp", "tensor")) == expected
    assert {x.sharding.mesh for x in jax.tree.leaves(layout)} == {mesh}
