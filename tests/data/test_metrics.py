"""Metrics against scikit-learn and SciPy, and by hand; averages by hand."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from synthesizer_jax.data import metrics
from synthesizer_jax.data.averages import (
    BENCHMARKS,
    GLUE_GROUPS,
    SUPER_GLUE_GROUPS,
    averages,
    best_average,
    best_single_step,
    best_steps,
)


@pytest.fixture(scope="module")
def binary():
    rng = np.random.default_rng(0)
    return rng.integers(0, 2, 200).tolist(), rng.integers(0, 2, 200).tolist()


def test_against_scikit_learn(binary):
    t, p = binary
    assert metrics.accuracy(t, p)["accuracy"] == pytest.approx(100 * np.mean(np.equal(t, p)))
    expected = 100 * sklearn.metrics.f1_score(t, p)
    assert metrics.f1_with_invalid(t, p)["f1"] == pytest.approx(expected)
    with_invalid = [-1 if i % 7 == 0 else x for i, x in enumerate(p)]
    expected = 100 * sklearn.metrics.matthews_corrcoef(t, with_invalid)
    assert metrics.matthews(t, with_invalid)["matthews_corrcoef"] == pytest.approx(expected)
    t3, p3 = [x % 3 for x in range(50)], [(x * x) % 3 for x in range(50)]
    expected = 100 * sklearn.metrics.f1_score(
        t3, p3, average="macro", labels=[0, 1, 2], zero_division=0
    )
    assert metrics.mean_3class_f1(t3, p3)["mean_3class_f1"] == pytest.approx(expected)


def test_against_scipy():
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 6, 80) / 2, rng.integers(0, 6, 80) / 2
    assert metrics.pearson(a, b)["pearson_corrcoef"] == pytest.approx(
        100 * scipy.stats.pearsonr(a, b)[0]
    )
    assert metrics.spearman(a, b)["spearman_corrcoef"] == pytest.approx(
        100 * scipy.stats.spearmanr(a, b)[0]
    )


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


def test_best_steps_per_group_and_for_all():
    first, second = results(SUPER_GLUE_GROUPS, 50), results(SUPER_GLUE_GROUPS, 40)
    second["super_glue_copa_v102"] = {"accuracy": 99}
    by_step = {100: first, 200: second, 300: {"super_glue_copa_v102": {"accuracy": 100}}}
    steps = best_steps(by_step, "SuperGLUE")
    assert steps[("super_glue_copa_v102",)] == 200
    assert set(steps.values()) == {100, 200}
    assert best_average(by_step, "SuperGLUE") == pytest.approx((7 * 51 + 99) / 8)
    assert best_single_step(by_step, "SuperGLUE") == (100, pytest.approx(51))
    assert best_average({}, "GLUE") is None
    assert best_single_step({}, "GLUE") is None
