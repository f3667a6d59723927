"""From decoded strings to what metrics compare; targets pass through the same functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DETERMINERS = frozenset(
    [
        "a",
        "an",
        "few",
        "her",
        "his",
        "each",
        "every",
        "many",
        "much",
        "my",
        "our",
        "some",
        "that",
        "the",
        "their",
        "these",
        "this",
        "those",
        "which",
        "whose",
        "your",
    ]
)


def label_index(answer: str, labels: Sequence[str]) -> int:
    """Index of exactly that word, −1 for anything else."""
    return labels.index(answer) if answer in labels else -1


def number(answer: str) -> float:
    """The answer as a float, −1 when it is none."""
    try:
        return float(answer)
    except ValueError:
        return -1.0


def names_referent(prediction: str, referent: str) -> int:
    """1 when the prediction names the referent, 0 when another, −1 when it is empty.

    Lower-cased words without determiners; one set of words must contain the other, and an
    apostrophe in only one of the two means another referent (T5's WSC rule).
    """
    words = _words(prediction)
    if not words:
        return -1
    wanted = _words(referent)
    if ("'" in prediction) != ("'" in referent):
        return 0
    return int(words <= wanted or wanted <= words)


def _words(text: str) -> set[str]:
    return {w for w in text.lower().strip().split(" ") if w and w not in DETERMINERS}


def multirc_target(answer: str, example: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Value and the question that the row belongs to."""
    group = (int(example["idx/paragraph"]), int(example["idx/question"]))
    return {"value": label_index(answer, labels), "group": group}


def record_target(example: dict[str, Any]) -> dict[str, Any]:
    """All answers, and the query that the row belongs to."""
    group = (int(example["idx/passage"]), int(example["idx/query"]))
    return {"answers": [text(a) for a in example["answers"]], "group": group}


def text(value: Any) -> str:
    """A TensorFlow string as Python's."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
