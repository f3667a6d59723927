"""Computes averages of GLUE's and SuperGLUE's metrics, and writes files for the leaderboards.

The files for the leaderboards are made from predictions for the test splits. In an average, every
group of tasks has the same weight.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence

from synthesizer_jax.base.files import write_atomic
from synthesizer_jax.base.registry import JSON
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet, original_index
from synthesizer_jax.tasks.metrics import Value
from synthesizer_jax.tasks.task import Task

Results = Mapping[str, Mapping[str, float]]
"""Maps the name of each task to the metrics of the task."""

BENCHMARKS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "GLUE": (
        *((f"glue_{name}_v002",) for name in ("cola", "sst2", "mrpc", "stsb", "qqp")),
        ("glue_mnli_matched_v002", "glue_mnli_mismatched_v002"),
        *((f"glue_{name}_v002",) for name in ("qnli", "rte")),
    ),
    "SuperGLUE": (
        *(
            (f"super_glue_{x}_v102",)
            for x in ("boolq", "cb", "copa", "multirc", "record", "rte", "wic")
        ),
        ("super_glue_wsc_v102_simple_eval",),
    ),
}
"""Maps each benchmark to its groups of tasks. GLUE's average does not include WNLI and AX."""

_GLUE = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "QNLI", "RTE", "WNLI", "AX")
_SUPER_GLUE = ("BoolQ", "CB", "COPA", "MultiRC", "ReCoRD", "RTE", "WiC", "AX-b", "AX-g")
FILES = {
    **{f"glue/{name.lower().replace('-', '')}": f"glue/{name}.tsv" for name in _GLUE},
    "glue/mnli_matched": "glue/MNLI-m.tsv",
    "glue/mnli_mismatched": "glue/MNLI-mm.tsv",
    **{
        f"super_glue/{name.lower().replace('-', '')}": f"super_glue/{name}.jsonl"
        for name in _SUPER_GLUE
    },
    "super_glue/wsc.fixed": "super_glue/WSC.jsonl",
}
"""Maps each data set to the name of its leaderboard file."""

WORDS = frozenset(["MNLI-m", "MNLI-mm", "QNLI", "RTE", "AX", "BoolQ", "CB", "WiC", "AX-b", "AX-g"])
"""The leaderboard files that contain label words instead of integers, numbers or text."""

LOWER = frozenset(["BoolQ", "WiC"])
"""The leaderboard files whose label words are in lower case."""


def averages(results: Results) -> dict[str, float]:
    """Returns the average of each benchmark for which every task has results."""
    by_benchmark = {name: _group_means(results, name) for name in BENCHMARKS}
    return {name: _mean(means) for name, means in by_benchmark.items() if means}


def best_average(by_step: Mapping[int, Results], benchmark: str) -> float | None:
    """Returns the average over all groups of the value that each group has at its best step.

    Returns `None` if no step has results of all tasks.

    Args:
      by_step: the results of each evaluated step.
      benchmark: a key of `BENCHMARKS`.
    """
    by_group = [_group_means(results, benchmark) for _, results in sorted(by_step.items())]
    groups = zip(*filter(None, by_group), strict=True)
    best = [means[_best(dict(enumerate(means)))] for means in groups]
    return _mean(best) if best else None


def best_single_step(by_step: Mapping[int, Results], benchmark: str) -> tuple[int, float] | None:
    """Returns the step with the highest average, and the average at this step.

    Returns `None` if no step has results of all tasks. If several steps have the highest average,
    the function returns the first of these steps.

    Args:
      by_step: the results of each evaluated step.
      benchmark: a key of `BENCHMARKS`.
    """
    means = {step: averages(results).get(benchmark) for step, results in sorted(by_step.items())}
    whole = {step: mean for step, mean in means.items() if mean is not None}
    if not whole:
        return None
    step = _best(whole)
    return step, whole[step]


def best_by_task(by_step: Mapping[int, Results]) -> dict[str, int]:
    """Returns, for every task, the step with the highest mean of its metrics.

    If several steps have the highest mean, the function returns the first of these steps.
    """
    means: dict[str, dict[int, float]] = {}
    for step, results in sorted(by_step.items()):
        for task, metrics in results.items():
            if metrics:
                means.setdefault(task, {})[step] = _mean(list(metrics.values()))
    return {task: _best(values) for task, values in means.items()}


def _group_means(results: Results, benchmark: str) -> list[float]:
    """Returns the mean of every group.

    The value of a task is the mean of its metrics, and the value of a group is the mean of its
    tasks. The list is empty if a task has no results.
    """
    groups = BENCHMARKS[benchmark]
    if not all(results.get(task) for group in groups for task in group):
        return []
    return [_mean([_mean(list(results[task].values())) for task in group]) for group in groups]


