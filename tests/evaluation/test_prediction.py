"""Predictions come back in order, whatever the batching, and scores are the tasks'."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet
from synthesizer_jax.evaluation.files import write_predictions, write_results
from synthesizer_jax.evaluation.prediction import (
    Predictor,
    _length_batches,
    _pad_tokens,
    decoding_by,
    until_eos,
)
from synthesizer_jax.evaluation.scoring import evaluate_tasks, flatten_results, mean_score
from synthesizer_jax.files import write_atomic
from synthesizer_jax.inference import Decoding, score_choices, score_targets
from synthesizer_jax.inference.decoding import run_decoding
from synthesizer_jax.models import Size, t5
from synthesizer_jax.tasks.definitions import GLUE, SUPER_GLUE


class Letters:
    """Letters as ids from 2 on."""

    def encode(self, s):
        return [ord(c) - ord("a") + 2 for c in s]

    def decode(self, ids):
        return "".join(chr(int(i) - 2 + ord("a")) for i in ids if i > 1)


class Pieces(Letters):
    """Pieces of three letters, about as long as SentencePiece's."""

    def encode(self, s):
        return [2] * -(-len(s) // 3)


INPUTS = ["abc", "a", "fedcba", "bb", "c", "dd", "abcdefabcdef"]


@pytest.fixture(scope="module")
def predictor():
    model = t5(Size(8, 1, 16, 2, 4), vocab_size=10)
    variables = model.init(jax.random.key(0), jnp.ones((1, 4), int), jnp.ones((1, 3), int))

    def make(method="greedy", targets_length=4, decoding=None, **options):
        options = {"inputs_length": 16, "batch_size": 3} | options
        decoding = decoding or decoding_by(method, targets_length)
        ranks = method == "rank"
        return Predictor(model, variables, Letters(), decoding=decoding, ranks=ranks, **options)

    return make


def encoded(predictor):
    return [predictor.encode(text) for text in INPUTS]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["greedy", "beam", "rank"])
def test_batching_does_not_change_answers(predictor, method):
    words = ("ab", "c", "bca")
    together = predictor(method=method)
    alone = predictor(method=method, batch_size=1)
    found = together.predict(encoded(together), label_words=words)
    assert found == [alone.predict([x], label_words=words)[0] for x in encoded(alone)]
    if method == "rank":
        assert set(found) <= set(words)


@pytest.mark.parametrize("options", [{"beams": 3}, {"temperature": 0.8, "top_p": 0.9}])
def test_several_texts_depend_on_no_batch(predictor, options):
    decoding = Decoding(max_length=4, samples=3, **options)
    together, alone = (predictor(decoding=decoding, batch_size=n) for n in (3, 1))
    found, same = (p.generate_texts(encoded(p)) for p in (together, alone))
    assert [len(generated) for generated in found] == [3] * len(INPUTS)
    assert [[g.text for g in x] for x in found] == [[g.text for g in x] for x in same]
    scores = [[g.score for g in x] for x in found]
    np.testing.assert_allclose(scores, [[g.score for g in x] for x in same], rtol=1e-4)
    first = together.predict_with_scores(encoded(together), None)
    assert first.texts == [generated[0].text for generated in found]
    np.testing.assert_array_equal(first.scores, np.float32(scores)[:, 0])


def test_ranking_takes_the_most_probable_word(predictor):
    p = predictor(method="rank")
    words = ("ab", "c", "bca")
    targets = _pad_tokens([np.array([*Letters().encode(w), 1], np.int32) for w in words], 3, 4)
    inputs = encoded(p)
    answers = p.predict(inputs, label_words=words)
    for x, answer, found in zip(inputs, answers, p.rank(inputs, words), strict=True):
        sources = _pad_tokens([x] * 3, 3, 16)
        scores = score_targets(p.variables, sources, targets=targets, model=p.model)
        np.testing.assert_allclose(found, scores, rtol=1e-5)
        assert answer == words[int(np.argmax(scores))]


@pytest.mark.slow
def test_twelve_programs_serve_glue_and_super_glue(predictor):
    """Eight for answers, four for the loss."""
    p = predictor(method="rank", inputs_length=512, targets_length=32, batch_size=2)
    p.vocabulary = Pieces()
    answering = score_choices._cache_size() + run_decoding._cache_size()
    losses = score_targets._cache_size()
    rng = np.random.default_rng(0)
    for definition in (*GLUE, *SUPER_GLUE):
        longest = 100 if "stsb" in definition.name else 512
        inputs = [np.full(n, 2, np.int32) for n in (5, *rng.integers(1, longest, 9), longest)]
        words = EvaluationSet(definition, "validation", [], [], []).label_words
        assert len(p.predict(inputs, label_words=words)) == 11
        targets = [np.full(n, 2, np.int32) for n in rng.integers(1, 6 if words else 32, 11)]
        assert p.log_probabilities(inputs, targets).shape == (11,)
    assert score_choices._cache_size() + run_decoding._cache_size() - answering <= 8
    assert score_targets._cache_size() - losses <= 4


