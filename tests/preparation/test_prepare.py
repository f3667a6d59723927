"""Compares prepared data with SeqIO's, and tests interruptions, changes and damage."""

import os
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from seqio.experimental import add_task_with_sentinels

from synthesizer_jax.base.files import write_atomic
from synthesizer_jax.data.prepared import (
    HIDDEN,
    Chunk,
    PreparedExamples,
    PreparedTasks,
    RaggedTokens,
)
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.preparation import prepare as preparing
from synthesizer_jax.preparation import synthetic
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.preparation.writing import write_dataset
from synthesizer_jax.tasks import seqio_tasks, task_registry
from synthesizer_jax.tasks.splits import SplitRequest, is_current, names_of_split
from synthesizer_jax.tasks.synthetic import MIXTURE, QUICKSTART
from synthesizer_jax.tasks.synthetic import vocabulary as vocabulary_of
from tests.environment import python
from tests.tasks.loading import BYTES, quiet

BOOLQ, THEIRS = "super_glue_boolq_v102", "prepared_boolq"
LENGTHS = {"inputs": 32, "targets": 12}
LINES = {"train": 90, "validation": 7}
SIDES = ("inputs", "targets")


def questions(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes rows with features of all kinds from lines ``NUMBER TEXT``."""

    def question(line: tf.Tensor) -> dict[str, tf.Tensor]:
        words = tf.strings.split(line)
        number = tf.strings.to_number(words[0], tf.int32)
        return {
            "inputs": line,
            "targets": words[0],
            "number": number,
            "half": tf.cast(number, tf.float32) / 2,
            "words": words,
            "range": tf.range(number % 4),
            "pair": {"a": number, "b": line},
        }

    return dataset.map(question)


def texts(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda line: {"targets": line})


def halve(dataset: tf.data.Dataset, sequence_length: dict[str, int]) -> tf.data.Dataset:
    """Cuts the inputs to half of the length that a row has room for."""
    room = sequence_length["inputs"] // 2
    return dataset.map(lambda row: row | {"inputs": row["inputs"][:room]})


@seqio.map_over_dataset(num_seeds=1)
def noise(row: dict, seed: tf.Tensor) -> dict:
    """Adds a random id at the end of the targets."""
    number = tf.random.stateless_uniform([1], seed, 3, 200, tf.int32)
    return row | {"targets": tf.concat([row["targets"], number], 0)}


def without_texts(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Drops the texts, like a preprocessor that does the tokenization itself."""
    return dataset.map(lambda row: {k: v for k, v in row.items() if "pretokenized" not in k})


EOS = [seqio.preprocessors.append_eos_after_trim]
STEPS = {
    "prepared_trimmed": [questions, EOS],
    "prepared_cut": [questions, [seqio.preprocessors.append_eos]],
    "prepared_bare": [questions, []],
    "prepared_texts": [texts, EOS],
    "prepared_lengths": [questions, [halve, *EOS]],
    "prepared_random": [questions, [noise, *EOS]],
    "prepared_silent": [questions, [without_texts, *EOS]],
}
NAMES = [*STEPS, f"{BOOLQ}_1_sentinel"]
FEATURES = {
    "question": tfds.features.Text(),
    "passage": tfds.features.Text(),
    "label": np.int64,
    "idx": np.int32,
}


def register(folder: pathlib.Path) -> None:
    """Adds tasks to SeqIO's registry: text files, and BoolQ with and without a sentinel."""
    files = {split: str(folder / f"{split}-*.txt") for split in LINES}
    feature = seqio.Feature(seqio.PassThroughVocabulary(99), add_eos=True)
    for name, (first, rest) in STEPS.items():
        sides = SIDES if first is questions else SIDES[1:]
        seqio.TaskRegistry.add(
            name,
            source=seqio.TextLineDataSource(files, num_input_examples=LINES),
            preprocessors=[
                first,
                seqio.preprocessors.tokenize,
                seqio.CacheDatasetPlaceholder(),
                *rest,
            ],
            output_features=dict.fromkeys(sides, feature),
        )
    steps = [seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(), *EOS]
    seqio.TaskRegistry.add(
        THEIRS,
        source=seqio.TfdsDataSource("super_glue/boolq:1.0.2"),
        preprocessors=[task_registry.find_task(BOOLQ).preprocess, *steps],
        output_features=dict.fromkeys(SIDES, feature),
    )
    add_task_with_sentinels(THEIRS)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A directory with text files, and with BoolQ as a TFDS data set. Nothing is prepared yet."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in LINES.items():
        for part in range(3):
            numbers = range(part * count // 3, (part + 1) * count // 3)
            text = "".join(f"{n} is a number{' indeed' * (n % 3)}\n" for n in numbers)
            (folder / f"{split}-{part}.txt").write_text(text)
    rows = [
        {"question": f"is {i} even", "passage": f"{i}.", "label": i % 2, "idx": i}
        for i in range(40)
    ]
    splits = {"train": lambda: rows, "validation": lambda: rows[:9]}
    write_dataset("super_glue/boolq", "1.0.2", FEATURES, splits, folder)
    register(folder)
    yield folder
    for name in (*STEPS, THEIRS, f"{THEIRS}_1_sentinel"):
        seqio.TaskRegistry.remove(name)


@pytest.fixture
def own_dir(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the data sets, in which tests may prepare data.

    The text files are not copied.
    """
    ignored = shutil.ignore_patterns("prepared")
    return pathlib.Path(shutil.copytree(data_dir, tmp_path / "data", ignore=ignored))


def prepared_in(folder: pathlib.Path, name: str, **options: object) -> PreparedTasks:
    prepared = PreparedTasks(folder, BYTES)
    prepare(name, prepared, **{"lengths": LENGTHS, "log": quiet, **options})
    return prepared


def seqio_rows(
    folder: pathlib.Path, name: str, split="train", *, lengths=LENGTHS, seed=0
) -> list[dict]:
    """Returns the rows of SeqIO's own pipeline."""
    task = seqio_tasks.find_registered(name.replace(BOOLQ, THEIRS)).to_seqio(BYTES, folder)
    dataset = task.get_dataset(lengths, split, shuffle=False, seed=seed, try_in_mem_cache=False)
    return list(dataset.as_numpy_iterator())


def tokens_of(rows: list[dict]) -> list[list[list[int]]]:
    return [[np.asarray(row.get(side, ())).tolist() for side in SIDES] for row in rows]


def read(examples: PreparedExamples) -> list[list[list[int]]]:
    return [[side.tolist() for side in examples[i]] for i in range(len(examples))]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_that_seqio_makes_for_any_lengths(
    data_dir: pathlib.Path, name: str
) -> None:
    for lengths in ((6, 3), (2, 2) if BOOLQ in name else (1, 1)):
        chosen = dict(zip(SIDES, lengths, strict=True))
        prepared = prepared_in(data_dir, name, lengths=chosen, evaluation_splits=())
        wanted = tokens_of(seqio_rows(data_dir, name, lengths=chosen))
        assert read(prepared.open(name, "train", chosen)) == wanted
        assert len(wanted) == (40 if BOOLQ in name else 90)
    if name != "prepared_lengths":
        whole = tokens_of(seqio_rows(data_dir, name, lengths=None))
        assert read(prepared.open(name, "train", None)) == whole


def test_texts_that_training_truncates_are_counted(
    data_dir: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The count does not depend on who prepared the task, or for which lengths."""
    prepared = prepared_in(data_dir, "prepared_trimmed", evaluation_splits=())
    whole = read(prepared.open("prepared_trimmed", "train", None))
    longest = [max(len(row[i]) for row in whole) for i in range(2)]
    read(prepared.open("prepared_trimmed", "train", dict(zip(SIDES, longest, strict=True))))
    assert not caplog.records

    lengths = dict(zip(SIDES, (longest[0], longest[1] - 1), strict=True))
    read(prepared.open("prepared_trimmed", "train", lengths))
    count = sum(len(targets) == longest[1] for _, targets in whole)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"In prepared_trimmed's split 'train', the limit of {lengths['targets']} tokens truncates "
        f"{count} of {len(whole)} targets."
    )


@pytest.mark.parametrize("name", ["prepared_trimmed", "prepared_silent", BOOLQ])
def test_evaluation_rows_are_those_of_seqio(data_dir: pathlib.Path, name: str) -> None:
    prepared = prepared_in(data_dir, name)
    wanted = seqio_rows(data_dir, name, "validation", lengths=None)
    found = list(prepared.open(name, "validation", LENGTHS).rows())
    assert len(found) == len(wanted) > 6
    for row, expected in zip(found, wanted, strict=True):
        for side in SIDES:
            decoded = BYTES.decode(expected.pop(side))
            if name == "prepared_silent":
                expected[f"{side}_pretokenized"] = decoded
        assert flat(row).keys() == flat(expected).keys()
        for (key, value), other in zip(flat(expected).items(), flat(row).values(), strict=True):
            np.testing.assert_array_equal(other, value, key)
            assert isinstance(other, bytes) == isinstance(value, bytes)


def flat(row: dict, prefix: str = "") -> dict:
    found = {}
    for name, value in sorted(row.items()):
        found |= flat(value, f"{name}/") if isinstance(value, dict) else {prefix + name: value}
    return found


def test_lengths_and_files_outdate_a_prepared_set(
    data_dir: pathlib.Path, own_dir: pathlib.Path
) -> None:
    name = "prepared_lengths"
    with pytest.raises(
        ValueError, match=r"'prepared_lengths' depend on the lengths .*--inputs-leng"
    ):
        prepared_in(own_dir, name, lengths=None)
    prepared = prepared_in(own_dir, name)
    request = SplitRequest(name, "train", rows=False)
    with pytest.raises(ValueError, match=r"is prepared for the lengths .*'inputs': 32.*Run 'synth"):
        prepared.open(name, "train", {"inputs": 16, "targets": 12})
    assert is_current(request, prepared, lengths=LENGTHS)
    assert not is_current(request, prepared, lengths={"inputs": 8, "targets": 8})
    path = data_dir / "train-2.txt"
    text = path.read_text()
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    for content, modified in ((text + "90 more\n", times[1]), (text, times[1] + 1)):
        path.write_text(content)
        os.utime(path, ns=(times[0], modified))
        assert not is_current(request, prepared, lengths=LENGTHS)
    os.utime(path, ns=times)
    assert is_current(request, prepared, lengths=LENGTHS)


def test_epochs_of_a_task_with_random_steps_differ(own_dir: pathlib.Path) -> None:
    def epochs(count: int | None = 2) -> list:
        options = {"epochs": count, "renew": True, "evaluation_splits": ()}
        prepared = prepared_in(own_dir, "prepared_random", **options)
        found = read(prepared.open("prepared_random", "train", LENGTHS))
        return [found[:90], found[90:]]

    first, second = epochs()
    assert first != second and [row[0] for row in first] == [row[0] for row in second]
    assert [first, second] == epochs()
    for seed, epoch in enumerate((first, second)):
        assert epoch == tokens_of(seqio_rows(own_dir, "prepared_random", seed=seed))
    assert [first, second] == epochs(None)


def test_only_the_named_tasks_are_prepared(own_dir: pathlib.Path) -> None:
    assert prepared_in(own_dir, BOOLQ, only=["glue_rte_v002"]).find(BOOLQ, "train") is None
    twin = names_of_split("glue_mnli_v002", "validation_matched")
    assert twin == {"glue_mnli_v002", "glue_mnli_matched_v002"}


def test_a_killed_preparation_of_shards_continues_where_it_was(
    data_dir: pathlib.Path, own_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the preparation of shards is killed, it continues where it was.

    Preparation proceeds file by file, while SeqIO interleaves the files of a shard.

    Files from before the interruption are reused.
    """
    name = "prepared_trimmed"
    options = {"evaluation_splits": ()}
    written = []
    whole = read(prepared_in(data_dir, name, **options).open(name, "train", LENGTHS))
    monkeypatch.setattr(preparing, "ONE_SHARD", 20)
    write = preparing.write_chunks

    def write_or_die(chunks: Iterator[Chunk], path: pathlib.Path, *, key: str) -> preparing.Shard:
        if len(written) == 2:
            path.with_name(f".{path.name}.partial").write_bytes(b"half")
            written.append("killed")
            raise KeyboardInterrupt
        written.append(path.name[-26:-21])
        return write(chunks, path, key=key)

    monkeypatch.setattr(preparing, "write_chunks", write_or_die)
    with pytest.raises(KeyboardInterrupt):
        prepared_in(own_dir, name, **options)
    assert PreparedTasks(own_dir, BYTES).find(name, "train") is None
    prepared = prepared_in(own_dir, name, **options)
    assert written == ["00000", "00001", "killed", "00002"]
    info = prepared.find(name, "train")
    assert info is not None and list(info.files.values()) == [30, 30, 30]
    found = read(prepared.open(name, "train", LENGTHS))
    assert sorted(found) == sorted(whole)
    assert [BYTES.decode(targets) for _, targets in found] == [*map(str, range(90))]
    prepared_in(own_dir, name, **options)
    assert len(written) == 4
    written.clear()
    options["renew"] = True
    with pytest.raises(KeyboardInterrupt):
        prepared_in(own_dir, name, **options)
    assert read(prepared.open(name, "train", LENGTHS)) == found
    prepared_in(own_dir, name, **options)
    assert len(written) == 6 and read(prepared.open(name, "train", LENGTHS)) == found
    places = prepared.directory(name, "train").glob("tokens*.arrayrecord")
    assert {path.name for path in places} == prepared.find(name, "train").files.keys()


def test_settings_that_change_a_prepared_set_make_it_outdated(own_dir: pathlib.Path) -> None:
    request = SplitRequest(BOOLQ, "train", rows=False)

    def current(**options: object) -> bool:
        return is_current(request, prepared, **{"lengths": None, **options})

    prepared = prepared_in(own_dir, BOOLQ)
    assert current() and current(epochs=1) and current(lengths={"inputs": 1, "targets": 1})
    assert not current(epochs=2)
    assert not is_current(SplitRequest(BOOLQ, "train", rows=True), prepared, lengths=None)
    assert PreparedTasks(own_dir, Bytes(7).build()).find(BOOLQ, "train") is None
    version = own_dir / "super_glue" / "boolq" / "1.0.2"
    info = version / "dataset_info.json"
    text = info.read_text()
    info.write_text(text.replace('"40"', '"39"'))
    assert not current()
    info.write_text(text)
    assert current()
    version.rename(version.with_name("1.0.3"))
    assert not current()
    prepared_in(own_dir, BOOLQ)
    assert current()


@pytest.mark.parametrize("name", [BOOLQ, f"{BOOLQ}_1_sentinel"])
def test_hidden_targets_are_counted_in_every_format(tmp_path: pathlib.Path, name: str) -> None:
    rows = [{"question": "is it", "passage": "yes.", "label": -1, "idx": i} for i in range(3)]
    write_dataset("super_glue/boolq", "1.0.2", FEATURES, {"test": lambda: rows}, tmp_path)
    prepared = PreparedTasks(tmp_path, BYTES)
    prepare(name, prepared, training_splits=["test"], evaluation_splits=(), log=quiet)
    assert prepared.find(name, "test").targets[HIDDEN] == 3


def test_records_of_tokens_are_read_back_and_checked() -> None:
    targets = RaggedTokens(np.array([8], np.int32), np.array([0, 1, 1, 1]))
    inputs = RaggedTokens(np.array([5, 70_000, 7], np.int32), np.array([0, 0, 2, 3]))
    record = Chunk(inputs, targets).to_bytes()
    again = Chunk.from_bytes(record, vocab_size=80_000)
    for given, found in zip((*inputs, *targets), (*again.inputs, *again.targets), strict=True):
        np.testing.assert_array_equal(given, found, strict=True)
    with pytest.raises(ValueError, match="token 70000, but the vocabulary has 300 ids"):
        Chunk.from_bytes(record, vocab_size=300)
    for damaged in (b"", record[:5], record[:-4], record + b"1234", b"\xff" * len(record)):
        with pytest.raises(ValueError, match=r"holds|says|buffer|offset"):
            Chunk.from_bytes(damaged, vocab_size=80_000)


WITHOUT_TENSORFLOW = """
import sys
for name in ("tensorflow", "tensorflow_datasets", "tensorflow_text", "seqio"):
    sys.modules[name] = None
from synthesizer_jax.cli.main import app
for line in sys.stdin:
    app(line.split(), standalone_mode=False)
"""


def test_prepared_data_needs_no_tensorflow(
    synthetic_data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(synthetic_data / "prepared", tmp_path / "data" / "prepared")
    vocabulary = vocabulary_of(synthetic_data).file
    write_atomic(tmp_path / "data" / MIXTURE / vocabulary.name, vocabulary.read_bytes())
    where = f"--workdir {tmp_path}/run --data-dir {tmp_path}/data"
    settings = (
        "training.steps=1",
        "data.batch_size=8",
        "evaluation.max_examples=2",
        "evaluation.loss_batches=1",
        "evaluation.batch_size=2",
        "model.encoder.runs.0.repeats=1",
        "model.decoder.runs.0.repeats=1",
    )
    options = " ".join(f"--set {setting}" for setting in settings)
    commands = (
        f"train quickstart:random_vanilla {where} {options}\n"
        f"eval {where} --max-examples 2 --task synthetic_cola\n"
        f"predict {where} --split validation --max-examples 2 --task synthetic_wic\n"
        f"generate --workdir {tmp_path}/run --max-length 2 text\n"
    )
    python("-c", WITHOUT_TENSORFLOW, input=commands, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert not synthetic.is_written(tmp_path / "data"), "another process has prepared"
    assert (tmp_path / "run" / "evaluation" / "1" / "results.json").is_file()
    assert list((tmp_path / "run" / "evaluation").rglob("synthetic_wic.jsonl"))
    assert QUICKSTART in (tmp_path / "run" / "experiment.json").read_text()
