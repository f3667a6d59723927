"""Tasks of texts alone on the small data sets; bytes are their vocabulary.

As a program it prints digests of batches that a cache gives, and fails where TensorFlow was imported.
"""

import dataclasses
import json
import pathlib
import sys

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.pipeline import Stream
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.generation_formats import LanguageModeling
from synthesizer_jax.tasks.streams import open_stream
from synthesizer_jax.tasks.task import Task
from tests.data import counted

VOCABULARY = Bytes().build()
MIXTURE = "texts"
RATES = {"texts_many": 2.0, "texts_few": 1.0}
CONFIG = DataConfig(MIXTURE, inputs_length=0, targets_length=32, batch_size=16, shards=8)


def add() -> None:
    """The tasks, their mixture, and one with a task that has inputs."""
    counted.add()
    task_registry.add(
        [
            Task(
                f"texts_{name}",
                f"small_rows/{name}",
                LanguageModeling(),
                metrics=(),
                splits=("train", "validation"),
            )
            for name in ("many", "few")
        ],
        {MIXTURE: RATES, "mixed_texts": {"texts_many": 1.0, "counted_few": 1.0}},
    )


def stream(data_dir: pathlib.Path, *, shards: list[int] | None = None, **changes: object) -> Stream:
    """The stream of `CONFIG`, with changes."""
    config = dataclasses.replace(CONFIG, **changes)
    return open_stream(config, VOCABULARY, data_dir=data_dir, shards=shards)


if __name__ == "__main__":
    directory, changes = sys.argv[1:]
    add()
    print("\n".join(counted.digests(stream(pathlib.Path(directory), **json.loads(changes)), 12)))
    imported = {"tensorflow", "tensorflow_datasets", "seqio", "flax"} & set(sys.modules)
    if imported:
        raise SystemExit(f"{imported} were imported")
