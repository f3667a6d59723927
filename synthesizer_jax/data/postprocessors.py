"""From decoded strings to what metrics compare; targets pass through the same functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

UNKNOWN = "<unk>"
"""Target of a row whose label is hidden."""

SENTINEL = "<extra_id_0>"
"""What the answers of T5's sentinel tasks begin with."""

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
    """The answer as a float, −1 when it is none.

    ``nan`` and ``inf`` are none either: T5 lets them pass, and one of them makes a correlation
    undefined.
    """
    try:
        value = float(answer)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def without_sentinel(answer: str) -> str:
    """The answer of a sentinel task: a leading sentinel goes, with the spaces about the rest.

    An answer without one is left as it is.
    """
    return answer.removeprefix(SENTINEL).strip() if answer.startswith(SENTINEL) else answer


def names_referent(prediction: str, referent: str) -> int:
    """1 when the prediction names the referent, 0 when another, −1 when it is empty.

    Lower-cased words without determiners; one set of words must contain the other, and an
    apostrophe in only one of the two means another referent (T5's WSC rule). So a referent that
    consists of determiners is named by nothing.
    """
    found, wanted = _without_determiners(prediction), _without_determiners(referent)
    if not found:
        return -1
    if ("'" in found) != ("'" in wanted):
        return 0
    words, named = set(found.split(" ")), set(wanted.split(" "))
    return int(words <= named or named <= words)


def _without_determiners(text: str) -> str:
    return " ".join(w for w in text.strip().lower().split(" ") if w not in DETERMINERS)


def multirc_target(answer: str, example: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Value and the question that the row belongs to."""
    group = (int(example["idx/paragraph"]), int(example["idx/question"]))
    return {"value": label_index(answer, labels), "group": group}


def record_target(example: dict[str, Any]) -> dict[str, Any]:
    """All answers, and the query that the row belongs to."""
    group = (int(example["idx/passage"]), int(example["idx/query"]))
    return {"answers": [text(a) for a in example["answers"]], "group": group}


def is_labelled(example: Mapping[str, Any]) -> bool:
    """Whether a preprocessed row has its answer; rows of most test splits do not.

    Hidden are a ``label`` of −1 (STS-B, WSC, WNLI as coreference), an empty list of ``answers``
    (ReCoRD), and elsewhere the target `UNKNOWN`.

    Args:
      example: as in `EvaluationSet.examples`.
    """
    if "label" in example:
        return float(example["label"]) >= 0
    if "answers" in example:
        return len(example["answers"]) > 0
    return text(example["targets_pretokenized"]) != UNKNOWN


def text(value: Any) -> str:
    """A TensorFlow string as Python's."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
