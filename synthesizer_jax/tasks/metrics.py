"""Metrics, which are functions that compare a list of postprocessed targets with predictions.

All scores are in percent. Metrics that T5 computes have T5's names. Every metric requires at least
one target, and as many predictions as targets.
"""

from __future__ import annotations

import collections
import itertools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from etils import epy

with epy.lazy_imports():
    import sacrebleu.metrics
    import scipy.stats
    import sklearn.metrics
    from rouge_score import rouge_scorer

Value: TypeAlias = Any
"""A value that a metric compares. The type of the value depends on the task.

The value is an index, a number, a string or a dictionary.
"""

Metric: TypeAlias = Callable[[Sequence[Value], Sequence[Value]], dict[str, float]]
"""A function of postprocessed targets and predictions that returns scores by name."""

References: TypeAlias = str | Sequence[str]
"""The reference text of an example, or several of them."""

_Target = TypeVar("_Target")
_Prediction = TypeVar("_Prediction")


def zip_equal(
    targets: Sequence[_Target], predictions: Sequence[_Prediction]
) -> list[tuple[_Target, _Prediction]]:
    """Returns a list of pairs of a target and its prediction.

    Raises:
      ValueError: if there are no targets, or if the number of targets differs from the number of
        predictions.
    """
    pairs = list(zip(targets, predictions, strict=True))
    if not pairs:
        raise ValueError("There are no targets to compare with. A metric needs at least one.")
    return pairs


# Labels and numbers. -----------------------------------------------------------------------------


def accuracy(targets: Sequence[object], predictions: Sequence[object]) -> dict[str, float]:
    """Returns the percentage of predictions that are equal to their targets."""
    return {"accuracy": 100 * float(np.mean([t == p for t, p in zip_equal(targets, predictions)]))}


