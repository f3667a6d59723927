"""Small SeqIO tasks: rows counted from 0, from TFDS files and from functions, fixed and random.

As a program it restores streams in a process of its own and prints digests of their next batches.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import sys

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.pipeline import Stream
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks.importers.corpus_layouts import CORPORA, Layout
from synthesizer_jax.tasks.streams import open_stream

ROWS = {"many": 2500, "few": 40, "made": 90, "never": 50, "noisy": 60}
FIXED = {"small_many": 3.0, "small_few": 1.0, "small_made": 2.0, "small_never": 0.0}
MIXED = {"small_few": 1.0, "small_noisy": 1.0, "small_many": 2.0}


class SmallRows(tfds.core.GeneratorBasedBuilder):
    """``ROWS[config]`` texts ``config i``."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=name, description=name) for name in ("many", "few")
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager: object) -> dict:
        name = self.builder_config.name
        return {
            "train": ((i, {"text": text(name, i)}) for i in range(ROWS[name])),
            "validation": ((i, {"text": text(name, i)}) for i in range(5)),
        }

    def _generate_examples(self) -> None: ...


def text(name: str, row: int) -> str:
    """The input of a row; every third is longer."""
    return f"{name} {row}" + " and more" * (row % 3 == 0)


def ids(string: str) -> list[int]:
    """ByT5's ids: bytes moved up by 3, EOS is 1."""
    return [byte + 3 for byte in string.encode()] + [1]


def made(split: str, shuffle_files: bool, seed: object = None, *, name: str) -> tf.data.Dataset:
    del split, shuffle_files, seed
    return tf.data.Dataset.from_tensor_slices({"text": [text(name, i) for i in range(ROWS[name])]})


def as_task(dataset: tf.data.Dataset, *, word: int) -> tf.data.Dataset:
    """A word of the input is the target: 0 the task, 1 the number."""
    return dataset.map(
        lambda row: {"inputs": row["text"], "targets": tf.strings.split(row["text"])[word]}
    )


@seqio.map_over_dataset(num_seeds=1)
def noise(row: dict, seed: tf.Tensor) -> dict:
    """One random id at the end of the targets."""
    number = tf.random.stateless_uniform([1], seed, 3, 200, tf.int32)
    return row | {"targets": tf.concat([row["targets"], number], 0)}


def write(data_dir: pathlib.Path) -> None:
    """The TFDS data sets."""
    tfds.display_progress_bar(False)
    for name in ("many", "few"):
        SmallRows(config=name, data_dir=data_dir).download_and_prepare()


def register(data_dir: pathlib.Path, *, word: int = 1) -> None:
    """All tasks, and the mixtures `small` (no random task) and `small_live` (one)."""
    feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=True)
    for name in ("small", "small_live"):
        if name in seqio.MixtureRegistry.names():
            seqio.MixtureRegistry.remove(name)
    for name, rows in ROWS.items():
        if f"small_{name}" in seqio.TaskRegistry.names():
            seqio.TaskRegistry.remove(f"small_{name}")
        source: seqio.DataSource = seqio.FunctionDataSource(
            functools.partial(made, name=name), ["train"], num_input_examples={"train": rows}
        )
        if name in ("many", "few"):
            source = seqio.TfdsDataSource(f"small_rows/{name}:1.0.0", tfds_data_dir=str(data_dir))
        first = functools.partial(as_task, word=word)
        steps = [first, seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()]
        seqio.TaskRegistry.add(
            f"small_{name}",
            source=source,
            preprocessors=[
                *steps,
                *([noise] if name == "noisy" else []),
                seqio.preprocessors.append_eos_after_trim,
            ],
            output_features={"inputs": feature, "targets": feature},
        )
    seqio.MixtureRegistry.add("small", list(FIXED.items()))
    seqio.MixtureRegistry.add("small_live", list(MIXED.items()))


def multi30k(sizes: dict[str, int]) -> tuple[Layout, ...]:
    """The layouts of a smaller Multi30k."""
    return tuple(
        dataclasses.replace(
            layout,
            splits=tuple(dataclasses.replace(s, rows=sizes[s.name]) for s in layout.splits),
        )
        for layout in CORPORA["multi30k"]
    )


def open_small(config: DataConfig, **options: object) -> Stream:
    """The stream of a registered task or mixture, whose sources name their directory."""
    return open_stream(config, Bytes().build(), data_dir=pathlib.Path("unused"), **options)


def digests(stream: Stream, count: int) -> list[str]:
    """Of everything in the next batches."""
    result = []
    for _ in range(count):
        batch = next(stream)
        parts = [name.encode() + np.ascontiguousarray(batch[name]).tobytes() for name in batch]
        result.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return result


if __name__ == "__main__":
    data, *rest = sys.argv[1:]
    register(pathlib.Path(data))
    for position, config in zip(rest[::2], rest[1::2], strict=True):
        settings = json.loads(config).items()
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings}
        restored = open_small(DataConfig(**settings))
        restored.restore(pathlib.Path(position))
        print("\n".join(digests(restored, 12)))
