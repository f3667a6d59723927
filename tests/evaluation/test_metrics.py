"""Compares metrics that T5 does not have, and averages of metrics, with results by hand."""

import numpy as np
import pytest

from synthesizer_jax.evaluation import benchmarks
from synthesizer_jax.evaluation.benchmarks import BENCHMARKS, averages
from synthesizer_jax.tasks import metrics
from synthesizer_jax.tasks.postprocessors import parse_number


def test_metrics_where_t5_has_none_or_is_undefined():
    """For T5's own metrics, see `tests/tasks/test_t5_oracle.py`."""
    for metric, targets, predictions, expected in (
        (metrics.f1_with_invalid, [1, 1, 0], [1, -1, -1], 50),  # an invalid answer counts as wrong
        (metrics.gender_parity, [0] * 4, [1, 1, 0, 1], 50),
        (metrics.matthews, [1, 1], [1, 1], 0),
        (metrics.pearson, [1, 2], [3, 3], 0),
        (metrics.pearson, [1, 2, 3], [1e308, 2e307, -1e308], -99.34),
        (metrics.spearman, [1, 2, 3], [1, 5, 9], 100),
        (metrics.f1_with_invalid, [0, 0], [0, 0], 0),
        (metrics.mean_3class_f1, [0, 0], [0, 0], 100 / 3),
    ):
        (found,) = metric(targets, predictions).values()
        assert found == pytest.approx(expected, rel=1e-4), metric
    answers = ["0.8", "nan", "4.0", "inf", "2.0", "1e308"]
    assert list(map(parse_number, answers)) == [0.8, -1.0, 4.0, -1.0, 2.0, 1e308]


def test_every_reference_counts():
    targets, predictions = [["a b c d e", "v w x y z"], ["k l m n o"]], ["v w x y z", "k l m n o"]
    assert metrics.bleu(targets, predictions)["bleu"] == pytest.approx(100)
    assert metrics.chrf(targets, predictions)["chrf"] == pytest.approx(100)
    kinds = ("rouge1", "rouge2", "rougeLsum")
    assert metrics.rouge(targets, predictions) == dict.fromkeys(kinds, pytest.approx(100))
    first = [references[0] for references in targets]
    assert metrics.bleu(first, predictions)["bleu"] < 60
    assert metrics.chrf(first, predictions)["chrf"] < 80


def test_metrics_of_generated_texts_by_hand():
    """ROUGE is computed for a text with its sentences in a different order.

    The texts share all words, 4 of 5 pairs of words, and a common subsequence of 4 of 6 words.
    """
    targets, predictions = ["a b c d . e f ."], ["e f . a b c d ."]
    found = metrics.rouge(targets, predictions, kinds=("rouge1", "rouge2", "rougeL", "rougeLsum"))
    expected = {"rouge1": 100, "rouge2": 100 * 4 / 5, "rougeL": 100 * 4 / 6, "rougeLsum": 100}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert metrics.rouge_l(targets, predictions) == {"rougeL": found["rougeL"]}
    found = metrics.dialogue_bleu(["i like red cars a lot ."], ["i like cars a lot ."])
    precisions = [6 / 6, 4 / 5, 2 / 4, 1 / 3]
    brevity = 100 * np.exp(1 - 7 / 6)
    assert found["bleu1"] == pytest.approx(brevity)
    assert found["bleu4"] == pytest.approx(brevity * np.prod(precisions) ** (1 / 4))
    expected = {"distinct1": 100 * 3 / 7, "distinct2": 100 * 3 / 5}
    assert metrics.distinct(None, ["a b a b", "a b c"]) == pytest.approx(expected)
    assert metrics.distinct(None, [""]) == {"distinct1": 0.0, "distinct2": 0.0}


def results(groups, value):
    return {task: {"a": value, "b": value + 2} for group in groups for task in group}


def test_averages_count_groups_and_only_when_complete():
    glue = results(BENCHMARKS["GLUE"], 50)
    assert averages(glue) == {"GLUE": pytest.approx(51)}
    glue["glue_mnli_matched_v002"] = {"accuracy": 91}  # the mean of MNLI's group becomes 71
    assert averages(glue)["GLUE"] == pytest.approx((7 * 51 + 71) / 8)
    del glue["glue_qqp_v002"]
    assert averages(glue) == {}
    both = results(BENCHMARKS["GLUE"], 50) | results(BENCHMARKS["SuperGLUE"], 60)
    assert set(averages(both)) == set(BENCHMARKS)


def test_best_steps_per_task_per_group_and_for_all():
    first, second = results(BENCHMARKS["SuperGLUE"], 50), results(BENCHMARKS["SuperGLUE"], 40)
    second["super_glue_copa_v102"] = {"accuracy": 99}
    by_step = {100: first, 200: second, 300: {"super_glue_copa_v102": {"accuracy": 100}}}
    # COPA has its best score at step 200, and all other groups at step 100. At step 300, the other
    # groups were not evaluated.
    assert benchmarks.best_average(by_step, "SuperGLUE") == pytest.approx((7 * 51 + 99) / 8)
    assert benchmarks.best_single_step(by_step, "SuperGLUE") == (100, pytest.approx(51))
    assert benchmarks.best_average({}, "GLUE") is benchmarks.best_single_step({}, "GLUE") is None
    found = {
        2: {"a": {"x": 1.0, "y": 3.0}, "b": {"x": 5.0}, "c": {}},
        4: {"a": {"x": 3.0, "y": 2.0}, "b": {"x": 5.0}, "c": {}},
        6: {"a": {"x": float("nan"), "y": 9.0}, "b": {"x": 4.0}, "c": {}},
    }
    assert benchmarks.best_by_task(found) == {"a": 4, "b": 2}


@pytest.mark.parametrize("metric", ["accuracy", "bleu", "f1_with_invalid", "pearson", "squad"])
def test_no_examples_give_one_sentence(metric):
    with pytest.raises(ValueError, match="There are no targets to compare with"):
        getattr(metrics, metric)([], [])