def f1_with_invalid(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the binary F1 of class 1. A prediction that is not a label counts as wrong."""
    predictions = [p if p in (0, 1) else 1 - t for t, p in zip_equal(targets, predictions)]
    return {"f1": 100 * _f1(targets, predictions, 1)}


def matthews(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the Matthews correlation over all classes.

    Invalid predictions count as a class −1. The score is 0 if the correlation is undefined.
    """
    targets, predictions = zip(*zip_equal(targets, predictions), strict=True)
    # If all values belong to a single class, the correlation is undefined, and scikit-learn would
    # print a warning.
    defined = len({*targets, *predictions}) > 1
    value = sklearn.metrics.matthews_corrcoef(targets, predictions) if defined else 0.0
    return {"matthews_corrcoef": 100 * float(value)}


def pearson(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns the Pearson correlation, which is 0 if all targets or all predictions are equal."""
    return {"pearson_corrcoef": 100 * _correlation(scipy.stats.pearsonr, targets, predictions)}


def spearman(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns Spearman's rank correlation, or 0 if all targets or all predictions are equal."""
    return {"spearman_corrcoef": 100 * _correlation(scipy.stats.spearmanr, targets, predictions)}


def mean_3class_f1(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the mean of the F1 scores of the classes 0, 1 and 2."""
    scores = [_f1(targets, predictions, label) for label in range(3)]
    return {"mean_3class_f1": 100 * float(np.mean(scores))}


def multirc_f1(
    targets: Sequence[Mapping[str, Any]], predictions: Sequence[int]
) -> dict[str, float]:
    """Returns the binary F1 over all answers (see `postprocessors.multirc` for the targets)."""
    return f1_with_invalid([t["value"] for t in targets], predictions)


def multirc_exact_match(
    targets: Sequence[Mapping[str, Any]], predictions: Sequence[int]
) -> dict[str, float]:
    """Returns the percentage of questions for which all answers are predicted correctly."""
    groups: dict[tuple[int, int], bool] = {}
    for target, prediction in zip_equal(targets, predictions):
        group = target["group"]
        groups[group] = groups.get(group, True) and target["value"] == prediction
    return {"exact_match": 100 * float(np.mean(list(groups.values())))}


def gender_parity(targets: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    """Returns the percentage of pairs of rows with equal predictions (AX-g).

    A pair consists of two adjacent rows, which differ only in the gender of a pronoun.
    """
    answers = [answer for _, answer in zip_equal(targets, predictions)]
    pairs = zip(answers[::2], answers[1::2], strict=False)
    return {"gender_parity": 100 * float(np.mean([a == b for a, b in pairs]))}


def _f1(targets: Sequence[int], predictions: Sequence[int], label: int) -> float:
    """Returns the F1 of one class, as a fraction."""
    sides = zip(*zip_equal(targets, predictions), strict=True)
    score = sklearn.metrics.f1_score(*sides, labels=[label], average="macro", zero_division=0)
    return float(score)


def _correlation(
    measure: Callable[[np.ndarray, np.ndarray], Any],
    targets: Sequence[float],
    predictions: Sequence[float],
) -> float:
    """Returns a correlation, or 0 if all targets or all predictions are equal."""
    x, y = np.asarray(zip_equal(targets, predictions), float).T
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    # Scale the values, because the squares of very large numbers would overflow. Scaling does not
    # change a correlation.
    return float(measure(x / np.abs(x).max(), y / np.abs(y).max()).statistic)


# Answers to questions. ---------------------------------------------------------------------------
# If an example has several correct answers, the answer with the best score counts. Texts are
# normalized as in SQuAD's evaluation script (Rajpurkar et al. 2016).


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's scores: the exact match ``em``, and the F1 of words ``f1``.

    Args:
      targets: for every example, a list of one or more correct answers. The best score counts.
      predictions: the predicted answers.
    """
    scores = []
    for answers, prediction in zip_equal(targets, predictions):
        predicted = normalize_squad(prediction)
        expected = [normalize_squad(answer) for answer in answers]
        scores.append((predicted in expected, max(_token_f1(a, predicted) for a in expected)))
    em, f1 = np.mean(scores, axis=0)
    return {"em": 100 * float(em), "f1": 100 * float(f1)}


def record_squad(
    targets: Sequence[Mapping[str, Any]], predictions: Sequence[str]
) -> dict[str, float]:
    """Returns SQuAD's scores ``em`` and ``f1``, computed over the first row of every query.

    See `postprocessors.record` for the targets.
    """
    first: dict[tuple[int, int], tuple[Sequence[str], str]] = {}
    for target, prediction in zip_equal(targets, predictions):
        first.setdefault(target["group"], (target["answers"] or [""], prediction))
    answers, kept = zip(*first.values(), strict=True)
    return squad(answers, kept)


def normalize_squad(text: str) -> str:
    """Returns the text in lower case and without punctuation, articles and repeated spaces.

    Only ASCII punctuation is removed.
    """
    words = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", words).split())


def _token_f1(answer: str, prediction: str) -> float:
    """Returns the F1 of the words of two normalized strings, as a fraction.

    A word that occurs several times in a text counts several times.
    """
    a, p = answer.split(), prediction.split()
    common = sum((collections.Counter(a) & collections.Counter(p)).values())
    return 2 * common / (len(a) + len(p)) if common else 0.0


# Generated texts. --------------------------------------------------------------------------------
# A target is a string, or a list of reference texts.


def bleu(
    targets: Sequence[References], predictions: Sequence[str], *, tokenize: str = "intl"
) -> dict[str, float]:
    """Returns sacreBLEU's corpus BLEU-4 as T5 computes it, case-sensitive and smoothed (Post 2018).

    Scores that were computed with different tokenizers cannot be compared.

    Args:
      targets: the references of each prediction.
      predictions: the texts to compare with the references.
      tokenize: sacreBLEU's tokenizer. ``intl`` is T5's tokenizer, which splits off all Unicode
        punctuation. ``13a`` is the tokenizer of WMT, and sacreBLEU's default. ``none`` splits only
        at spaces.

    Returns:
      A dictionary with one score, whose key is ``bleu`` for T5's tokenizer, ``bleu_13a`` for the
      tokenizer ``13a``, and so on.
    """
    score = _corpus_bleu(targets, predictions, tokenize=tokenize, order=4)
    return {"bleu" if tokenize == "intl" else f"bleu_{tokenize}": score}


def bleu_13a(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns `bleu` with WMT's tokenizer, which is the score that most papers report."""
    return bleu(targets, predictions, tokenize="13a")


def dialogue_bleu(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the corpus BLEU of single words, ``bleu1``, and of one to four words, ``bleu4``.

    Words are separated by spaces.
    """
    return {
        f"bleu{order}": _corpus_bleu(targets, predictions, tokenize="none", order=order)
        for order in (1, 4)
    }


def chrf(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns sacreBLEU's corpus chrF2 (Popović 2015).

    The score is the F2 score of character n-grams with up to six characters.
    """
    score = sacrebleu.corpus_chrf(list(predictions), _reference_streams(targets, predictions))
    return {"chrf": float(score.score)}


def rouge(
    targets: Sequence[References],
    predictions: Sequence[str],
    *,
    kinds: Sequence[str] = ("rouge1", "rouge2", "rougeLsum"),
) -> dict[str, float]:
    """Returns ROUGE F1 scores (Lin 2004) as the package rouge-score computes them without stemming.

    As in T5, `` . `` ends a sentence, which ``rougeLsum`` needs to know. If there are several
    references, the best one counts, separately for each kind of ROUGE.

    Args:
      targets: the references of each prediction.
      predictions: the texts to compare with the references.
      kinds: the kinds of ROUGE to compute. ``rouge1``, ``rouge2`` and so on count n-grams.
        ``rougeL`` uses the longest common subsequence of the whole texts, and ``rougeLsum`` the
        longest common subsequences of their sentences.
    """
    scorer = rouge_scorer.RougeScorer(list(kinds))
    values = []
    for references, prediction in zip_equal(targets, predictions):
        texts = [_split_sentences(text) for text in _as_list(references)]
        scores = scorer.score_multi(texts, _split_sentences(prediction))
        values.append([scores[kind].fmeasure for kind in kinds])
    return dict(zip(kinds, (100 * np.mean(values, axis=0)).tolist(), strict=True))


def rouge_l(targets: Sequence[References], predictions: Sequence[str]) -> dict[str, float]:
    """Returns only the score ``rougeL`` of `rouge`, which compares whole texts."""
    return rouge(targets, predictions, kinds=("rougeL",))


def distinct(targets: Sequence[object], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the percentages of distinct words (``distinct1``) and distinct pairs (``distinct2``).

    A pair consists of two adjacent words. The percentages are computed over all predictions
    together (Li et al. 2016). A percentage is 0 if there are no words or pairs.
    """
    texts = [prediction.split() for prediction in predictions]
    pairs = [pair for words in texts for pair in itertools.pairwise(words)]
    words = [word for words in texts for word in words]
    return {
        "distinct1": 100 * len(set(words)) / max(len(words), 1),
        "distinct2": 100 * len(set(pairs)) / max(len(pairs), 1),
    }


def _corpus_bleu(
    targets: Sequence[References], predictions: Sequence[str], *, tokenize: str, order: int
) -> float:
    """Returns the smoothed corpus BLEU of n-grams with up to `order` words, in percent."""
    metric = sacrebleu.metrics.BLEU(
        tokenize=tokenize, smooth_method="exp", max_ngram_order=order, force=True
    )
    streams = _reference_streams(targets, predictions)
    return float(metric.corpus_score(list(predictions), streams).score)


def _reference_streams(
    targets: Sequence[References], predictions: Sequence[str]
) -> list[list[Any]]:
    """Returns the references in the form that sacreBLEU expects.

    The result has one list for every n, which holds the n-th reference of each example. An entry is
    `None` if an example has fewer than n references. T5 instead passes one list for each example,
    which sacreBLEU misinterprets.
    """
    references = [_as_list(target) for target, _ in zip_equal(targets, predictions)]
    return [list(stream) for stream in itertools.zip_longest(*references)]


def _as_list(references: References) -> list[str]:
    """Returns the references of an example as a list."""
    return [references] if isinstance(references, str) else list(references)


def _split_sentences(text: str) -> str:
    """Returns the text with each sentence on its own line, as ``rougeLsum`` expects."""
    return text.replace(" . ", " .\n")
