"""Converts decoded answers and targets to the values that metrics compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Example: TypeAlias = Mapping[str, Any]
"""A preprocessed row, which is a mapping from names to features.

The texts of a row are its features ``inputs_pretokenized`` and ``targets_pretokenized``.
"""

UNKNOWN = "<unk>"
"""The target of a row whose label is hidden."""

SENTINEL = "<extra_id_0>"
"""The prefix of the answers in T5's sentinel format."""

BOOLEAN = ("False", "True")

_DETERMINERS = (
    "a an few her his each every many much my our some that the their these this those which whose "
    "your"
)
"""The words that `referent` ignores."""


def label_index(answer: str, labels: Sequence[str]) -> int:
    """Returns the index of the label that equals the answer, or −1 if no label does."""
    return labels.index(answer) if answer in labels else -1


def parse_number(answer: str, *, otherwise: float = -1.0) -> float:
    """Returns the answer as a float, or `otherwise` if it is not a number.

    Unlike in T5, ``nan`` and ``inf`` do not count as numbers, because a single ``nan`` or ``inf``
    would make a correlation undefined.
    """
    try:
        value = float(answer)
    except ValueError:
        return otherwise
    return value if math.isfinite(value) else otherwise


def is_labeled(example: Example) -> bool:
    """Returns whether the answer to a preprocessed row is known. Most test splits hide the answers.

    For STS-B, WSC, and WNLI as coreference, the answer is hidden if the ``label`` is −1. For
    ReCoRD, the answer is hidden if the list of ``answers`` is empty. For all other tasks, the
    answer is hidden if the target is `UNKNOWN`.
    """
    if "label" in example:
        return bool(example["label"] != -1)
    if "answers" in example:
        return len(example["answers"]) > 0
    return to_text(example["targets_pretokenized"]) != UNKNOWN


def to_text(value: object) -> str:
    """Returns a TensorFlow string as a Python string."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


# Functions for `Task.postprocess_fn`, with the arguments of SeqIO's postprocessors. ---------------


def number(answer: str, *, example: Example | None, is_target: bool) -> float:
    """Returns the answer as a number, or −1 if it is not a number (STS-B)."""
    return parse_number(answer)


def referent(answer: str, *, example: Example, is_target: bool) -> int:
    """Returns whether an answer names the same referent as the candidate (WSC and WNLI).

    For a target, the result is the label of the row. For a prediction, the result is 1 if the
    prediction names the candidate and 0 if it names something else. For an empty prediction, the
    result is −1.

    The comparison follows T5's rule for WSC. Determiners are removed and words are converted to
    lower case. The referents match if all words of one text occur in the other text. However, if
    only one of the two texts contains an apostrophe, the referents are different. An answer that
    consists only of determiners is empty and matches nothing.
    """
    if is_target:
        return int(example["label"])
    candidate = to_text(example["targets_pretokenized"])
    predicted, expected = _without_determiners(answer), _without_determiners(candidate)
    if not predicted:
        return -1
    if ("'" in predicted) != ("'" in expected):
        return 0
    predicted_words, expected_words = set(predicted.split(" ")), set(expected.split(" "))
    return int(predicted_words <= expected_words or expected_words <= predicted_words)


def _without_determiners(text: str) -> str:
    """Returns the text in lower case, without determiners."""
    return " ".join(w for w in text.strip().lower().split(" ") if w not in _DETERMINERS.split())


def multirc(answer: str, *, example: Example, is_target: bool) -> int | dict[str, Any]:
    """Returns the index of the label that equals the answer, or −1 (MultiRC).

    For a target, the result is a dictionary with the index, the paragraph and the question of the
    row.
    """
    label = label_index(answer, BOOLEAN)
    if not is_target:
        return label
    return {"value": label, "group": (int(example["idx/paragraph"]), int(example["idx/question"]))}


def record(answer: str, *, example: Example, is_target: bool) -> str | dict[str, Any]:
    """Returns the answer (ReCoRD).

    For a target, the result is a dictionary with all correct answers, the passage and the query of
    the row.
    """
    if not is_target:
        return answer
    group = (int(example["idx/passage"]), int(example["idx/query"]))
    return {"answers": all_answers(answer, example=example, is_target=True), "group": group}


def all_answers(answer: str, *, example: Example, is_target: bool) -> Any:
    """Returns the answer. For a target, it returns all correct answers of the row (SQuAD)."""
    return [to_text(text) for text in example["answers"]] if is_target else answer
