"""Metrics against their formulas in NumPy, and by hand; averages by hand."""

import numpy as np
import pytest
import sacrebleu

from synthesizer_jax.evaluation.averages import (
    BENCHMARKS,
    GLUE_GROUPS,
    SUPER_GLUE_GROUPS,
    averages,
    best_average,
    best_single_step,
)
from synthesizer_jax.tasks import metrics
from synthesizer_jax.tasks.postprocessors import parse_number


@pytest.fixture(scope="module")
def binary():
    rng = np.random.default_rng(0)
    return rng.integers(0, 2, 200).tolist(), rng.integers(0, 2, 200).tolist()


def f1(targets, predictions, label):
    t, p = (np.equal(side, label) for side in (targets, predictions))
    return 100 * 2 * (t & p).sum() / (t.sum() + p.sum())


def matthews(targets, predictions):
    """Gorodkin 2004: the correlation of the indicator vectors of all classes."""
    classes = np.unique([*targets, *predictions])
    t, p = (np.equal.outer(side, classes).astype(float) for side in (targets, predictions))
    covariance = lambda a, b: ((a - a.mean(0)) * (b - b.mean(0))).sum()
    return 100 * covariance(t, p) / np.sqrt(covariance(t, t) * covariance(p, p))


def ranks(values):
    """Ties share their mean rank."""
    v = np.asarray(values)
    return (v[:, None] > v).sum(1) + (v[:, None] == v).sum(1) / 2


def correlation(a, b):
    return 100 * np.corrcoef(a, b)[0, 1]


def test_classification_metrics_are_their_formulas(binary):
    t, p = binary
    assert metrics.accuracy(t, p)["accuracy"] == pytest.approx(100 * np.mean(np.equal(t, p)))
    assert metrics.f1_with_invalid(t, p)["f1"] == pytest.approx(f1(t, p, 1))
    with_invalid = [-1 if i % 7 == 0 else x for i, x in enumerate(p)]
    expected = matthews(t, with_invalid)
    assert metrics.matthews(t, with_invalid)["matthews_corrcoef"] == pytest.approx(expected)
    t3, p3 = [x % 3 for x in range(50)], [(x * x) % 3 for x in range(50)]
    expected = np.mean([f1(t3, p3, label) for label in range(3)])
    assert metrics.mean_3class_f1(t3, p3)["mean_3class_f1"] == pytest.approx(expected)


def test_correlations_are_their_formulas():
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 6, 80) / 2, rng.integers(0, 6, 80) / 2
    assert metrics.pearson(a, b)["pearson_corrcoef"] == pytest.approx(correlation(a, b))
    expected = correlation(ranks(a), ranks(b))
    assert metrics.spearman(a, b)["spearman_corrcoef"] == pytest.approx(expected)


def test_an_invalid_answer_is_the_wrong_one():
    assert metrics.f1_with_invalid([1, 1, 0], [1, -1, -1])["f1"] == 50.0


def test_degenerate_inputs_are_zero_and_silent():
    assert metrics.matthews([1, 1], [1, 1])["matthews_corrcoef"] == 0.0
    assert metrics.pearson([1, 2], [3, 3])["pearson_corrcoef"] == 0.0
    assert metrics.f1_with_invalid([0, 0], [0, 0])["f1"] == 0.0
    assert metrics.mean_3class_f1([0, 0], [0, 0])["mean_3class_f1"] == pytest.approx(100 / 3)


def test_multirc_wants_all_answers_of_a_question():
    targets = [{"value": v, "group": g} for v, g in ((1, "a"), (0, "a"), (1, "b"))]
    assert metrics.multirc_exact_match(targets, [1, 1, 1])["exact_match"] == 50.0
    assert metrics.multirc_f1(targets, [1, 1, 1])["f1"] == pytest.approx(80.0)


def test_record_counts_a_query_once_and_takes_the_best_answer():
    targets = [
        {"answers": ["The New York", "Boston"], "group": 1},
        {"answers": ["The New York", "Boston"], "group": 1},
        {"answers": ["Rome"], "group": 2},
    ]
    found = metrics.record_squad(targets, ["new york!", "ignored", "Rome, Italy"])
    assert found == {"em": 50.0, "f1": pytest.approx(100 * (1 + 2 / 3) / 2)}


def test_an_answer_that_is_no_finite_number_counts_as_minus_one():
    answers = ["0.8", "nan", "4.0", "inf", "2.0", "1e308"]
    found = [parse_number(answer) for answer in answers]
    assert found == [0.8, -1.0, 4.0, -1.0, 2.0, 1e308]
    targets, found = [0.8, 1.0, 4.0, 1.0, 2.0], found[:5]
    for metric, name, expected in (
        (metrics.pearson, "pearson_corrcoef", correlation(targets, found)),
        (metrics.spearman, "spearman_corrcoef", correlation(ranks(targets), ranks(found))),
    ):
        assert metric(targets, found)[name] == pytest.approx(expected)
        assert metric(targets, found)[name] > 50
    assert np.isfinite(metrics.pearson([1, 2, 3], [1e308, -1e308, 1])["pearson_corrcoef"])