def _best(values: Mapping[int, float]) -> int:
    """Returns the first of the steps with the highest value.

    NaN counts as less than any number.
    """
    return max(values, key=lambda step: (not math.isnan(values[step]), values[step]))


def _mean(values: Sequence[float]) -> float:
    """Returns the mean of some values."""
    return sum(values) / len(values)


def write_submission(
    directory: pathlib.Path, answers: Sequence[tuple[EvaluationSet, Sequence[str]]]
) -> dict[pathlib.Path, int]:
    """Writes ``DIRECTORY/glue/*.tsv`` and ``DIRECTORY/super_glue/*.jsonl``, each file atomically.

    A leaderboard accepts only valid labels. If a prediction is not one of the labels, the first
    label is written. If a prediction should be a similarity score but is not a number, 0 is
    written. Similarity scores are clipped to the range from 0 to 5.

    Args:
      directory: the directory, which is created if it does not exist.
      answers: pairs of an evaluation set of a whole split, and the predictions for this set. Tasks
        that belong to neither benchmark are left out.

    Returns:
      The number of invalid predictions in each file, by the path of the file.

    Raises:
      ValueError: if two tasks have the same leaderboard file. If the error is raised, no file is
        written.
    """
    texts: dict[pathlib.Path, str] = {}
    invalid: dict[pathlib.Path, int] = {}
    for examples, predictions in answers:
        if examples.task.dataset not in FILES:
            continue
        path = directory / FILES[examples.task.dataset]
        if path in texts:
            raise ValueError(
                f"The task {examples.task.name} has the same leaderboard file as another task, "
                f"{path}. Predict the tasks one by one with --task."
            )
        values = [examples.predicted_value(i, text) for i, text in enumerate(predictions)]
        indices = [original_index(row, i) for i, row in enumerate(examples.examples)]
        labels = [_format_label(examples.task, value, file=path.stem) for value in values]
        if path.suffix == ".tsv":
            pairs = [("index", "prediction"), *zip(indices, labels, strict=True)]
            texts[path] = "".join(f"{index}\t{label}\n" for index, label in pairs)
        else:
            lines = _json_lines(path.stem, indices, labels)
            texts[path] = "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines)
        invalid[path] = sum(map(_is_invalid, values))
    # Write the files only here, so that an error above does not leave an incomplete submission.
    for path, text in texts.items():
        write_atomic(path, text)
    return invalid


def _is_invalid(value: Value) -> bool:
    """Returns whether a value stands for an invalid prediction.

    The value −1 stands for a prediction that is not one of the labels. A value that is NaN or
    negative stands for a prediction that is not a similarity score.
    """
    return isinstance(value, int | float) and not value >= 0


def _format_label(task: Task, value: Value, *, file: str) -> int | str:
    """Returns a value in the format of a file, such as a label word or an integer."""
    if isinstance(value, str):  # only the answers to ReCoRD are strings
        return value
    if file == "STS-B":
        return f"{min(max(value, 0.0), 5.0):.3f}"
    if file == "WSC":
        return str(value > 0)
    label = max(int(value), 0)
    if file not in WORDS:
        return label
    word = (task.label_words or ())[label]
    return word.lower() if file in LOWER else word


def _json_lines(
    file: str, indices: Sequence[int | dict[str, int]], labels: Sequence[int | str]
) -> list[dict[str, JSON]]:
    """Returns the lines of a SuperGLUE file, ``{"idx": ..., "label": ...}``.

    In the file of MultiRC, each line is a passage with its questions, and each question has
    answers. In the file of ReCoRD, each line is a query, and the answer is the prediction for the
    query's first example.
    """
    nested = [index for index in indices if isinstance(index, dict)]
    if file == "ReCoRD":
        first = {index["query"]: i for i, index in reversed(list(enumerate(nested)))}
        return [{"idx": query, "label": labels[first[query]]} for query in sorted(first)]
    if file != "MultiRC":
        return [{"idx": i, "label": label} for i, label in zip(indices, labels, strict=True)]
    passages: dict[int, dict[int, list[dict[str, JSON]]]] = {}
    for index, label in zip(nested, labels, strict=True):
        answers = passages.setdefault(index["paragraph"], {}).setdefault(index["question"], [])
        answers.append({"idx": index["answer"], "label": label})
    return [
        {
            "idx": passage,
            "passage": {"questions": [{"idx": q, "answers": a} for q, a in questions.items()]},
        }
        for passage, questions in passages.items()
    ]
