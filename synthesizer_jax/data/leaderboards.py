"""GLUE's and SuperGLUE's leaderboard files, from the predictions of test splits (T5's formats)."""

from __future__ import annotations

import json
import math
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

from synthesizer_jax.data.evaluation_sets import EvaluationSet, original_place
from synthesizer_jax.files import write_aside

GLUE_FILES: Mapping[str, str] = types.MappingProxyType(
    {
        "glue/cola": "CoLA",
        "glue/sst2": "SST-2",
        "glue/mrpc": "MRPC",
        "glue/stsb": "STS-B",
        "glue/qqp": "QQP",
        "glue/mnli_matched": "MNLI-m",
        "glue/mnli_mismatched": "MNLI-mm",
        "glue/qnli": "QNLI",
        "glue/rte": "RTE",
        "glue/wnli": "WNLI",
        "glue/ax": "AX",
    }
)
"""Names of ``.tsv`` files by data set."""

SUPER_GLUE_FILES: Mapping[str, str] = types.MappingProxyType(
    {
        "super_glue/boolq": "BoolQ",
        "super_glue/cb": "CB",
        "super_glue/copa": "COPA",
        "super_glue/multirc": "MultiRC",
        "super_glue/record": "ReCoRD",
        "super_glue/rte": "RTE",
        "super_glue/wic": "WiC",
        "super_glue/wsc.fixed": "WSC",
        "super_glue/axb": "AX-b",
        "super_glue/axg": "AX-g",
    }
)
"""Names of ``.jsonl`` files by data set."""

WORDS = frozenset(["MNLI-m", "MNLI-mm", "QNLI", "RTE", "AX", "BoolQ", "CB", "WiC", "AX-b", "AX-g"])
"""Files that hold label words; the others hold integers."""

LOWER = frozenset(["BoolQ", "WiC"])

Answers = Sequence[tuple[EvaluationSet, Sequence[str]]]


def write_submission(directory: pathlib.Path, answers: Answers) -> list[pathlib.Path]:
    """Writes the files of all tasks that a benchmark has, each put into place when whole.

    An answer that is none of a task's labels counts as its first; one that is no similarity as 0.

    Args:
      directory: made if need be.
      answers: whole splits, in the order of the original files, and the predictions for them.

    Returns:
      The files.

    Raises:
      ValueError: no benchmark has any of the tasks.
    """
    texts: dict[str, str] = {}
    for examples, predictions in answers:
        dataset = examples.task.dataset
        if dataset in GLUE_FILES:
            texts[f"{GLUE_FILES[dataset]}.tsv"] = glue_text(examples, predictions)
        elif dataset in SUPER_GLUE_FILES:
            texts[f"{SUPER_GLUE_FILES[dataset]}.jsonl"] = super_glue_text(examples, predictions)
    if not texts:
        names = ", ".join(examples.name for examples, _ in answers)
        raise ValueError(f"neither GLUE nor SuperGLUE has a leaderboard for {names}")
    return [write_aside(directory / name, text) for name, text in texts.items()]


def glue_text(examples: EvaluationSet, predictions: Sequence[str]) -> str:
    """Lines of index and prediction under a header."""
    lines = ["index\tprediction"]
    for i, prediction in enumerate(predictions):
        label = label_of(examples, i, prediction, GLUE_FILES[examples.task.dataset])
        lines.append(f"{original_place(examples.examples[i], i)}\t{label}")
    return "".join(line + "\n" for line in lines)


def super_glue_text(examples: EvaluationSet, predictions: Sequence[str]) -> str:
    """Lines of JSON: ``{"idx": ..., "label": ...}``; MultiRC has a line per passage, see `passages`."""
    file = SUPER_GLUE_FILES[examples.task.dataset]
    places = [original_place(row, i) for i, row in enumerate(examples.examples)]
    labels = [label_of(examples, i, p, file) for i, p in enumerate(predictions)]
    if file == "MultiRC":
        lines = passages(places, labels)
    elif file == "ReCoRD":
        first = {where["query"]: i for i, where in reversed(list(enumerate(places)))}
        lines = [{"idx": query, "label": labels[first[query]]} for query in sorted(first)]
    else:
        lines = [{"idx": i, "label": label} for i, label in zip(places, labels, strict=True)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def passages(places: Sequence[Mapping[str, int]], labels: Sequence[Any]) -> list[dict[str, Any]]:
    """MultiRC's answers by question by passage, in their order."""
    grouped: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for where, label in zip(places, labels, strict=True):
        answers = grouped.setdefault(where["paragraph"], {}).setdefault(where["question"], [])
        answers.append({"idx": where["answer"], "label": label})
    return [
        {
            "idx": passage,
            "passage": {"questions": [{"idx": q, "answers": a} for q, a in questions.items()]},
        }
        for passage, questions in grouped.items()
    ]


def label_of(examples: EvaluationSet, index: int, prediction: str, file: str) -> Any:
    """A prediction as a file has it: a word, an integer, a number or a text."""
    found, task = examples.found(index, prediction), examples.task
    if task.kind == "record":
        return found
    if task.kind == "similarity":
        value = float(found)
        return f"{min(max(value, 0.0), 5.0) if math.isfinite(value) else 0.0:.3f}"
    label = max(int(found), 0)
    if task.kind == "wsc":
        return str(bool(label))
    if file not in WORDS:
        return label
    word = task.labels[label]
    return word.lower() if file in LOWER else word
