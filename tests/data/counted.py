"""Tasks of this package on the small data sets, which can be cached; bytes are their vocabulary.

As a program it prints digests of batches that a cache gives, and fails where TensorFlow was imported.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.pipeline import Stream
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.formats import TextFormat
from synthesizer_jax.tasks.streams import open_stream
from synthesizer_jax.tasks.task import Task

if TYPE_CHECKING:
    import tensorflow as tf

VOCABULARY = Bytes().build()
MIXTURE = "counted"
RATES = {"counted_many": 3.0, "counted_few": 1.0, "counted_sentinel": 2.0, "counted_never": 0.0}
CONFIG = DataConfig(MIXTURE, inputs_length=32, targets_length=12, batch_size=16, shards=8)


@dataclasses.dataclass(frozen=True)
class Counted(TextFormat):
    """The number in a row is its target."""

    def preprocess(self, dataset: "tf.data.Dataset") -> "tf.data.Dataset":
        import tensorflow as tf

        return dataset.map(
            lambda row: {"inputs": row["text"], "targets": tf.strings.split(row["text"])[1]}
        )


def add() -> None:
    """The tasks and their mixture."""
    rows = {"many": "many", "few": "few", "sentinel": "many", "never": "few"}
    task_registry.add(
        [
            Task(
                f"counted_{name}",
                f"small_rows/{dataset}",
                Counted(),
                splits=("train", "validation"),
                sentinel=name == "sentinel",
            )
            for name, dataset in rows.items()
        ],
        {MIXTURE: RATES},
    )


def stream(data_dir: pathlib.Path, *, shards: list[int] | None = None, **changes: object) -> Stream:
    """The stream of `CONFIG`, with changes."""
    config = dataclasses.replace(CONFIG, **changes)
    return open_stream(config, VOCABULARY, data_dir=data_dir, shards=shards)


def texts(batches: Iterator[dict[str, np.ndarray]], count: int) -> list[str]:
    """The inputs of all examples of the next unpacked batches."""
    rows = [row for b in itertools.islice(batches, count) for row in b["encoder_input_tokens"]]
    return [bytes(int(i) - 3 for i in row if 1 < i < 259).decode() for row in rows]


def digests(batches: Iterator[dict[str, np.ndarray]], count: int) -> list[str]:
    """Of everything in the next batches, dtypes included."""
    result = []
    for batch in itertools.islice(batches, count):
        parts = [f"{k} {v.dtype} {v.shape}".encode() + v.tobytes() for k, v in batch.items()]
        result.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return result


if __name__ == "__main__":
    directory, changes, position = sys.argv[1:]
    add()
    own = stream(pathlib.Path(directory), **json.loads(changes))
    if position:
        own.restore(pathlib.Path(position))
    print("\n".join(digests(own, 12)))
    imported = {"tensorflow", "tensorflow_datasets", "seqio", "flax"} & set(sys.modules)
    if imported:
        raise SystemExit(f"{imported} were imported")
