"""The eight tasks in T5's formats, and their mixture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypedDict, Unpack

from synthesizer_jax.tasks.definitions import BOOLEAN, MNLI, PAIR, SENTENCES, Task
from synthesizer_jax.tasks.formats import WSC, Classification, Similarity, TextFormat
from synthesizer_jax.tasks.metrics import Metric, matthews, pearson, spearman
from synthesizer_jax.tasks.synthetic.draw import Row

MIXTURE = "synthetic_co_training"
DATASET = MIXTURE
"""TFDS's name of the data sets; one configuration per task."""


class _Options(TypedDict, total=False):
    metrics: tuple[Metric, ...]


def _task(config: str, text_format: TextFormat, **options: Unpack[_Options]) -> Task:
    name, dataset = f"synthetic_{config}", f"{DATASET}/{config}"
    return Task(name, dataset, text_format, splits=("train", "validation"), **options)


def _classification(
    config: str, features: tuple[str, ...], labels: tuple[str, ...], **options: Unpack[_Options]
) -> Task:
    return _task(config, Classification(config, features, labels), **options)


DEFINITIONS: tuple[Task, ...] = (
    _classification("cola", ("sentence",), ("unacceptable", "acceptable"), metrics=(matthews,)),
    _classification("sst2", ("sentence",), ("negative", "positive")),
    _task("stsb", Similarity("stsb", SENTENCES), metrics=(pearson, spearman)),
    _classification("mnli", PAIR, MNLI),
    _classification("boolq", ("passage", "question"), BOOLEAN),
    _classification("copa", ("choice1", "choice2", "premise", "question"), ("choice1", "choice2")),
    _classification("wic", ("sentence1", "sentence2", "word"), BOOLEAN),
    _task("wsc", WSC()),
)

RATES: Mapping[str, float] = MappingProxyType(
    {
        "synthetic_cola": 4.0,
        "synthetic_sst2": 3.0,
        "synthetic_stsb": 4.0,
        "synthetic_mnli": 6.0,
        "synthetic_boolq": 6.0,
        "synthetic_copa": 8.0,
        "synthetic_wic": 5.0,
        "synthetic_wsc": 3.0,
    }
)
"""The tasks that compare sentences need more examples than those that read one."""


def config_name(task: Task) -> str:
    """``cola`` of ``synthetic_cola``."""
    return task.name.removeprefix("synthetic_")


def as_text(task: Task, row: Row) -> tuple[str, str]:
    """Returns inputs and targets of a row, the strings that the SeqIO task makes."""
    text_format = task.format
    if not isinstance(text_format, Classification | Similarity):
        words = row["text"].split(" ")
        words[row["span2_index"]] = f"*{row['span2_text']}*"
        return f"wsc: {' '.join(words)}", row["span1_text"]
    features = (f"{name}: {row[name]}" for name in text_format.features)
    inputs = " ".join([text_format.prefix, *features])
    if isinstance(text_format, Similarity):
        return inputs, f"{round(row['label'] * 5) / 5:.1f}"
    return inputs, text_format.labels[row["label"]]
