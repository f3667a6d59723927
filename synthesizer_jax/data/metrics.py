"""T5's metrics, all in percent, from lists of postprocessed targets and predictions."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Metric = Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Share of equal answers."""
    return {"accuracy": 100 * float(np.mean([t == p for t, p in zip_(targets, predictions)]))}


def f1_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Binary F1 of class 1; an answer that is no label counts as the wrong one."""
    predictions = [p if p in (0, 1) else 1 - t for t, p in zip_(targets, predictions)]
    return {"f1": 100 * _f1(targets, predictions, 1)}


def matthews(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Matthews correlation over all classes that occur, an invalid −1 among them; 0 if undefined.

    Gorodkin 2004: ``(c·s − Σ p_k t_k) / √((s² − Σ p_k²)(s² − Σ t_k²))``.
    """
    classes = sorted({*targets, *predictions})
    t = np.array([list(targets).count(c) for c in classes], float)
    p = np.array([list(predictions).count(c) for c in classes], float)
    correct, total = sum(a == b for a, b in zip_(targets, predictions)), len(targets)
    scale = np.sqrt((total**2 - p @ p) * (total**2 - t @ t))
    value = (correct * total - p @ t) / scale if scale > 0 else 0.0
    return {"matthews_corrcoef": 100 * float(value)}


def pearson(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Pearson correlation; 0 when one side does not vary."""
    return {"pearson_corrcoef": 100 * _correlation(targets, predictions)}


def spearman(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Spearman correlation: Pearson's of the ranks, ties sharing their mean rank."""
    return {"spearman_corrcoef": 100 * _correlation(_ranks(targets), _ranks(predictions))}


def mean_3class_f1(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Mean of the F1 of classes 0, 1 and 2."""
    return {
        "mean_3class_f1": 100 * float(np.mean([_f1(targets, predictions, c) for c in range(3)]))
    }


def multirc_f1(targets: Sequence[dict], predictions: Sequence[int]) -> dict[str, float]:
    """Binary F1 over all answers."""
    return f1_with_invalid([t["value"] for t in targets], predictions)


def multirc_exact_match(targets: Sequence[dict], predictions: Sequence[int]) -> dict[str, float]:
    """Share of questions all of whose answers are judged right."""
    groups: dict[Any, bool] = {}
    for target, prediction in zip_(targets, predictions):
        group = target["group"]
        groups[group] = groups.get(group, True) and target["value"] == prediction
    return {"exact_match": 100 * float(np.mean(list(groups.values())))}


def record_squad(targets: Sequence[dict], predictions: Sequence[str]) -> dict[str, float]:
    """SQuAD's exact match and F1, best over the answers, on the first row of every query."""
    seen: dict[Any, tuple[float, float]] = {}
    for target, prediction in zip_(targets, predictions):
        if target["group"] not in seen:
            answers = target["answers"] or [""]
            scores = [(exact(a, prediction), token_f1(a, prediction)) for a in answers]
            seen[target["group"]] = max(s[0] for s in scores), max(s[1] for s in scores)
    em, f1 = np.mean(list(seen.values()), axis=0)
    return {"em": 100 * float(em), "f1": 100 * float(f1)}


def bleu(
    targets: Sequence[str], predictions: Sequence[str], *, tokenize: str = "intl"
) -> dict[str, float]:
    """Corpus BLEU-4 of sacreBLEU as T5 computes it: case-sensitive, exponential smoothing (Post 2018).

    Args:
      targets: one reference for each prediction.
      predictions: answers.
      tokenize: sacreBLEU's tokens: ``intl`` (T5; every Unicode mark of punctuation stands alone),
        ``13a`` (sacreBLEU's default, WMT's), ``none``. Scores of different tokens do not compare;
        a task with others has ``functools.partial(bleu, tokenize=…)`` among its metrics.
    """
    import sacrebleu

    found = sacrebleu.corpus_bleu(
        list(predictions),
        [list(targets)],
        smooth_method="exp",
        smooth_value=0.0,
        lowercase=False,
        tokenize=tokenize,
        use_effective_order=False,
    )
    return {"bleu": float(found.score)}


def gender_parity(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """AX-g: share of adjacent pairs of rows with equal predictions."""
    del targets
    pairs = zip(predictions[::2], predictions[1::2], strict=False)
    return {"gender_parity": 100 * float(np.mean([a == b for a, b in pairs]))}


def normalise_answer(text: str) -> str:
    """SQuAD: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact(answer: str, prediction: str) -> float:
    """1 when the normalised strings are equal."""
    return float(normalise_answer(answer) == normalise_answer(prediction))


def token_f1(answer: str, prediction: str) -> float:
    """F1 of the multisets of normalised words."""
    a, p = normalise_answer(answer).split(), normalise_answer(prediction).split()
    common = sum((collections.Counter(a) & collections.Counter(p)).values())
    return 2 * common / (len(a) + len(p)) if common else 0.0


def zip_(targets: Sequence[Any], predictions: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs of equally many targets and predictions."""
    return list(zip(targets, predictions, strict=True))


def _f1(targets: Sequence[int], predictions: Sequence[int], of: int) -> float:
    pairs = zip_(targets, predictions)
    hits = sum(t == of == p for t, p in pairs)
    total = sum(t == of for t, _ in pairs) + sum(p == of for _, p in pairs)
    return 2 * hits / total if total else 0.0


def _correlation(a: Any, b: Any) -> float:
    x, y = (v / (np.abs(v).max() or 1) for v in (np.asarray(a, float), np.asarray(b, float)))
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale > 0 else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]
