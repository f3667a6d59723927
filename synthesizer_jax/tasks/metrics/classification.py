"""T5's metrics of labels and numbers, in percent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from synthesizer_jax.tasks.metrics.values import MultiRCTarget, zip_equal


class _Result(Protocol):
    """What SciPy's correlations return."""

    @property
    def statistic(self) -> float: ...


def accuracy(targets: Sequence[object], predictions: Sequence[object]) -> dict[str, float]:
    """Returns the share of predictions that are equal to their targets."""
    return {"accuracy": 100 * float(np.mean([t == p for t, p in zip_equal(targets, predictions)]))}


def f1_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the binary F1 of class 1; a prediction that is no label counts as the wrong one."""
    predictions = [p if p in (0, 1) else 1 - t for t, p in zip_equal(targets, predictions)]
    return {"f1": 100 * _f1(targets, predictions, 1)}


def matthews(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the Matthews correlation of all classes, −1 (invalid) included; 0 if undefined."""
    import sklearn.metrics

    targets, predictions = zip(*zip_equal(targets, predictions), strict=True)
    defined = len({*targets, *predictions}) > 1  # scikit-learn would warn
    value = sklearn.metrics.matthews_corrcoef(targets, predictions) if defined else 0.0
    return {"matthews_corrcoef": 100 * float(value)}


def pearson(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns the Pearson correlation; 0 if one side is constant."""
    import scipy.stats

    return {"pearson_corrcoef": 100 * _correlation(scipy.stats.pearsonr, targets, predictions)}


def spearman(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns Spearman's rank correlation; 0 if one side is constant."""
    import scipy.stats

    return {"spearman_corrcoef": 100 * _correlation(scipy.stats.spearmanr, targets, predictions)}


def mean_3class_f1(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the mean of the F1 of classes 0, 1 and 2."""
    return {
        "mean_3class_f1": 100 * float(np.mean([_f1(targets, predictions, c) for c in range(3)]))
    }


def multirc_f1(targets: Sequence[MultiRCTarget], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the binary F1 over all answers."""
    return f1_with_invalid([t["value"] for t in targets], predictions)


def multirc_exact_match(
    targets: Sequence[MultiRCTarget], predictions: Sequence[int]
) -> dict[str, float]:
    """Returns the share of questions of which every answer is predicted correctly."""
    groups: dict[tuple[int, int], bool] = {}
    for target, prediction in zip_equal(targets, predictions):
        group = target["group"]
        groups[group] = groups.get(group, True) and target["value"] == prediction
    return {"exact_match": 100 * float(np.mean(list(groups.values())))}


def gender_parity(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the share of adjacent pairs of rows with equal predictions (AX-g)."""
    answers = [answer for _, answer in zip_equal(targets, predictions)]
    pairs = zip(answers[::2], answers[1::2], strict=False)
    return {"gender_parity": 100 * float(np.mean([a == b for a, b in pairs]))}


def _f1(targets: Sequence[int], predictions: Sequence[int], label: int) -> float:
    import sklearn.metrics

    sides = zip(*zip_equal(targets, predictions), strict=True)
    score = sklearn.metrics.f1_score(*sides, labels=[label], average="macro", zero_division=0)
    return float(score)


def _correlation(
    measure: Callable[[np.ndarray, np.ndarray], _Result],
    targets: Sequence[float],
    predictions: Sequence[float],
) -> float:
    x, y = np.asarray(zip_equal(targets, predictions), float).T
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    # Squares of numbers near the end of float64 would overflow.
    return float(measure(x / np.abs(x).max(), y / np.abs(y).max()).statistic)
