"""Metrics of answers to questions, in percent: exact match and F1 of words, the best over all answers.

Answers are normalized as by the evaluation scripts of SQuAD (Rajpurkar et al. 2016) and TriviaQA
(Joshi et al. 2017).
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable, Sequence

import numpy as np

from synthesizer_jax.tasks.metrics.values import ReCoRDTarget, SpanTarget, zip_equal

Normalize = Callable[[str], str]


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's exact match ``em`` and ``f1``.

    Args:
      targets: for every question all of its answers, at least one.
      predictions: answers.
    """
    return _best_over_answers(targets, predictions, normalize_squad)


def trivia_qa(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
    """Returns exact match ``em`` and ``f1`` with TriviaQA's normalization; see `squad`."""
    return _best_over_answers(targets, predictions, normalize_trivia_qa)


def span_squad(targets: Sequence[SpanTarget], predictions: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's ``em`` and ``f1`` of predictions such as ``start: 3 end: 6``.

    The words of the context at these positions, the last one included, are the answer. It is empty
    if a prediction does not have this form.
    """
    answers = [_words_of_span(t["context"], p) for t, p in zip_equal(targets, predictions)]
    return squad([target["answers"] for target in targets], answers)


def record_squad(targets: Sequence[ReCoRDTarget], predictions: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's ``em`` and ``f1`` of the first row of every query."""
    first: dict[tuple[int, int], tuple[Sequence[str], str]] = {}
    for target, prediction in zip_equal(targets, predictions):
        first.setdefault(target["group"], (target["answers"] or [""], prediction))
    answers, kept = zip(*first.values(), strict=True)
    return squad(answers, kept)


def exact_match(answer: str, prediction: str) -> float:
    """Returns 1 when the strings are equal after SQuAD's normalization, else 0."""
    return float(normalize_squad(answer) == normalize_squad(prediction))


def normalize_squad(text: str) -> str:
    """Returns the text in lower case, without ASCII punctuation and articles, with single spaces."""
    return _without_articles("".join(c for c in text.lower() if c not in string.punctuation))


def normalize_trivia_qa(text: str) -> str:
    """Returns the text normalized as for SQuAD, but with spaces for punctuation, curly quotes included."""
    marks = string.punctuation + "‘’´`_"
    return _without_articles("".join(" " if c in marks else c for c in text.lower()))


def _without_articles(text: str) -> str:
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _best_over_answers(
    targets: Sequence[Sequence[str]], predictions: Sequence[str], normalize: Normalize
) -> dict[str, float]:
    scores = []
    for answers, prediction in zip_equal(targets, predictions):
        predicted = normalize(prediction)
        expected = [normalize(answer) for answer in answers]
        scores.append((predicted in expected, max(_token_f1(a, predicted) for a in expected)))
    em, f1 = np.mean(scores, axis=0)
    return {"em": 100 * float(em), "f1": 100 * float(f1)}


def _token_f1(answer: str, prediction: str) -> float:
    """Returns the F1 of the multisets of words of two normalized strings."""
    a, p = answer.split(), prediction.split()
    common = sum((collections.Counter(a) & collections.Counter(p)).values())
    return 2 * common / (len(a) + len(p)) if common else 0.0


def _words_of_span(context: str, prediction: str) -> str:
    words = _split_words(prediction)
    try:
        start, end = int(words[1]), int(words[3])
    except (IndexError, ValueError):
        return ""
    return " ".join(_split_words(context)[start : end + 1])


def _split_words(text: str) -> list[str]:
    return re.sub(r"\W", " ", text).split()