def test_batches_are_sorted_padded_and_whole():
    rng = np.random.default_rng(0)
    inputs = [np.ones(n, np.int32) * (i + 1) for i, n in enumerate(rng.integers(1, 90, 23))]
    seen = []
    for rows, batch in _length_batches(inputs, 5, (32, 64)):
        assert batch.shape[0] == 5
        assert batch.shape[1] in (32, 64)
        for row, slot in zip(rows, batch, strict=False):
            assert (slot != 0).sum() == min(len(inputs[row]), 64)
            assert slot[0] == row + 1
        seen += rows
    assert sorted(seen) == list(range(23))


def test_words_end_at_eos_or_padding():
    assert until_eos(np.array([5, 6, 1, 7])) == [5, 6]
    assert until_eos(np.array([5, 0, 0])) == [5]
    assert until_eos(np.array([5, 6])) == [5, 6]


def test_unknown_methods_are_one_sentence(predictor):
    with pytest.raises(ValueError, match="method='sample'; allowed: greedy, beam, rank"):
        predictor(method="sample")


class Examples:
    name, split, label_words = "made", "validation", ("ab", "c")
    scores_targets = is_text = False

    def __init__(self, inputs, labeled):
        self.inputs, self.labeled = inputs, labeled

    def score(self, answers):
        assert len(answers.texts) == len(answers.scores) == len(self.inputs)
        return {"accuracy": 40.0, "f1": 60.0} if self.labeled else {}

    def record(self, index, prediction):
        return {"idx": index, "prediction": prediction}


def strict(text):
    """JSON without the NaN that Python's reader would take."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_results_are_files_of_json(predictor, tmp_path):
    p = predictor(method="rank")
    inputs = encoded(p)
    said, done = [], []

    def phase(title, total):
        said.append((title, total))
        return done.append

    results = evaluate_tasks(p, [Examples(inputs, range(6)), Examples(inputs, ())], phase=phase)
    assert said == [("made, validation: 7 examples", 7)] * 2 and sum(done) == 14
    assert flatten_results(results) == {"made/accuracy": 40.0, "made/f1": 60.0}
    assert mean_score(results) == 50.0
    path = write_results(tmp_path, 7, results, overall={"score": 50.0})
    scored, hidden = strict(path.read_text())["tasks"]
    assert scored == {
        "task": "made",
        "split": "validation",
        "n": 7,
        "labeled": 6,
        "metrics": {"accuracy": 40.0, "f1": 60.0},
        "loss": None,
    }
    assert hidden == scored | {"labeled": 0, "metrics": {}}
    assert [x.name for x in path.parent.iterdir()] == ["results.json"]


def test_predictions_are_lines_of_json(predictor, tmp_path):
    p = predictor(method="rank")
    examples = Examples(encoded(p), ())
    (result,) = evaluate_tasks(p, [examples])
    path = write_predictions(tmp_path / "new", result, examples=examples)
    assert path == tmp_path / "new" / "made.jsonl"
    lines = [strict(line) for line in path.read_text().splitlines()]
    assert [line["idx"] for line in lines] == list(range(7))
    for line in lines:
        assert set(line["scores"]) == {"ab", "c"}
        assert line["score"] == max(line["scores"].values()) == line["scores"][line["prediction"]]
    assert list((tmp_path / "new").iterdir()) == [path]


@pytest.mark.parametrize("method", ["rank", "greedy", "beam"])
def test_numbers_that_are_not_finite_become_null(predictor, tmp_path, method):
    p = predictor(method=method)
    p.variables = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), p.variables)
    examples = Examples(encoded(p), range(7))
    (result,) = evaluate_tasks(p, [examples])
    result = dataclasses.replace(result, metrics={"f1": np.float32("nan"), "accuracy": np.inf})
    values = strict(write_results(tmp_path, 1, [result], overall={"loss": -np.inf}).read_text())
    assert values["tasks"][0]["metrics"] == {"f1": None, "accuracy": None}
    assert values["loss"] is None
    lines = write_predictions(tmp_path, result, examples=examples).read_text().splitlines()
    assert len([strict(line) for line in lines]) == 7


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    def lines(count):
        yield from ["new\n"] * count
        raise OSError("the disk is full")

    path = write_atomic(tmp_path / "x.jsonl", ["old\n"])
    with pytest.raises(OSError, match="full"):
        write_atomic(path, lines(3))
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]