def test_bleu_is_t5s_unless_a_task_says_otherwise():
    targets = ["Das kostet 3€–4€ (ungefähr), sagt er…", "Ein Mann geht.", "Zwei Hunde spielen."]
    predictions = ["Das kostet 3€–4€ (etwa), sagt er…", "Ein Mann läuft.", "Zwei Hunde spielen."]
    scores = {
        name: sacrebleu.metrics.BLEU(tokenize=name, smooth_method="exp", effective_order=False)
        .corpus_score(predictions, [targets])
        .score
        for name in ("intl", "13a", "none")
    }
    assert len(set(scores.values())) == 3
    assert metrics.bleu(targets, predictions)["bleu"] == pytest.approx(scores["intl"])
    for name, score in scores.items():
        key = "bleu" if name == "intl" else f"bleu_{name}"
        assert metrics.bleu(targets, predictions, tokenize=name) == {key: pytest.approx(score)}
    assert metrics.bleu_13a(targets, predictions) == {"bleu_13a": pytest.approx(scores["13a"])}


def test_every_reference_counts():
    targets, predictions = [["a b c d e", "v w x y z"], ["k l m n o"]], ["v w x y z", "k l m n o"]
    assert metrics.bleu(targets, predictions)["bleu"] == pytest.approx(100)
    assert metrics.chrf(targets, predictions)["chrf"] == pytest.approx(100)
    kinds = ("rouge1", "rouge2", "rougeLsum")
    assert metrics.rouge(targets, predictions) == dict.fromkeys(kinds, pytest.approx(100))
    first = [references[0] for references in targets]
    assert metrics.bleu(first, predictions)["bleu"] < 60
    assert metrics.chrf(first, predictions)["chrf"] < 80


def test_rouge_by_hand():
    """3 of 4 words in common, 1 of 3 pairs, a common subsequence of 2; sentences in another order."""
    targets, predictions = ["a b c d . e f ."], ["e f . a b c d ."]
    found = metrics.rouge_all(targets, predictions)
    assert found["rouge1"] == pytest.approx(100)
    assert found["rouge2"] == pytest.approx(100 * 4 / 5)
    assert found["rougeL"] == pytest.approx(100 * 4 / 6)
    assert found["rougeLsum"] == pytest.approx(100)
    assert metrics.rouge_l(targets, predictions) == {"rougeL": found["rougeL"]}


def test_dialogue_metrics_by_hand():
    targets, predictions = ["i like red cars a lot ."], ["i like cars a lot ."]
    found = metrics.dialogue_bleu(targets, predictions)
    brevity = np.exp(1 - 7 / 6)
    assert found["bleu1"] == pytest.approx(100 * brevity)
    precisions = [6 / 6, 4 / 5, 2 / 4, 1 / 3]
    assert found["bleu4"] == pytest.approx(100 * brevity * np.prod(precisions) ** (1 / 4))
    assert metrics.distinct(None, ["a b a b", "a b c"]) == {
        "distinct1": pytest.approx(100 * 3 / 7),
        "distinct2": pytest.approx(100 * 3 / 5),
    }
    assert metrics.distinct(None, [""]) == {"distinct1": 0.0, "distinct2": 0.0}


def test_answers_are_normalized_as_the_scripts_do_it():
    text = "The  U.S.A., ‘an’ a_b"
    assert metrics.normalize_squad(text) == "usa ‘ ’ ab"
    assert metrics.normalize_trivia_qa(text) == "u s b"
    assert metrics.squad([["x", "the Cat"], ["b c"]], ["cat!", "c d"]) == {"em": 50.0, "f1": 75.0}
    assert metrics.trivia_qa([["a-b"]], ["B"])["em"] == 100.0
    span = {"answers": ["won it"], "context": "Ann, who won it."}
    assert metrics.span_squad([span] * 2, ["start: 2 end: 3", "2 3"]) == {"em": 50.0, "f1": 50.0}


def test_gender_parity_compares_pairs():
    assert metrics.gender_parity([0] * 4, [1, 1, 0, 1])["gender_parity"] == 50.0


def results(groups, value):
    return {task: {"a": value, "b": value + 2} for group in groups for task in group}


def test_averages_count_groups_and_only_when_complete():
    glue = results(GLUE_GROUPS, 50)
    assert averages(glue) == {"GLUE": pytest.approx(51)}
    glue["glue_mnli_matched_v002"] = {"accuracy": 91}  # its group's mean is then 71
    assert averages(glue)["GLUE"] == pytest.approx((7 * 51 + 71) / 8)
    del glue["glue_qqp_v002"]
    assert averages(glue) == {}
    both = results(GLUE_GROUPS, 50) | results(SUPER_GLUE_GROUPS, 60)
    assert set(averages(both)) == set(BENCHMARKS)


def test_best_average_per_group_and_for_all():
    first, second = results(SUPER_GLUE_GROUPS, 50), results(SUPER_GLUE_GROUPS, 40)
    second["super_glue_copa_v102"] = {"accuracy": 99}
    by_step = {100: first, 200: second, 300: {"super_glue_copa_v102": {"accuracy": 100}}}
    # The other groups are best at 100, COPA at 200; 300 lacks the other groups.
    assert best_average(by_step, "SuperGLUE") == pytest.approx((7 * 51 + 99) / 8)
    assert best_single_step(by_step, "SuperGLUE") == (100, pytest.approx(51))
    assert best_average({}, "GLUE") is None
    assert best_single_step({}, "GLUE") is None


@pytest.mark.parametrize(
    "metric",
    ["accuracy", "bleu", "f1_with_invalid", "gender_parity", "matthews", "pearson", "squad"],
)
def test_no_examples_are_one_sentence(metric):
    with pytest.raises(ValueError, match="there are no targets to compare with"):
        getattr(metrics, metric)([], [])
