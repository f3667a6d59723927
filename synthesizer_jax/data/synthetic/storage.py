"""The generated rows as TFDS data sets on disk, and the vocabulary beside them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from synthesizer_jax.data.formats import Similarity
from synthesizer_jax.data.staging import check_on_disk, staging
from synthesizer_jax.data.storage import write_dataset
from synthesizer_jax.data.synthetic.definitions import DATASET, DEFINITIONS, as_text, config_name
from synthesizer_jax.data.synthetic.rows import SIZES, examples
from synthesizer_jax.data.vocabularies import SentencePiece, train_sentencepiece

if TYPE_CHECKING:
    from synthesizer_jax.data.storage import FeatureType

VERSION = "1.0.0"
GRAMMAR_FILE = "grammar.txt"
"""Holds `grammar_digest()` of the sets on disk; sets of another grammar are written anew."""

VOCAB_SIZE = 1024
VOCABULARY_TEXTS = 2000
"""Training rows per task that the vocabulary is trained on."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What `prepare` made or found.

    Attributes:
      directory: of the data sets.
      vocabulary: the mixture's own SentencePiece model, without sentinels.
    """

    directory: pathlib.Path
    vocabulary: SentencePiece


def prepare(data_dir: pathlib.Path) -> Prepared:
    """Writes the eight data sets and the vocabulary; what this grammar has written is kept.

    Data sets are written aside and put into place together, the vocabulary likewise.

    Args:
      data_dir: where data sets lie.

    Raises:
      ValueError: something must be written, and the directory is in a bucket.
    """
    directory = data_dir / DATASET
    vocabulary, mark = directory / "vocabulary.model", directory / GRAMMAR_FILE
    targets = {task.name: data_dir / task.dataset / VERSION for task in DEFINITIONS}
    missing = [t for t in DEFINITIONS if not (targets[t.name] / "dataset_info.json").is_file()]
    current = mark.is_file() and mark.read_text(encoding="utf-8") == _grammar_digest()
    if missing or not (current and vocabulary.is_file()):
        check_on_disk(data_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if not current:
        mark.unlink(missing_ok=True)
        vocabulary.unlink(missing_ok=True)
        missing = list(DEFINITIONS)
    if missing:
        with staging(data_dir, DATASET) as stage:
            stage.commit([_write_config(config_name(task), stage.data) for task in missing])
    if not vocabulary.is_file():
        train_sentencepiece(_training_texts(), vocabulary, vocab_size=VOCAB_SIZE, model_type="bpe")
    if not mark.is_file():
        mark.write_text(_grammar_digest(), encoding="utf-8")
    return Prepared(directory, SentencePiece(str(vocabulary), extra_ids=0))


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
            kinds[name] = tfds.features.ClassLabel(names=list(task.labels or ("False", "True")))
        else:
            kinds[name] = tfds.features.Text() if isinstance(value, str) else np.int32
    return kinds
