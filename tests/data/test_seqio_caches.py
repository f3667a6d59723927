"""Caches of tasks of SeqIO's registry: this package's, and those that SeqIO writes itself."""

import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import seqio
import tensorflow as tf
from synthesizer_jax.data.cache import Caches

from synthesizer_jax.data import cache, cache_writing
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.streams import open_stream
from tests.data import counted, small

pytest.importorskip("grain")

VOCABULARY = Bytes().build()
COUNTS = {"train": 300, "validation": 20}


def numbers(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
    del shuffle_files, seed
    return tf.data.Dataset.range(COUNTS[split])


def spell(dataset: tf.data.Dataset, *, word: str) -> tf.data.Dataset:
    """Makes a question of a number."""
    return dataset.map(
        lambda n: {
            "inputs": tf.strings.join([word, " ", tf.strings.as_string(n)]),
            "targets": tf.strings.as_string(n % 7),
        }
    )


@seqio.map_over_dataset
def ask(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {"inputs": row["text"], "targets": row["text"]}


class Speller:
    """A step whose state cannot be compared."""

    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return spell(dataset, word="so")


@pytest.fixture
def add() -> Iterator[Callable[..., None]]:
    """Registers a task; all are removed in the end."""
    added: list[str] = []

    def add_task(
        name: str,
        *steps: Callable[..., tf.data.Dataset],
        source: seqio.DataSource | None = None,
        extra_ids: int = 0,
        required: bool = False,
    ) -> None:
        own = seqio.Feature(seqio.ByteVocabulary(extra_ids), add_eos=True)
        if name in added:
            seqio.TaskRegistry.remove(name)
        seqio.TaskRegistry.add(
            name,
            source=source
            or seqio.FunctionDataSource(numbers, splits=list(COUNTS), num_input_examples=COUNTS),
            preprocessors=[
                *steps,
                seqio.preprocessors.tokenize,
                seqio.CacheDatasetPlaceholder(required),
                seqio.preprocessors.append_eos_after_trim,
            ],
            output_features={"inputs": own, "targets": own},
        )
        added.append(name)

    yield add_task
    for name in {*added}:
        seqio.TaskRegistry.remove(name)


def write(folder: pathlib.Path, mixture: str) -> cache_writing.Report:
    return cache_writing.write_caches(mixture, Caches(folder, VOCABULARY), split="train")


def digests(folder: pathlib.Path, mixture: str, *, cached: bool | None) -> list[str]:
    config = DataConfig(mixture, 16, 4, batch_size=8, shards=4, cached=cached)
    stream = open_stream(config, VOCABULARY, data_dir=folder)
    assert stream.is_cached == bool(cached)
    return counted.digests(stream, 60)


def spelled(word: str) -> Callable[..., tf.data.Dataset]:
    return functools.partial(spell, word=word)


@pytest.fixture
def mixture(add: Callable[..., None]) -> Iterator[str]:
    add("cached_is", spelled("is"))
    add("cached_was", spelled("was"))
    seqio.MixtureRegistry.add("cached_both", [("cached_is", 2), ("cached_was", 1)])
    yield "cached_both"
    seqio.MixtureRegistry.remove("cached_both")


def test_a_cache_gives_what_seqio_gives(mixture: str, tmp_path: pathlib.Path) -> None:
    report = write(tmp_path, mixture)
    assert [(info.task, info.examples) for info in report.written] == [
        ("cached_is", 300),
        ("cached_was", 300),
    ]
    assert digests(tmp_path, mixture, cached=True) == digests(tmp_path, mixture, cached=False)
    assert write(tmp_path, mixture).kept == ["cached_is", "cached_was"]


def test_another_argument_of_a_step_needs_a_new_cache(
    mixture: str, add: Callable[..., None], tmp_path: pathlib.Path
) -> None:
    write(tmp_path, mixture)
    add("cached_was", spelled("will be"))
    with pytest.raises(cache.OutdatedCacheError, match="another version of the task cached_was"):
        digests(tmp_path, mixture, cached=True)
    report = write(tmp_path, mixture)
    assert [info.task for info in report.written] == ["cached_was"]
    assert digests(tmp_path, mixture, cached=True) == digests(tmp_path, mixture, cached=False)


def test_a_step_with_unknown_state_is_read_live(
    add: Callable[..., None], tmp_path: pathlib.Path
) -> None:
    add("cached_object", Speller())
    report = write(tmp_path, "cached_object")
    assert report.live == {
        "cached_object": "it depends on an object of the class Speller, of which it cannot be told "
        "whether it changes"
    }
    assert not report.written


def test_written_files_need_a_new_cache(add: Callable[..., None], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\ntwo\n")
    source = seqio.TextLineDataSource({"train": str(path)})

    def steps(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.map(lambda line: {"inputs": line, "targets": line})

    add("cached_lines", steps, source=source)
    write(tmp_path / "data", "cached_lines")
    assert Caches(tmp_path / "data", VOCABULARY).find("cached_lines", "train") is not None
    path.write_text("one\ntwo\nthree\n")
    with pytest.raises(cache.OutdatedCacheError, match="data set TextLineDataSource"):
        Caches(tmp_path / "data", VOCABULARY).find("cached_lines", "train")


def test_splits_that_are_parts_of_those_of_tfds(
    add: Callable[..., None], tmp_path: pathlib.Path
) -> None:
    small.write(tmp_path)
    parts = {"train": "train[:30]", "held_out": "train[30:]"}
    add("cached_parts", ask, source=seqio.TfdsDataSource("small_rows/few:1.0.0", splits=parts))
    task = task_registry.find_task("cached_parts")
    assert task.prepared_splits(tmp_path) == {"train": None, "held_out": None}
    assert [info.examples for info in write(tmp_path, "cached_parts").written] == [30]
    assert digests(tmp_path, "cached_parts", cached=True) == digests(
        tmp_path, "cached_parts", cached=False
    )


def write_offline(folder: pathlib.Path, task: str, *, splits: dict[str, int]) -> None:
    """Writes what ``seqio_cache_tasks`` writes: the tokens of numbers in words of their own."""
    place = folder / task
    place.mkdir(parents=True)
    for split, count in splits.items():
        with tf.io.TFRecordWriter(str(place / f"{split}.tfrecord-00000-of-00001")) as writer:
            for number in range(count):
                row = {"inputs": f"stored {number}", "targets": str(number)}
                features = {
                    name: tf.train.Feature(
                        int64_list=tf.train.Int64List(value=small.ids(text)[:-1])
                    )
                    for name, text in row.items()
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        kind = {"dtype": "int32", "shape": [None]}
        info = {
            "num_shards": 1,
            "features": {"inputs": kind, "targets": kind},
            "seqio_version": "1.0",
        }
        (place / f"info.{split}.json").write_text(json.dumps(info))
        (place / f"stats.{split}.json").write_text(json.dumps({"examples": count}))
    (place / "COMPLETED").touch()


@pytest.fixture
def offline(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """One of SeqIO's cache directories."""
    monkeypatch.setattr(seqio.utils, "_GLOBAL_CACHE_DIRECTORIES", [str(tmp_path / "offline")])
    return tmp_path / "offline"


def first_inputs(folder: pathlib.Path, name: str, extra_ids: int = 100) -> list[str]:
    """The inputs of a task's first batch, in stored order."""
    config = DataConfig(name, 16, 4, batch_size=8, shards=1, cached=None, shuffle=False)
    (batch,) = itertools.islice(open_stream(config, Bytes(extra_ids).build(), data_dir=folder), 1)
    rows = np.asarray(batch["encoder_input_tokens"])
    return [bytes(int(i) - 3 for i in row if 1 < i < 259).decode() for row in rows]


def test_what_seqio_has_cached_is_read(
    add: Callable[..., None], offline: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    add("offline_both", spelled("live"), extra_ids=100)
    write_offline(offline, "offline_both", splits={"train": 40, "validation": 9})
    task = task_registry.find_task("offline_both")
    assert task.prepared_splits(tmp_path) == {"train": 40, "validation": 9}
    assert first_inputs(tmp_path, "offline_both") == [f"stored {n}" for n in range(8)]
    # Tokens of another vocabulary are not read.
    assert first_inputs(tmp_path, "offline_both", 0) == [f"live {n}" for n in range(8)]
    report = write(tmp_path, "offline_both")
    assert [info.examples for info in report.written] == [40]


def test_what_seqio_has_cached_of_some_splits_is_not_read(
    add: Callable[..., None], offline: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    add("offline_train", spelled("live"), extra_ids=100)
    write_offline(offline, "offline_train", splits={"train": 40})
    assert task_registry.prepared_splits("offline_train", tmp_path) == COUNTS
    assert first_inputs(tmp_path, "offline_train")[0] == "live 0"


def test_a_task_that_requires_its_cache(
    add: Callable[..., None], offline: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    add("offline_only", spelled("live"), extra_ids=100, required=True)
    write_offline(offline, "offline_only", splits=COUNTS)
    assert first_inputs(tmp_path, "offline_only")[0] == "stored 0"
    with pytest.raises(
        ValueError, match=r"'offline_only' can only be read from SeqIO's cache .* own vocabulary"
    ):
        first_inputs(tmp_path, "offline_only", 0)
