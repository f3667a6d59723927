"""The eight tasks in T5's formats, and their mixture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from synthesizer_jax.data.definitions import BOOLEAN, MNLI, PAIR, SENTENCES, TaskDefinition
from synthesizer_jax.data.metrics import matthews, pearson, spearman

MIXTURE = "embedded_co_training"
DATASET = MIXTURE
"""TFDS's name of the data sets; one configuration per task."""


def _task(config: str, features: tuple[str, ...], labels: tuple[str, ...], **rest: Any) -> Any:
    options = {"prefix": config, "features": features, "labels": labels, **rest}
    splits = ("train", "validation")
    return TaskDefinition(f"embedded_{config}", f"{DATASET}/{config}", splits=splits, **options)


DEFINITIONS: tuple[TaskDefinition, ...] = (
    _task("cola", ("sentence",), ("unacceptable", "acceptable"), metrics=(matthews,)),
    _task("sst2", ("sentence",), ("negative", "positive")),
    _task("stsb", SENTENCES, (), kind="similarity", metrics=(pearson, spearman)),
    _task("mnli", PAIR, MNLI),
    _task("boolq", ("passage", "question"), BOOLEAN),
    _task("copa", ("choice1", "choice2", "premise", "question"), ("choice1", "choice2")),
    _task("wic", ("sentence1", "sentence2", "word"), BOOLEAN),
    _task("wsc", (), (), kind="wsc"),
)

RATES: Mapping[str, float] = MappingProxyType(
    {
        "embedded_cola": 4.0,
        "embedded_sst2": 3.0,
        "embedded_stsb": 4.0,
        "embedded_mnli": 6.0,
        "embedded_boolq": 6.0,
        "embedded_copa": 8.0,
        "embedded_wic": 5.0,
        "embedded_wsc": 3.0,
    }
)
"""The tasks that compare sentences need more examples than those that read one."""


def config_of(task: TaskDefinition) -> str:
    """``cola`` of ``embedded_cola``."""
    return task.name.removeprefix("embedded_")


def as_text(task: TaskDefinition, row: Mapping[str, Any]) -> tuple[str, str]:
    """Inputs and targets of a row, the strings that the SeqIO task makes."""
    if task.kind == "wsc":
        words = row["text"].split(" ")
        words[row["span2_index"]] = f"*{row['span2_text']}*"
        return f"wsc: {' '.join(words)}", row["span1_text"]
    parts = [task.prefix, *(f"{name}: {row[name]}" for name in task.features)]
    if task.kind == "similarity":
        return " ".join(parts), f"{round(row['label'] * 5) / 5:.1f}"
    return " ".join(parts), task.labels[row["label"]]
