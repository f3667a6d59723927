"""The generated rows as TFDS data sets on disk, and the vocabulary beside them."""

from __future__ import annotations

import functools
import hashlib
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from synthesizer_jax.data.vocabularies import SentencePiece, train_sentencepiece
from synthesizer_jax.files import write_atomic
from synthesizer_jax.tasks.formats import Similarity
from synthesizer_jax.tasks.storage import write_dataset
from synthesizer_jax.tasks.synthetic.definitions import DATASET, DEFINITIONS, as_text, config_name
from synthesizer_jax.tasks.synthetic.rows import SIZES, examples
from synthesizer_jax.tasks.task import Task

if TYPE_CHECKING:
    from synthesizer_jax.tasks.storage import FeatureType

VERSION = "1.0.0"
GRAMMAR_FILE = "grammar.txt"
"""Holds `grammar_digest()` of the sets on disk; sets of another grammar are written anew."""

VOCAB_SIZE = 1024
VOCABULARY_TEXTS = 2000
"""Training rows per task that the vocabulary is trained on."""


def vocabulary(data_dir: pathlib.Path) -> SentencePiece:
    """Returns the mixture's own SentencePiece model without sentinels; trains it where it is missing."""
    path = data_dir / DATASET / "vocabulary.model"
    if not (is_written(data_dir, ()) and path.is_file()):
        train_sentencepiece(_training_texts(), path, vocab_size=VOCAB_SIZE, model_type="bpe")
        write_atomic(data_dir / DATASET / GRAMMAR_FILE, _grammar_digest())
    return SentencePiece(str(path), extra_ids=0)


def is_written(data_dir: pathlib.Path, tasks: Sequence[Task] = DEFINITIONS) -> bool:
    """Returns whether a directory has the data sets of tasks, written by this grammar."""
    mark = data_dir / DATASET / GRAMMAR_FILE
    written = all((data_dir / t.dataset / VERSION / "dataset_info.json").is_file() for t in tasks)
    return written and mark.is_file() and mark.read_text(encoding="utf-8") == _grammar_digest()


def write(data_dir: pathlib.Path) -> None:
    """Writes the eight data sets; what this grammar has written is kept."""
    if not is_written(data_dir, ()):
        shutil.rmtree(data_dir / DATASET, ignore_errors=True)
    vocabulary(data_dir)
    for task in DEFINITIONS:
        if not is_written(data_dir, (task,)):
            shutil.rmtree(
                data_dir / task.dataset, ignore_errors=True
            )  # TFDS would keep what is damaged
            _write_config(config_name(task), data_dir)


def _grammar_digest() -> str:
    """A digest of this package's sources: it changes whenever the rows may."""
    digest = hashlib.sha256()
    for source in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


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
