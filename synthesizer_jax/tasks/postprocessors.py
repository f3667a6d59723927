"""Conversion of decoded answers and targets to the values that metrics compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Example: TypeAlias = Mapping[str, Any]
"""A preprocessed row: its strings ``inputs_pretokenized`` and ``targets_pretokenized``, and features."""

UNKNOWN = "<unk>"
"""The target of a row whose label is hidden."""

SENTINEL = "<extra_id_0>"
"""The prefix of the answers in T5's sentinel tasks."""

BOOLEAN = ("False", "True")

_DETERMINERS = (
    "a an few her his each every many much my our some that the their these this those which whose your"
)


def label_index(answer: str, labels: Sequence[str]) -> int:
    """Returns the index of the label that equals the answer, −1 if there is none."""
    return labels.index(answer) if answer in labels else -1


def parse_number(answer: str, *, otherwise: float = -1.0) -> float:
    """Returns the answer as a float, `otherwise` if it is not a number.

    Unlike in T5, ``nan`` and ``inf`` are not: a single one of them makes a correlation undefined.
    """
    try:
        value = float(answer)
    except ValueError:
        return otherwise
    return value if math.isfinite(value) else otherwise


def is_labeled(example: Example) -> bool:
    """Returns whether a preprocessed row has its answer; rows of most test splits do not.

    Hidden are a ``label`` of −1 (STS-B, WSC, WNLI as coreference), an empty list of ``answers``
    (ReCoRD), and for all other tasks the target `UNKNOWN`.
    """
    if "label" in example:
        return bool(example["label"] != -1)
    if "answers" in example:
        return len(example["answers"]) > 0
    return to_text(example["targets_pretokenized"]) != UNKNOWN


def to_text(value: object) -> str:
    """Returns a TensorFlow string as a Python string."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


# Functions of a task, with the arguments of SeqIO's. --------------------------------------------------


def number(answer: str, *, example: Example | None, is_target: bool) -> float:
    """Returns the number, −1 for anything else (STS-B)."""
    return parse_number(answer)


def referent(answer: str, *, example: Example, is_target: bool) -> int:
    """Returns a row's label, and of a prediction 1 if it names the candidate, else 0; −1 if it is empty.

    This is T5's rule for WSC: determiners are removed and words lower-cased; then one set of words must
    contain the other, and an apostrophe in only one of the two means another referent. Consequently nothing
    matches a referent that consists of determiners only.
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
    return " ".join(w for w in text.strip().lower().split(" ") if w not in _DETERMINERS.split())


def multirc(answer: str, *, example: Example, is_target: bool) -> int | dict[str, Any]:
    """Returns the index of the label, and of a target the (paragraph, question) that it belongs to."""
    label = label_index(answer, BOOLEAN)
    if not is_target:
        return label
    return {"value": label, "group": (int(example["idx/paragraph"]), int(example["idx/question"]))}


def record(answer: str, *, example: Example, is_target: bool) -> str | dict[str, Any]:
    """Returns the text, and of a target all answers and the (passage, query) that it belongs to."""
    if not is_target:
        return answer
    group = (int(example["idx/passage"]), int(example["idx/query"]))
    return {"answers": all_answers(answer, example=example, is_target=True), "group": group}


def all_answers(answer: str, *, example: Example, is_target: bool) -> Any:
    """Returns the text, and of a target all answers of the row (SQuAD)."""
    return [to_text(text) for text in example["answers"]] if is_target else answer
