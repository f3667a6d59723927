"""Files of results and of predictions."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from synthesizer_jax.base.files import refuse_links, write_atomic
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet
from synthesizer_jax.evaluation.scoring import TaskResult

RESULTS_FILE = "results.json"
"""File of an evaluation's folder."""

PART = "part"
"""Folder, beside a whole evaluation's files, of the last evaluation of some tasks or examples."""


def evaluation_folder(
    directory: pathlib.Path, step: int, split: str | None = None, *, part: bool = False
) -> pathlib.Path:
    """Returns the folder of a run's directory for the files of an evaluation.

    Args:
      directory: the run's.
      step: the evaluated step.
      split: None for the split that the recipe evaluates: ``evaluation/STEP``; the name of another one:
        ``evaluation/STEP/SPLIT``.
      part: whether only some tasks or examples are evaluated, whose files must not replace those of all:
        ``…/part``.

    Raises:
      OSError: a link is on the way, which might lead out of the run's directory.
    """
    for name in filter(None, ("evaluation", str(step), split, PART if part else None)):
        refuse_links(directory)
        directory = directory / name
    return directory


def write_results(
    folder: pathlib.Path, step: int, results: Sequence[TaskResult], *, overall: Mapping[str, float]
) -> pathlib.Path:
    """Writes ``FOLDER/results.json``; numbers that are not finite become null."""
    tasks = [
        {
            "task": result.task,
            "split": result.split,
            "n": result.n,
            "labeled": result.labeled,
            "metrics": result.metrics | result.text_metrics,
            "loss": None if result.loss is None else result.loss.per_token,
        }
        for result in results
    ]
    text = json.dumps(_replace_nonfinite({"step": step, "tasks": tasks, **overall}), indent=1)
    return write_atomic(folder / RESULTS_FILE, text + "\n")


def write_predictions(folder: pathlib.Path, result: TaskResult, *, examples: EvaluationSet) -> pathlib.Path:
    """Writes a task's predictions, ``FOLDER/TASK.jsonl``.

    A line is one example: its `EvaluationSet.record`, ``score``, the log-probability of the prediction in
    nats, and where label words were ranked, ``scores``, the log-probability of each. A text has no
    prediction, and ``score`` is its own log-probability.
    """

    def lines() -> Iterable[str]:
        for i, prediction in enumerate(result.predictions or (None,) * result.n):
            record = {**examples.record(i, prediction), "score": float(result.scores[i])}
            if result.ranked is not None:
                record["scores"] = dict(zip(result.words, result.ranked[i].tolist(), strict=True))
            yield json.dumps(_replace_nonfinite(record), ensure_ascii=False) + "\n"

    return write_atomic(folder / f"{result.task}.jsonl", lines())


def _replace_nonfinite(value: object) -> object:
    """Returns JSON data with None in the place of NaN and infinities, and NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _replace_nonfinite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(part) for part in value]
    return value
