"""What an evaluation reads: whole groups, rows without a place, splits without labels, damaged files."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation import evaluation_sets
from synthesizer_jax.evaluation.averages import best_by_task
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.evaluation.prediction import Predictor, decoding_by
from synthesizer_jax.inference import score_targets
from synthesizer_jax.registry import replace
from synthesizer_jax.tasks import postprocessors, task_registry
from synthesizer_jax.tasks.prepare import prepare
from tests.evaluation import runs
from tests.tasks.loading import BYTES, quiet
from tests.tasks.loading import load as load_prepared


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("evaluation_data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(task_registry.MIXTURES, runs.MIXTURE, runs.RATES)
        runs.write_data(place)
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
        ("multi30k_en_de", 5, 5),
        ("multi30k_en_de", 70, 7),
        ("glue_rte_v002", 2, 2),
        ("super_glue_multirc_v102", 1, 3),  # three answers to a question
        ("super_glue_multirc_v102", 4, 6),
        ("super_glue_record_v102", 2, 3),  # the second query has two answers
    ],
)
def test_max_examples_is_obeyed_and_groups_stay_whole(load, task, asked, found):
    assert len(load(task, max_examples=asked).inputs) == found


@pytest.mark.parametrize("task", ["glue_rte_v002", "glue_stsb_v002", "super_glue_multirc_v102"])
def test_hidden_labels_are_not_scored(load, task):
    hidden, known = load(task, "test"), load(task)
    assert hidden.labeled == ()
    assert hidden.score(["entailment"] * len(hidden.inputs)) == {}
    assert known.labeled == tuple(range(len(known.inputs)))
    assert set(known.score(known.target_words)) > set()


@pytest.mark.parametrize(
    ("row", "labeled"),
    [
        (
            {"label": -1, "targets_pretokenized": b"Emma"},
            False,
        ),  # WSC names a candidate all the same
        ({"label": 0, "targets_pretokenized": b"Emma"}, True),
        ({"label": np.float32(-1), "targets_pretokenized": b"-1.0"}, False),
        ({"targets_pretokenized": b"<unk>"}, False),
        ({"targets_pretokenized": b"unacceptable"}, True),
    ],
)
def test_hidden_labels_are_known_as_such(row, labeled):
    assert postprocessors.is_labeled(row) is labeled


def test_only_labeled_examples_are_scored(load):
    known, hidden = load("glue_rte_v002"), load("glue_rte_v002", "test")
    parts = ("inputs", "targets", "examples")
    both = {name: getattr(hidden, name) + getattr(known, name) for name in parts}
    mixed = dataclasses.replace(known, **both)
    predictions = ["contradiction"] * 5 + known.target_words
    assert mixed.score(predictions) == {"accuracy": 100.0}
    assert len(mixed.labeled_part(100).inputs) == 6
    assert [e["idx"] for e in mixed.labeled_part(3).examples] == [0, 2, 4]


def test_a_record_tells_an_example(load):
    multirc = load("super_glue_multirc_v102").record(1, "True")
    assert multirc["idx"] == {"paragraph": 0, "question": 0, "answer": 1}
    assert (multirc["target"], multirc["label"], multirc["target_label"]) == ("True", 1, 1)
    hidden = load("glue_rte_v002", "test").record(3, "nonsense")
    assert hidden == {
        "idx": 3,
        "input": "rte sentence1: a 3 sentence2: b 3",
        "target": None,
        "prediction": "nonsense",
        "label": -1,
        "target_label": None,
    }
    assert set(load("multi30k_en_de").record(2, "x")) == {"idx", "input", "target", "prediction"}


def test_damaged_files_are_one_sentence(load, data_dir, tmp_path):
    shutil.copytree(data_dir / "glue" / "rte", tmp_path / "glue" / "rte")
    (file,) = (tmp_path / "glue" / "rte").rglob("*validation*tfrecord*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"glue_rte_v002.*'validation'.*cannot be read.*import"):
        load("glue_rte_v002", data_dir=tmp_path)


def test_best_steps_by_task():
    found = {
        2: {"a": {"x": 1.0, "y": 3.0}, "b": {"x": 5.0}, "c": {}},
        4: {"a": {"x": 3.0, "y": 2.0}, "b": {"x": 5.0}, "c": {}},
        6: {"a": {"x": float("nan"), "y": 9.0}, "b": {"x": 4.0}, "c": {}},
    }
    assert best_by_task(found) == {"a": 4, "b": 2}


def open_evaluator(experiment, data_dir):
    prepare(experiment.data.mixture, PreparedTasks(data_dir, BYTES), log=quiet)
    return Evaluator(
        experiment.model,
        experiment.data,
        experiment.evaluation,
        prepared=PreparedTasks(data_dir, BYTES),
    )


@pytest.fixture(scope="module")
def measured(data_dir):
    """Results over two batches of two for the loss."""
    experiment = runs.experiment()
    experiment = replace(
        experiment, evaluation=replace(experiment.evaluation, batch_size=2, loss_batches=2)
    )
    evaluator = open_evaluator(experiment, data_dir)
    zeros = [np.ones((1, n), np.int32) for n in (8, 8)]
    variables = experiment.model.init(jax.random.key(0), *zeros)
    return evaluator, variables, evaluator.measure(variables)


@pytest.mark.slow
def test_every_task_has_a_loss_over_at_most_so_many_batches(measured):
    evaluator, variables, (results, overall) = measured
    assert [r.task for r in results] == [task for task, rate in runs.RATES.items() if rate]
    assert [len(s.inputs) for s in evaluator.loss_sets] == [4] * 5
    assert evaluator.lacking == ["glue_ax_v002"]
    nats, tokens = 0.0, 0.0
    for examples, result in zip(evaluator.loss_sets, results, strict=True):
        logp = [
            score_targets(variables, x[None], targets=y[None], model=evaluator.model)[0]
            for x, y in zip(examples.inputs, examples.targets, strict=True)
        ]
        length = sum(map(len, examples.targets))
        np.testing.assert_allclose(result.loss.per_token, -sum(logp) / length, rtol=1e-5)
        rate = runs.RATES[result.task]
        nats, tokens = nats - rate * sum(logp) / 4, tokens + rate * length / 4
    np.testing.assert_allclose(overall["loss"], nats / tokens, rtol=1e-5)
    assert overall["joint_label_prior_entropy"] > overall["label_prior_entropy"]


def test_no_batches_for_the_loss_take_none(measured, data_dir):
    evaluator, variables, _ = measured
    settings = replace(evaluator.evaluation, loss_batches=0, max_examples=2)
    experiment = replace(runs.experiment(), evaluation=settings)
    results, overall = open_evaluator(experiment, data_dir).measure(variables)
    assert [r.loss for r in results] == [None] * 5
    assert "loss" not in overall and "score" in overall


def test_scores_are_those_of_the_answers(measured):
    evaluator, _, (results, _) = measured
    for examples, result in zip(evaluator.sets, results, strict=True):
        if result.ranked is None:
            continue
        best = [
            result.ranked[i][examples.label_words.index(p)]
            for i, p in enumerate(result.predictions)
        ]
        np.testing.assert_array_equal(result.scores, best)
        np.testing.assert_array_equal(result.scores, result.ranked.max(axis=-1))


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_decoded_answers_have_their_log_probability(measured, method):
    evaluator, variables, _ = measured
    predictor = Predictor(
        evaluator.model,
        variables,
        evaluator.vocabulary,
        inputs_length=32,
        decoding=decoding_by(method, 8),
        batch_size=4,
    )
    inputs = evaluator.sets[0].inputs[:3]
    batch = np.zeros((3, 32), np.int32)
    for slot, ids in zip(batch, inputs, strict=True):
        slot[: len(ids)] = ids
    tokens = predictor.generate(range(3), batch).tokens[:, 0]
    wanted = score_targets(variables, batch, targets=tokens, model=predictor.model)
    np.testing.assert_allclose(
        predictor.predict_with_scores(inputs, None).scores, wanted, rtol=1e-4
    )


def test_answers_after_a_sentinel_in_bytes_are_those_of_seqio():
    """Bytes have no text for the sentinel, so that SeqIO strips every answer."""
    row = {"targets_pretokenized": "True", "inputs_pretokenized": "boolq", "label": 1}
    task = task_registry.find_task("super_glue_boolq_v102_1_sentinel")
    examples = evaluation_sets.EvaluationSet(task, "validation", [], [], [row])
    in_bytes = dataclasses.replace(examples, vocabulary=Bytes().build())
    assert examples.score([" True"]) == {"accuracy": 0}
    assert in_bytes.score([" True"]) == {"accuracy": 100}
    assert in_bytes.record(0, " True")["label"] == 1
