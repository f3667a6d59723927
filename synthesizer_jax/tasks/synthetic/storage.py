"""The generated rows as TFDS data sets on disk, and the vocabulary beside them."""

from __future__ import annotations

import functools
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from synthesizer_jax.data.vocabularies import SentencePiece, train_sentencepiece
from synthesizer_jax.tasks.formats import Similarity
from synthesizer_jax.tasks.storage import write_dataset
from synthesizer_jax.tasks.synthetic.definitions import DATASET, DEFINITIONS, as_text, config_name
from synthesizer_jax.tasks.synthetic.rows import SIZES, examples
from synthesizer_jax.tasks.task import Task

if TYPE_CHECKING:
    from synthesizer_jax.tasks.storage import FeatureType

VERSION = "1.0.0"
"""Counts the grammars: other rows need another version."""

VOCAB_SIZE = 1024
VOCABULARY_TEXTS = 2000
"""Training rows per task that the vocabulary is trained on."""


def vocabulary(data_dir: pathlib.Path) -> SentencePiece:
    """Returns the mixture's own SentencePiece model without sentinels; trains it where it is missing."""
    path = data_dir / DATASET / "vocabulary.model"
    if not path.is_file():
        train_sentencepiece(_training_texts(), path, vocab_size=VOCAB_SIZE, model_type="bpe")
    return SentencePiece(str(path), extra_ids=0)


def is_written(data_dir: pathlib.Path, tasks: Sequence[Task] = DEFINITIONS) -> bool:
    """Returns whether a directory has the data sets of tasks."""
    return all((data_dir / t.dataset / VERSION / "dataset_info.json").is_file() for t in tasks)


def write(data_dir: pathlib.Path) -> None:
    """Writes the eight data sets and the vocabulary; what is there is kept."""
    vocabulary(data_dir)
    for task in DEFINITIONS:
        if not is_written(data_dir, (task,)):
            shutil.rmtree(
                data_dir / task.dataset, ignore_errors=True
            )  # TFDS would keep what is damaged
            _write_config(config_name(task), data_dir)


def _training_texts() -> Iterator[str]:
    """Training inputs and targets that the vocabulary is made of."""
    for task in DEFINITIONS:
        for row in examples(config_name(task), "train")[:VOCABULARY_TEXTS]:
            yield from as_text(task, row)


def _write_config(config: str, data_dir: pathlib.Path) -> pathlib.Path:
    """Writes one data set with TFDS; returns its directory."""
    return write_dataset(
        DATASET,
        config,
        version=VERSION,
        description="Generated sentences in a T5 task format.",
        features=_features_of(config),
        splits={split: functools.partial(examples, config, split) for split in SIZES},
        data_dir=data_dir,
    )


def _features_of(config: str) -> dict[str, FeatureType]:
    """The feature types of a task's rows, those of the GLUE or SuperGLUE configuration."""
    import numpy as np
    import tensorflow_datasets as tfds

    task = next(t for t in DEFINITIONS if config_name(t) == config)
    row = examples(config, "validation")[0]
    kinds: dict[str, FeatureType] = {}
    for name, value in row.items():
        if name == "label" and isinstance(task.format, Similarity):
            kinds[name] = np.float32
        elif name == "label":
            kinds[name] = tfds.features.ClassLabel(
                names=list(task.format.labels or ("False", "True"))
            )
        else:
            kinds[name] = tfds.features.Text() if isinstance(value, str) else np.int32
    return kinds
