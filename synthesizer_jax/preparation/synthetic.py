"""Generates the rows and the vocabulary of the synthetic tasks, without files or a network."""

from __future__ import annotations

import collections
import functools
import itertools
import pathlib
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping

from etils import epy

from synthesizer_jax.data.vocabularies import train_sentencepiece
from synthesizer_jax.preparation import synthetic_grammar as grammar
from synthesizer_jax.preparation.writing import write_dataset
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.synthetic import (
    DEFINITIONS,
    IMITATED,
    MIXTURE,
    MIXTURES,
    VOCAB_SIZE,
    vocabulary,
)
from synthesizer_jax.tasks.task import Task

with epy.lazy_imports():
    import tensorflow_datasets as tfds

VERSION = "1.0.0"
"""The version of the data sets, which must change if the grammars generate other rows."""

NOISE = 0.02
"""The share of labels that are wrong, both in training and in held-out rows."""
SIZES: Mapping[str, int] = {"train": 12000, "validation": 600}
"""The number of rows of each split of a task."""
HELD_OUT = 8
"""The share of held-out combinations of words is one in `HELD_OUT`."""

VOCABULARY_TEXTS = 2000
"""The number of training rows of each task that are used to train the vocabulary."""

NUM_LABELS = {**dict.fromkeys(DEFINITIONS, 2), "mnli": 3, "stsb": 0}
"""The number of labels of each configuration. All labels of a task are equally frequent.

The value is 0 if the label is a floating-point number.
"""


def examples(config: str, split: str, *, seed: int = 0) -> Iterator[grammar.Row]:
    """Yields all rows of one split. The same seed gives the same rows on every machine.

    No row is in both splits, because a combination of words occurs either in training rows or in
    held-out rows. No two rows of a split have the same text. All labels are equally frequent,
    except that the training rows of WSC have only the label 1, as in T5.

    Args:
      config: the configuration, which is also the name of the function in `synthetic_grammar`.
      split: ``train`` or ``validation``.
      seed: the seed.
    """
    draw_row = getattr(grammar, config)
    size, num_labels = SIZES[split], NUM_LABELS[config]
    only_positive = config == "wsc" and split == "train"
    # `limit` is the largest number of rows with the same label.
    limit = size if only_positive or not num_labels else -(-size // num_labels)
    draw = grammar.Draw(f"{seed} {config} {split}", noise=NOISE)
    seen: set[tuple[object, ...]] = set()
    counts: collections.Counter[object] = collections.Counter()
    while len(seen) < size:
        row, combination = draw_row(draw)
        label = row["label"]
        text = tuple(value for name, value in row.items() if name != "label")
        # Use a checksum, because Python's `hash` returns different values for a string in different
        # processes.
        is_held_out = zlib.crc32(" ".join(combination).encode()) % HELD_OUT == 0
        unwanted = (only_positive and not label) or (num_labels and counts[label] >= limit)
        if is_held_out != (split == "validation") or unwanted or text in seen:
            continue
        yield {**row, "idx": len(seen)}
        seen.add(text)
        counts[label] += 1


def train_vocabulary(data_dir: pathlib.Path) -> None:
    """Trains the vocabulary of the synthetic mixtures if its file does not exist."""
    path = vocabulary(data_dir).file
    if not path.is_file():
        train_sentencepiece(training_texts(), path, vocab_size=VOCAB_SIZE, model_type="bpe")


def training_texts() -> Iterator[str]:
    """Yields the training inputs and targets from which the vocabulary is trained."""
    for config, task in DEFINITIONS.items():
        for row in itertools.islice(examples(config, "train"), VOCABULARY_TEXTS):
            yield from as_text(task, row)


def as_text(task: Task, row: grammar.Row) -> tuple[str, str]:
    """Returns the input and the target into which the task's preprocessor converts a row."""
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
    """Returns whether the data sets of all given tasks exist in a directory."""
    data_sets = [data_dir / task.dataset for task in DEFINITIONS.values() if task.name in names]
    return all((path / VERSION / "dataset_info.json").is_file() for path in data_sets)


def write(data_dir: pathlib.Path, names: Collection[str] = MIXTURES[MIXTURE]) -> None:
    """Writes the data sets and the vocabulary of tasks, unless they already exist.

    Args:
      data_dir: a TFDS data directory.
      names: the names of the tasks.
    """
    train_vocabulary(data_dir)
    for config, task in DEFINITIONS.items():
        if task.name in names and not is_written(data_dir, [task.name]):
            # Remove a damaged data set, because TFDS would otherwise keep its files.
            shutil.rmtree(data_dir / task.dataset, ignore_errors=True)
            splits = {split: functools.partial(examples, config, split) for split in SIZES}
            imitated = task_registry.TASKS[IMITATED[config][0]].dataset
            features = tfds.builder(imitated, data_dir=data_dir).info.features
            write_dataset(task.dataset, VERSION, dict(features.items()), splits, data_dir)
