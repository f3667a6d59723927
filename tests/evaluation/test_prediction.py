"""Predictions come back in order, whatever the batching, and scores are the tasks'."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.data.definitions import GLUE, SUPER_GLUE
from synthesizer_jax.data.evaluation_sets import EvaluationSet
from synthesizer_jax.evaluation import Predictor, evaluate_tasks, flat, score_of, write_results
from synthesizer_jax.evaluation.prediction import batches, table, until_eos
from synthesizer_jax.inference import decode, score_choices, score_targets
from synthesizer_jax.models import Size, t5


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

    def make(**options):
        options = {"inputs_length": 16, "targets_length": 4, "batch_size": 3} | options
        return Predictor(model, variables, Letters(), **options)

    return make


def encoded(predictor):
    return [predictor.encode(text) for text in INPUTS]


@pytest.mark.parametrize("method", ["greedy", "beam", "rank"])
def test_batching_does_not_change_answers(predictor, method):
    words = ("ab", "c", "bca")
    together = predictor(method=method)
    alone = predictor(method=method, batch_size=1)
    found = together.predict(encoded(together), label_words=words)
    assert found == [alone.predict([x], label_words=words)[0] for x in encoded(alone)]
    if method == "rank":
        assert set(found) <= set(words)


def test_ranking_takes_the_most_probable_word(predictor):
    p = predictor(method="rank")
    words = ("ab", "c", "bca")
    targets = table([np.array([*Letters().encode(w), 1], np.int32) for w in words], 3, 4)
    inputs = encoded(p)
    answers = p.predict(inputs, label_words=words)
    for x, answer, found in zip(inputs, answers, p.rank(inputs, words), strict=True):
        sources = table([x] * 3, 3, 16)
        scores = score_targets(p.variables, sources, targets=targets, model=p.model)
        np.testing.assert_allclose(found, scores, rtol=1e-5)
        assert answer == words[int(np.argmax(scores))]


def test_eight_programs_serve_glue_and_super_glue(predictor):
    p = predictor(method="rank", inputs_length=512, targets_length=32, batch_size=2)
    p.vocabulary = Pieces()
    before = score_choices._cache_size() + decode._cache_size()
    rng = np.random.default_rng(0)
    for definition in (*GLUE, *SUPER_GLUE):
        longest = 100 if definition.kind == "similarity" else 512
        inputs = [np.full(n, 2, np.int32) for n in (5, *rng.integers(1, longest, 9), longest)]
        words = EvaluationSet(definition, "validation", [], [], []).label_words
        assert len(p.predict(inputs, label_words=words)) == 11
    assert score_choices._cache_size() + decode._cache_size() - before <= 8


def test_batches_are_sorted_padded_and_whole():
    rng = np.random.default_rng(0)
    inputs = [np.ones(n, np.int32) * (i + 1) for i, n in enumerate(rng.integers(1, 90, 23))]
    seen = []
    for rows, batch in batches(inputs, 5, (32, 64)):
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

    def __init__(self, inputs):
        self.inputs = inputs

    def score(self, predictions):
        assert len(predictions) == len(self.inputs)
        return {"accuracy": 40.0, "f1": 60.0}


def test_results_are_files_of_json(predictor, tmp_path):
    p = predictor(method="rank")
    results = evaluate_tasks(p, [Examples(encoded(p))])
    assert flat(results) == {"made/accuracy": 40.0, "made/f1": 60.0}
    assert score_of(results) == 50.0
    path = write_results(tmp_path, 7, results, {"score": 50.0})
    saved = json.loads(path.read_text())
    assert saved["tasks"][0] | {"split": None} == {
        "task": "made",
        "split": None,
        "n": 7,
        "metrics": {"accuracy": 40.0, "f1": 60.0},
    }
    assert [x.name for x in path.parent.iterdir()] == ["step_7.json"]
