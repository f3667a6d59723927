"""Intervals of scores over held-out examples, of T5's metrics that a file of predictions is enough for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from synthesizer_jax.base.files import is_installed
from synthesizer_jax.reports.logged import Record

SAMPLES = 1000
"""Resamples of the bootstrap."""


def interval(metric: str, value: float, answers: Mapping[str, Record]) -> tuple[float, float] | None:
    """Returns the 95 % interval of a logged score in percent: Wilson's (1927), or a bootstrap's.

    None where the answers alone do not give the score, where they are in groups, or where all resamples
    have one score, as those of a constant answer.
    """
    records = list(answers.values())
    if are_grouped(records):
        return None
    labels = [record.get(name) for record in records for name in ("label", "target_label")]
    if records and metric in METRICS and all(isinstance(label, int | float) for label in labels):
        score, low, high = _label_interval(metric, records)
    elif records and metric in ("bleu", "bleu_13a") and is_installed("sacrebleu"):
        score, low, high = _text_interval(metric, records)
    else:
        return None
    return (low, high) if low < high and math.isclose(score, value, abs_tol=0.05) else None


def are_grouped(records: Iterable[Record]) -> bool:
    """Whether answers share a question or text, as MultiRC's, so that they are no independent draws."""
    return any(isinstance(record.get("idx"), Mapping) for record in records)


def mcnemar(first: int, second: int) -> float:
    """Returns the probability of McNemar's test that counts of equally likely events differ so much."""
    return math.erfc(max(abs(first - second) - 1, 0) / math.sqrt(2 * max(first + second, 1)))


def _label_interval(metric: str, records: Sequence[Record]) -> list[float]:
    pairs = np.array([(r["target_label"], r["label"]) for r in records], float)
    # Equal pairs are drawn together; of labels there are few different ones.
    unique, counts = np.unique(pairs, axis=0, return_counts=True)
    n = len(records)
    draws = np.random.default_rng(0).multinomial(n, counts / n, size=SAMPLES)
    with np.errstate(all="ignore"):
        scores = METRICS[metric](np.vstack([counts, draws]), *unique.T)
    score, *samples = np.where(np.isfinite(scores), scores, 0.0)  # T5's value of what is undefined
    low, high = np.percentile(samples, (2.5, 97.5))
    if metric == "accuracy":
        z = 1.96
        half = z * math.sqrt(score * (1 - score) / n + z**2 / (4 * n**2))
        low, high = ((score + z**2 / (2 * n) + end) / (1 + z**2 / n) for end in (-half, half))
    return [100 * score, 100 * low, 100 * high]


def _text_interval(metric: str, records: Sequence[Record]) -> list[float]:
    from sacrebleu.metrics import BLEU

    scorer = BLEU(tokenize=metric[5:] or "intl", force=True)
    texts, targets = ([str(r[name]) for r in records] for name in ("prediction", "target"))
    bleu = scorer.corpus_score(texts, [targets], n_bootstrap=SAMPLES)
    return [bleu.score, bleu._mean - bleu._ci, bleu._mean + bleu._ci]


def _f1(w: np.ndarray, t: np.ndarray, p: np.ndarray, label: float) -> np.ndarray:
    both = w @ ((t == label) & (p == label))
    return np.nan_to_num(2 * both / (w @ (t == label) + w @ (p == label)))


def _correlation(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of numbers Pearson's; of one-hot vectors ``[n, labels]`` that of Matthews (Gorodkin 2004)."""
    share = w / w.sum(1, keepdims=True)

    def covariance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return share @ (a * b).sum(1) - ((share @ a) * (share @ b)).sum(1)

    return covariance(x, y) / np.sqrt(covariance(x, x) * covariance(y, y))


def _one_hot(*sides: np.ndarray) -> list[np.ndarray]:
    return [1.0 * np.equal.outer(side, np.union1d(*sides)) for side in sides]


METRICS: dict[str, Callable[..., np.ndarray]] = {
    "accuracy": lambda w, t, p: w @ (t == p) / w.sum(1),
    "f1": lambda w, t, p: _f1(w, t, np.where((p == 0) | (p == 1), p, 1 - t), 1),
    "mean_3class_f1": lambda w, t, p: np.mean([_f1(w, t, p, k) for k in range(3)], axis=0),
    "matthews_corrcoef": lambda w, t, p: _correlation(w, *_one_hot(t, p)),
    "pearson_corrcoef": lambda w, t, p: _correlation(w, t[:, None], p[:, None]),
}
"""Metrics from 0 to 1 of counts ``[samples, n]`` of pairs, and of the pairs' targets and predictions."""
