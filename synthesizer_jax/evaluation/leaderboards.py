"""Files for the leaderboards of GLUE and SuperGLUE, from predictions for the test splits."""

from __future__ import annotations

import json
import pathlib
import types
from collections.abc import Mapping, Sequence

from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet, original_index
from synthesizer_jax.files import write_atomic
from synthesizer_jax.registry import JSON
from synthesizer_jax.tasks.metrics import Value

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
"""Stems of the ``.tsv`` files by data set."""

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
"""Stems of the ``.jsonl`` files by data set."""

WORDS = frozenset(["MNLI-m", "MNLI-mm", "QNLI", "RTE", "AX", "BoolQ", "CB", "WiC", "AX-b", "AX-g"])
"""Files that contain label words; the others contain integers, numbers or text."""

LOWER = frozenset(["BoolQ", "WiC"])


def write_submission(
    directory: pathlib.Path, answers: Sequence[tuple[EvaluationSet, Sequence[str]]]
) -> dict[pathlib.Path, int]:
    """Writes ``DIRECTORY/glue/*.tsv`` and ``DIRECTORY/super_glue/*.jsonl``, each atomically.

    A prediction that is none of the labels is replaced by the first label, and one that is no similarity
    score by 0; similarity scores are clipped to 0 to 5.

    Args:
      directory: created if it does not exist.
      answers: evaluation sets of whole splits, and the predictions for them. Tasks that belong to neither
        benchmark are left out.

    Returns:
      The number of invalid predictions by the path of the file.

    Raises:
      ValueError: two tasks have the same file; then nothing was written.
    """
    texts: dict[pathlib.Path, str] = {}
    invalid: dict[pathlib.Path, int] = {}
    for examples, predictions in answers:
        dataset = examples.task.dataset
        if dataset in GLUE_FILES:
            path = directory / "glue" / f"{GLUE_FILES[dataset]}.tsv"
            text = _glue_text(examples, predictions)
        elif dataset in SUPER_GLUE_FILES:
            path = directory / "super_glue" / f"{SUPER_GLUE_FILES[dataset]}.jsonl"
            text = _super_glue_text(examples, predictions)
        else:
            continue
        if path in texts:
            raise ValueError(
                f"{examples.name} has the same leaderboard file as another task, {path}; predict them one "
                "by one, with --task"
            )
        values = (examples.predicted_value(i, p) for i, p in enumerate(predictions))
        texts[path], invalid[path] = text, sum(map(_is_invalid, values))
    for path, text in texts.items():
        write_atomic(path, text)
    return invalid


def _is_invalid(value: Value) -> bool:
    """Returns whether a value is the −1 of none of the labels, or no similarity score."""
    return isinstance(value, int | float) and not value >= 0


def _glue_text(examples: EvaluationSet, predictions: Sequence[str]) -> str:
    """Returns lines of index and prediction, with a header line."""
    lines = ["index\tprediction"]
    for i, prediction in enumerate(predictions):
        label = _format_label(examples, i, prediction, file=GLUE_FILES[examples.task.dataset])
        lines.append(f"{original_index(examples.examples[i], i)}\t{label}")
    return "".join(line + "\n" for line in lines)


def _super_glue_text(examples: EvaluationSet, predictions: Sequence[str]) -> str:
    """Returns lines of JSON, ``{"idx": ..., "label": ...}``, and for MultiRC one line per passage."""
    file = SUPER_GLUE_FILES[examples.task.dataset]
    indices = [original_index(row, i) for i, row in enumerate(examples.examples)]
    labels = [_format_label(examples, i, p, file=file) for i, p in enumerate(predictions)]
    nested = [index for index in indices if isinstance(index, dict)]
    if file == "MultiRC":
        lines = _group_by_passage(nested, labels)
    elif file == "ReCoRD":
        first = {index["query"]: i for i, index in reversed(list(enumerate(nested)))}
        lines = [{"idx": query, "label": labels[first[query]]} for query in sorted(first)]
    else:
        lines = [{"idx": i, "label": label} for i, label in zip(indices, labels, strict=True)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _group_by_passage(
    indices: Sequence[Mapping[str, int]], labels: Sequence[int | str]
) -> list[dict[str, JSON]]:
    """Returns the lines of MultiRC: the answers by question by passage, in their order."""
    grouped: dict[int, dict[int, list[dict[str, JSON]]]] = {}
    for index, label in zip(indices, labels, strict=True):
        answers = grouped.setdefault(index["paragraph"], {}).setdefault(index["question"], [])
        answers.append({"idx": index["answer"], "label": label})
    return [
        {
            "idx": passage,
            "passage": {"questions": [{"idx": q, "answers": a} for q, a in questions.items()]},
        }
        for passage, questions in grouped.items()
    ]


def _format_label(examples: EvaluationSet, index: int, prediction: str, *, file: str) -> int | str:
    """Returns a prediction in the format of a file: a label word, an integer, a number or a text."""
    value, task = examples.predicted_value(index, prediction), examples.task
    if isinstance(value, str):  # ReCoRD's
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
