"""T5's metrics, in percent, of lists of postprocessed targets and predictions."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np

Value: TypeAlias = Any
"""What a metric compares; its type depends on the task: an index, a number, a string or a dictionary."""

Metric: TypeAlias = Callable[[Sequence[Value], Sequence[Value]], dict[str, float]]
"""A function from targets and predictions, as a task postprocesses them, to scores by name."""

_Target = TypeVar("_Target")
_Prediction = TypeVar("_Prediction")


class _Result(Protocol):
    """What SciPy's correlations return."""

    @property
    def statistic(self) -> float: ...


class MultiRCTarget(TypedDict):
    """A target of MultiRC: the label of an answer, and the (paragraph, question) to which it belongs."""

    value: int
    group: tuple[int, int]


class ReCoRDTarget(TypedDict):
    """A target of ReCoRD: all answers of a query, and the (passage, query)."""

    answers: list[str]
    group: tuple[int, int]


def accuracy(targets: Sequence[object], predictions: Sequence[object]) -> dict[str, float]:
    """Returns the share of predictions that are equal to their targets."""
    return {"accuracy": 100 * float(np.mean([t == p for t, p in _zip_equal(targets, predictions)]))}


def f1_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the binary F1 of class 1; a prediction that is no label counts as the wrong one."""
    predictions = [p if p in (0, 1) else 1 - t for t, p in _zip_equal(targets, predictions)]
    return {"f1": 100 * _f1(targets, predictions, 1)}


def matthews(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the Matthews correlation of all classes, −1 (invalid) included; 0 if undefined."""
    import sklearn.metrics

    targets, predictions = list(targets), list(predictions)
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
    for target, prediction in _zip_equal(targets, predictions):
        group = target["group"]
        groups[group] = groups.get(group, True) and target["value"] == prediction
    return {"exact_match": 100 * float(np.mean(list(groups.values())))}


def record_squad(targets: Sequence[ReCoRDTarget], predictions: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's exact match and F1, the best over the answers, of the first row of every query."""
    seen: dict[tuple[int, int], tuple[float, float]] = {}
    for target, prediction in _zip_equal(targets, predictions):
        if target["group"] not in seen:
            answers = target["answers"] or [""]
            scores = [(exact_match(a, prediction), _token_f1(a, prediction)) for a in answers]
            seen[target["group"]] = max(s[0] for s in scores), max(s[1] for s in scores)
    em, f1 = np.mean(list(seen.values()), axis=0)
    return {"em": 100 * float(em), "f1": 100 * float(f1)}


def bleu(
    targets: Sequence[str], predictions: Sequence[str], *, tokenize: str = "intl"
) -> dict[str, float]:
    """Returns sacreBLEU's corpus BLEU-4 as T5 computes it: case-sensitive, smoothed (Post 2018).

    Args:
      targets: one reference for each prediction.
      predictions: answers.
      tokenize: sacreBLEU's tokenizer: ``intl`` (T5; splits off all Unicode punctuation), ``13a``
        (sacreBLEU's default, WMT's) or ``none``. Scores of different tokenizers cannot be compared.
        A task can list ``functools.partial(bleu, tokenize=…)`` among its metrics.
    """
    import sacrebleu

    score = sacrebleu.corpus_bleu(
        list(predictions),
        [list(targets)],
        smooth_method="exp",
        smooth_value=0.0,
        lowercase=False,
        tokenize=tokenize,
        use_effective_order=False,
    )
    return {"bleu": float(score.score)}


def gender_parity(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the share of adjacent pairs of rows with equal predictions (AX-g)."""
    del targets
    pairs = zip(predictions[::2], predictions[1::2], strict=False)
    return {"gender_parity": 100 * float(np.mean([a == b for a, b in pairs]))}


def _normalize_answer(text: str) -> str:
    """Normalizes as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, prediction: str) -> float:
    """Returns 1 when the normalized strings are equal, else 0."""
    return float(_normalize_answer(answer) == _normalize_answer(prediction))


def _token_f1(answer: str, prediction: str) -> float:
    """Returns the F1 of the multisets of normalized words."""
    a, p = _normalize_answer(answer).split(), _normalize_answer(prediction).split()
    common = sum((collections.Counter(a) & collections.Counter(p)).values())
    return 2 * common / (len(a) + len(p)) if common else 0.0


def _zip_equal(
    targets: Sequence[_Target], predictions: Sequence[_Prediction]
) -> list[tuple[_Target, _Prediction]]:
    return list(zip(targets, predictions, strict=True))


def _f1(targets: Sequence[int], predictions: Sequence[int], label: int) -> float:
    import sklearn.metrics

    score = sklearn.metrics.f1_score(
        list(targets), list(predictions), labels=[label], average="macro", zero_division=0
    )
    return float(score)


def _correlation(
    measure: Callable[[np.ndarray, np.ndarray], _Result], *sides: Sequence[float]
) -> float:
    x, y = (np.asarray(side, float) for side in sides)
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    # Squares of numbers near the end of float64 would overflow.
    return float(measure(x / np.abs(x).max(), y / np.abs(y).max()).statistic)
