"""The synthetic co-training mixture: eight generated tasks in T5's formats, no file, no network.

Importing it makes its tasks and its mixture known to `task_registry`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import pathlib
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from etils import epy

from synthesizer_jax.data.vocabularies import SentencePiece, train_sentencepiece
from synthesizer_jax.preparation import synthetic_grammar as grammar
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.stored import write_dataset
from synthesizer_jax.tasks.task import Task

with epy.lazy_imports():
    import tensorflow_datasets as tfds

MIXTURE = "synthetic_co_training"
"""Also TFDS's name of the data sets; one configuration per task."""
QUICKSTART = "synthetic_quickstart"
VERSION = "1.0.0"
"""Counts the grammars: other rows need another version."""

NOISE = 0.02
"""Share of labels that are wrong, in training and held out alike."""
SIZES: Mapping[str, int] = {"train": 12000, "validation": 600}
"""Rows per task."""
HELD_OUT = 8
"""One combination of words in so many is held out."""

VOCAB_SIZE = 1024
VOCABULARY_TEXTS = 2000
"""Training rows per task that the vocabulary is trained on."""


class Source(NamedTuple):
    """Where a task's rows come from; tasks that compare sentences need more examples than others."""

    grammar: Callable[[grammar.Draw], grammar.Example]
    imitated: str  # T5's task that it is like
    rate: float
    labels: int = 2  # drawn equally often; 0 where the label is a number


SOURCES: Mapping[str, Source] = {
    "cola": Source(grammar.cola, "glue_cola_v002", 4.0),
    "sst2": Source(grammar.sst2, "glue_sst2_v002", 3.0),
    "stsb": Source(grammar.stsb, "glue_stsb_v002", 4.0, labels=0),
    "mnli": Source(grammar.mnli, "glue_mnli_v002", 6.0, labels=3),
    "boolq": Source(grammar.boolq, "super_glue_boolq_v102", 6.0),
    "copa": Source(grammar.copa, "super_glue_copa_v102", 8.0),
    "wic": Source(grammar.wic, "super_glue_wic_v102", 5.0),
    "wsc": Source(grammar.wsc, "super_glue_wsc_v102_simple_eval", 3.0),
}
"""By the name that follows ``synthetic_``."""

DEFINITIONS: tuple[Task, ...] = tuple(
    dataclasses.replace(
        task_registry.TASKS[source.imitated],
        name=f"synthetic_{config}",
        dataset=f"{MIXTURE}/{config}",
        splits=tuple(SIZES),
    )
    for config, source in SOURCES.items()
)

MIXTURES: Mapping[str, Mapping[str, float]] = {
    mixture: {f"synthetic_{name}": SOURCES[name].rate for name in names}
    for mixture, names in (
        (MIXTURE, tuple(SOURCES)),
        (QUICKSTART, ("cola", "boolq", "wic")),
    )
}
"""All tasks, and three that are learned soon."""

task_registry.add(DEFINITIONS, MIXTURES)


def examples(config: str, split: str, *, seed: int = 0) -> list[grammar.Row]:
    """Returns all rows of one split, the same for the same seed on every machine.

    Training and held-out rows differ in their combinations of words, so no row is in both. No two rows of a
    split have the same text, and all labels are equally frequent; in training WSC has only the label 1, as
    T5's.

    Args:
      config: a key of `SOURCES`.
      split: ``train`` or ``validation``.
      seed: of the grammar.
    """
    return list(_draw_rows(config, split, seed))


def _draw_rows(config: str, split: str, seed: int = 0) -> Iterator[grammar.Row]:
    """Yields what `examples` returns."""
    source, size = SOURCES[config], SIZES[split]
    only_positive = config == "wsc" and split == "train"
    limit = size if only_positive or not source.labels else -(-size // source.labels)
    draw = grammar.Draw(f"{seed} {config} {split}", noise=NOISE)
    seen: set[tuple[object, ...]] = set()
    counts: collections.Counter[object] = collections.Counter()
    while len(seen) < size:
        row, combination = source.grammar(draw)
        label = row["label"]
        text = tuple(value for name, value in row.items() if name != "label")
        is_held_out = zlib.crc32(" ".join(combination).encode()) % HELD_OUT == 0
        unwanted = (only_positive and not label) or (source.labels and counts[label] >= limit)
        if is_held_out != (split == "validation") or unwanted or text in seen:
            continue
        yield {**row, "idx": len(seen)}
        seen.add(text)
        counts[label] += 1


def vocabulary(data_dir: pathlib.Path) -> SentencePiece:
    """Returns the mixture's own SentencePiece model without sentinels; trains it where it is missing."""
    path = data_dir / MIXTURE / "vocabulary.model"
    if not path.is_file():
        train_sentencepiece(training_texts(), path, vocab_size=VOCAB_SIZE, model_type="bpe")
    return SentencePiece(str(path), extra_ids=0)


def training_texts() -> Iterator[str]:
    """Yields the training inputs and targets that the vocabulary is made of."""
    for config, task in zip(SOURCES, DEFINITIONS, strict=True):
        for row in itertools.islice(_draw_rows(config, "train"), VOCABULARY_TEXTS):
            yield from as_text(task, row)


def as_text(task: Task, row: grammar.Row) -> tuple[str, str]:
    """Returns inputs and targets of a row, the strings that the SeqIO task makes."""
    if task.label_words is None:
        words = row["text"].split(" ")
        words[row["span2_index"]] = f"*{row['span2_text']}*"
        return f"wsc: {' '.join(words)}", row["span1_text"]
    assert isinstance(task.preprocess, functools.partial)
    options = task.preprocess.keywords
    features = (f"{name}: {row[name]}" for name in options["features"])
    inputs = " ".join([options["prefix"], *features])
    if isinstance(row["label"], float):
        return inputs, f"{round(row['label'] * 5) / 5:.1f}"
    return inputs, task.label_words[row["label"]]


def is_written(data_dir: pathlib.Path, names: Collection[str] = MIXTURES[MIXTURE]) -> bool:
    """Returns whether a directory has the data sets of tasks."""
    data_sets = [data_dir / task.dataset for task in DEFINITIONS if task.name in names]
    return all((place / VERSION / "dataset_info.json").is_file() for place in data_sets)


def write(data_dir: pathlib.Path, names: Collection[str] = MIXTURES[MIXTURE]) -> None:
    """Writes the data sets of tasks, and the vocabulary of all; what is there is kept."""
    vocabulary(data_dir)
    for config, task in zip(SOURCES, DEFINITIONS, strict=True):
        if task.name in names and not is_written(data_dir, [task.name]):
            # TFDS would keep what is damaged
            shutil.rmtree(data_dir / task.dataset, ignore_errors=True)
            splits = {split: functools.partial(examples, config, split) for split in SIZES}
            imitated = task_registry.TASKS[SOURCES[config].imitated].dataset
            features = tfds.builder(imitated, data_dir=data_dir).info.features
            write_dataset(task.dataset, VERSION, dict(features.items()), splits, data_dir)
