"""Writes small prepared tasks without SeqIO.

The rows of a task are numbered from 0, and their texts are tokenized as bytes.
"""

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterator

import msgpack
import numpy as np

from synthesizer_jax.data import prepared as files
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.examples import CHUNK
from synthesizer_jax.data.objectives import FullLM
from synthesizer_jax.data.pipeline import Stream
from synthesizer_jax.data.prepared import (
    Chunk,
    PreparedInfo,
    PreparedTasks,
    RaggedTokens,
    rows_file,
)
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.preparation.prepare import write_chunks
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.splits import open_stream
from synthesizer_jax.tasks.task import Task

VOCABULARY = Bytes().build()
ROWS = dict(many=2500, few=40, sentinel=400, never=50, letters=2500, notes=40, own=40)
TEXTS = ("letters", "notes", "own")
"""The tasks without inputs."""
MIXTURES = {
    "small": {"small_many": 3.0, "small_few": 1.0, "small_sentinel": 2.0, "small_never": 0.0},
    "small_texts": {"small_letters": 2.0, "small_notes": 1.0},
    "small_both": {"small_letters": 2.0, "small_own": 1.0, "small_few": 1.0},
}
CONFIG = DataConfig("small", inputs_length=32, targets_length=12, batch_size=16, shards=8)
TEXT_CONFIG = DataConfig("small_texts", inputs_length=0, targets_length=32, batch_size=16, shards=8)

task_registry.add(
    [
        Task(
            f"small_{name}",
            f"small_rows/{name}",
            splits=("train", "validation"),
            has_inputs=name not in TEXTS,
            sentinel=name == "sentinel",
            objective=FullLM(documents=3) if name == "own" else None,
        )
        for name in ROWS
    ],
    MIXTURES,
)


def text(name: str, row: int) -> str:
    """Returns the text of a row. Every third text is longer."""
    return f"{name} {row}" + " and more" * (row % 3 == 0)


def ids(string: str) -> list[int]:
    """Returns the token ids of ByT5, which are the bytes plus 3, followed by EOS, which is 1."""
    return [byte + 3 for byte in string.encode()] + [1]


def spell(tokens: np.ndarray) -> str:
    """Returns the text of ids."""
    return bytes(int(token) - 3 for token in tokens if 2 < token < 259).decode()


def example(name: str, row: int) -> tuple[list[int], list[int]]:
    """Returns the ids of the inputs and targets of a row.

    In tasks with inputs, the target is the number of the row.
    """
    if name in TEXTS:
        return [], ids(text(name, row))
    sentinel = [VOCABULARY.vocab_size - 1] * (name == "sentinel")
    return [*ids(text(name, row))[:-1], *sentinel, 1], [*ids(str(row))[:-1], *sentinel, 1]


def write(data_dir: pathlib.Path) -> None:
    """Writes all tasks.

    Each task has a split ``train`` and a split ``validation``. The latter has five rows with all
    fields that evaluation needs.
    """
    prepared = PreparedTasks(data_dir, VOCABULARY)
    for name, rows in ROWS.items():
        for split, count in (("train", rows), ("validation", 5)):
            _write_split(prepared, name, split, count)
    for mixture, rates in [*MIXTURES.items(), *((f"small_{n}", {f"small_{n}": 1.0}) for n in ROWS)]:
        prepared.save_rates(mixture, rates)


def _write_split(prepared: PreparedTasks, name: str, split: str, count: int) -> None:
    directory = prepared.directory(f"small_{name}", split)
    file = "tokens-00000-of-00001.arrayrecord"
    examples = [example(name, row) for row in range(count)]
    chunks = (
        Chunk(*(RaggedTokens.of(list(map(np.array, side))) for side in zip(*part, strict=True)))
        for part in (examples[start : start + CHUNK] for start in range(0, count, CHUNK))
    )
    shard = write_chunks(chunks, directory / file, key="")
    if split == "validation":
        sides = ("inputs_pretokenized", "targets_pretokenized")
        rows = [dict(zip(sides, map(VOCABULARY.decode, e), strict=True)) for e in examples]
        (directory / rows_file(file)).write_bytes(b"".join(map(msgpack.packb, rows)))
    PreparedInfo(
        format=files.FORMAT,
        task=f"small_{name}",
        split=split,
        source=None,
        epochs=1,
        lengths=None,
        vocabulary=VOCABULARY.digest,
        vocab_size=VOCABULARY.vocab_size,
        source_rows=count,
        examples=count,
        keep_last=dict.fromkeys(("inputs", "targets"), 1 + (name == "sentinel")),
        has_inputs=name not in TEXTS,
        has_rows=split == "validation",
        files={file: count},
        tokens=shard.tokens,
        checksum=shard.checksum,
    ).save(directory)


def stream(data_dir: pathlib.Path, config: DataConfig = CONFIG, **changes: object) -> Stream:
    """Returns the data stream of a configuration after some changes.

    The options ``here`` and ``saved`` are lists of virtual shards.
    """
    options = {"shards": changes.pop("here", None), "saved": changes.pop("saved", None)}
    config = dataclasses.replace(config, **changes)
    return open_stream(config, VOCABULARY, data_dir=data_dir, **options)


def examples_of(batch: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Yields the examples of a batch, row by row, without padding."""
    sides = {"encoder": "encoder_input_tokens", "decoder": "decoder_target_tokens"}
    for row in range(len(batch["decoder_target_tokens"])):
        parts = {name: values[row] for name, values in batch.items()}
        segments = {
            s: parts.get(f"{s}_segment_ids", parts[tokens] != 0) for s, tokens in sides.items()
        }
        for number in range(1, int(segments["decoder"].max(initial=0)) + 1):
            yield {name: x[segments[name[:7]] == number] for name, x in parts.items()}


def inputs(batches: Iterator[dict[str, np.ndarray]], count: int) -> list[str]:
    """Returns the inputs of all examples of the next batches."""
    found = (e for batch in itertools.islice(batches, count) for e in examples_of(batch))
    return [spell(example["encoder_input_tokens"]) for example in found]


def digests(batches: Iterator[dict[str, np.ndarray]], count: int) -> list[str]:
    """Returns digests of the next batches. A digest covers all fields and their dtypes."""
    result = []
    for _ in range(count):
        parts = [
            f"{k} {v.dtype} {v.shape}".encode() + v.tobytes() for k, v in next(batches).items()
        ]
        result.append(hashlib.sha256(b"".join(parts)).hexdigest())
    return result
