"""Files of results and of predictions."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from synthesizer_jax.evaluation.tasks import ExampleSet, TaskResult
from synthesizer_jax.files import write_aside

EVALUATION_DIRECTORY = "evaluation"
"""Folder of a run's directory."""


def write_results(
    directory: pathlib.Path, step: int, results: Sequence[TaskResult], extra: dict[str, Any]
) -> pathlib.Path:
    """Writes ``evaluation/step_<step>.json``; numbers that are not finite become null."""
    tasks = [
        {
            **{name: getattr(r, name) for name in ("task", "split", "n", "labelled", "metrics")},
            "loss": None if r.loss is None else r.loss.per_token,
        }
        for r in results
    ]
    text = json.dumps(finite({"step": step, "tasks": tasks, **extra}), indent=1)
    path = directory / EVALUATION_DIRECTORY / f"step_{step}.json"
    return write_aside(path, text + "\n")


def write_predictions(
    folder: pathlib.Path, step: int, examples: ExampleSet, result: TaskResult
) -> pathlib.Path:
    """Writes a task's predictions, ``FOLDER/step_<step>.<task>.<split>.jsonl``.

    A line is one example: what `ExampleSet.record` says of it, ``score``, the log-probability of the
    prediction in nats, and where label words were ranked, ``scores``, the log-probability of each.
    """
    words = examples.label_words or ()

    def lines() -> Iterable[str]:
        for i, prediction in enumerate(result.predictions):
            record = {**examples.record(i, prediction), "score": float(result.scores[i])}
            if result.ranked is not None:
                record["scores"] = dict(zip(words, result.ranked[i].tolist(), strict=True))
            yield json.dumps(finite(record), ensure_ascii=False) + "\n"

    return write_aside(folder / f"step_{step}.{result.task}.{result.split}.jsonl", lines())


def finite(value: Any) -> Any:
    """JSON data in which numbers that JSON does not have, NaN and infinities, are None.

    NumPy's numbers become Python's.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value
