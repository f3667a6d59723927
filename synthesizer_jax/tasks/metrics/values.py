"""Types of metrics and of the values that they compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar

Value: TypeAlias = Any
"""What a metric compares; its type depends on the task: an index, a number, a string or a dictionary."""

Metric: TypeAlias = Callable[[Sequence[Value], Sequence[Value]], dict[str, float]]
"""A function from targets and predictions, as a task postprocesses them, to scores by name."""

_Target = TypeVar("_Target")
_Prediction = TypeVar("_Prediction")


class MultiRCTarget(TypedDict):
    """A target of MultiRC: the label of an answer, and the (paragraph, question) to which it belongs."""

    value: int
    group: tuple[int, int]


class ReCoRDTarget(TypedDict):
    """A target of ReCoRD: all answers of a query, and the (passage, query)."""

    answers: list[str]
    group: tuple[int, int]


class SpanTarget(TypedDict):
    """A target of span prediction: all answers of a question, and the context whose words count."""

    answers: list[str]
    context: str


def zip_equal(
    targets: Sequence[_Target], predictions: Sequence[_Prediction]
) -> list[tuple[_Target, _Prediction]]:
    """Returns the pairs of targets and predictions; there must be equally many, and one at least."""
    pairs = list(zip(targets, predictions, strict=True))
    if not pairs:
        raise ValueError("there are no targets to compare with; give a metric one example or more")
    return pairs
