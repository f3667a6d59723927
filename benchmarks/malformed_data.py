"""Attempts to evaluate, train and decode with damaged TFDS data sets and vocabularies."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import struct
from collections.abc import Iterator
from typing import Any

import malformed_run
from malformed_cases import BYTES, Case, CommandResult, Rng, damage_file, run_checked
from malformed_run import STEPS, Run, copies

SET = pathlib.Path("synthetic_co_training", "sst2")
VERSION = "1.0.0"


def cases(directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts, a fifth of them with damaged vocabularies."""
    run = malformed_run.make_run(directory)
    vocabularies = count // 5
    yield from stored_cases(run, directory / "stored", rng, count - vocabularies)
    yield from vocabulary_cases(run, directory / "vocabulary", rng, vocabularies)


# -- TFDS files --------------------------------------------------------------------------------------


def stored_cases(run: Run, directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts to evaluate on, or train on, damaged data sets."""
    small = directory / "data"
    shutil.copytree(run.data / SET, small / SET)
    for data in copies(small, directory, count):
        damages = [
            damage_bytes,
            damage_bytes,
            change_value,
            change_value,
            replace_any,
            change_version,
            change_records,
        ]
        name = rng.choice(damages)(data / SET / VERSION, rng)
        workdir = data.parent / "run"
        if rng.random() < 0.3:
            yield train_case(run, data, workdir, name)
        else:
            shutil.copytree(run.run, workdir)
            yield evaluate_case(run, data, workdir, name)


def evaluate_case(run: Run, data: pathlib.Path, workdir: pathlib.Path, name: str) -> Case:
    """`eval` must give the same results as with undamaged data."""

    def check(result: CommandResult) -> str | None:
        same = malformed_run.evaluation(workdir, STEPS) == run.evaluated[STEPS]
        return None if same else "another evaluation"

    command = malformed_run.evaluate(workdir, data)
    return Case(f"{name}; eval", command, (str(data),), (workdir, data), check)


def train_case(run: Run, data: pathlib.Path, workdir: pathlib.Path, name: str) -> Case:
    """The first training step must have the same results as with undamaged data."""

    def check(result: CommandResult) -> str | None:
        records, expected = (
            malformed_run.read_records(w / "metrics.jsonl") for w in (workdir, run.run)
        )
        return (
            None if records == expected[:1] else f"the first step is {records}, not {expected[:1]}"
        )

    command = malformed_run.train(workdir, data, 1)
    return Case(f"{name}; train", command, (str(data),), (workdir, data), check)


# -- vocabularies ------------------------------------------------------------------------------------


def vocabulary_cases(run: Run, directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts to decode with a run whose SentencePiece model is damaged."""
    workdir = directory / "run"
    model = run.data / "synthetic_co_training" / "vocabulary.model"
    object_ = json.dumps({"type": "SentencePiece", "path": str(model), "extra_ids": 0})
    settings = (f"vocabulary={object_}", "model.vocab_size=1024")
    run_checked(malformed_run.train(workdir, run.data, 2, *settings))
    for copy in copies(workdir, directory, count):
        path = copy / "vocabulary.model"
        if rng.random() < 0.8:
            name = damage_file(path, rng.choice(BYTES), rng)
        else:
            name = replace_file(path, rng)
        yield generate_case(copy, model, name)


def generate_case(workdir: pathlib.Path, original: pathlib.Path, name: str) -> Case:
    """`generate` may succeed only with the vocabulary of the training."""
    path = workdir / "vocabulary.model"

    def check(result: CommandResult) -> str | None:
        del result
        return None if path.read_bytes() == original.read_bytes() else "another vocabulary"

    command = malformed_run.generate(workdir)
    return Case(f"vocabulary: {name}; generate", command, (str(path),), (workdir,), check)


# -- damage ------------------------------------------------------------------------------------------


def damage_bytes(version: pathlib.Path, rng: Rng) -> str:
    """Damages the bytes of any file."""
    return damage_file(rng.choice(sorted(version.iterdir())), rng.choice(BYTES), rng)


VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1,
        1.5,
        10**22,
        "",
        "x",
        "0",
        "-5",
        "17",
        "../../x",
        "/etc/passwd",
        "os.system",
    ),
    *(
        [],
        {},
        ["x"],
        ["-1"],
        ["1", "2"],
        [[]],
        {"a": 1},
        "tensorflow_datasets.nothing.Nothing",
        "\ud800",
    ),
    *("{DATASET}-{SPLIT}.x", "{SPLIT}", "train", "int64", "INT32", "evil.Evil", "1.0.0", "9.9.9"),
]


def change_value(version: pathlib.Path, rng: Rng) -> str:
    """Changes or deletes a value in one of the two JSON files."""
    path = version / rng.choice(["dataset_info.json", "features.json"])
    data = json.loads(path.read_text(encoding="utf-8"))
    node = data
    while True:
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not (isinstance(node[key], dict | list) and node[key]) or rng.random() < 0.15:
            break
        node = node[key]
    if rng.random() < 0.2:
        del node[key]
        change = "gone"
    else:
        node[key] = rng.choice(VALUES)
        change = f"{str(node[key])[:40]!a}"
    path.write_text(json.dumps(data), encoding="utf-8")
    return f"{path.name}: {key} is {change}"


def replace_any(version: pathlib.Path, rng: Rng) -> str:
    """Replaces a file or the whole version."""
    path = rng.choice([*sorted(version.iterdir()), *sorted(version.iterdir()), version])
    return replace_file(path, rng)


def replace_file(path: pathlib.Path, rng: Rng) -> str:
    """Deletes a file, or replaces it by a directory, a pipe, a dangling link or other contents."""
    kinds = ["gone", "a directory", "a pipe", "a dangling link", "text", "deep", "null"]
    kind = rng.choice(kinds)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "a directory":
        path.mkdir()
    elif kind == "a dangling link":
        path.symlink_to("nowhere")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind != "gone":
        path.write_text({"text": "hello\n", "deep": "[" * 100_000, "null": "null"}[kind])
    return f"{path.name} is {kind}"


def change_version(version: pathlib.Path, rng: Rng) -> str:
    """Adds another version, or renames the version."""
    name = rng.choice(
        ["1..0", "²", "2.0.0", "10.0.0", "1.0", "x", "1.0.0-rc", "0.9.9", "１.0.0", ".1.0.0"]
    )
    kind = rng.choice(["a copy", "an empty folder", "a file", "half a copy", "renamed"])
    target = version.with_name(name)
    if kind == "renamed":
        version.rename(target)
    elif kind == "an empty folder":
        target.mkdir()
    elif kind == "a file":
        target.write_text("x")
    else:
        shutil.copytree(version, target)
    if kind == "half a copy":
        next(target.glob("*.tfrecord*")).unlink()
    return f"the version {name} is {kind}"


def change_records(version: pathlib.Path, rng: Rng) -> str:
    """Deletes, repeats or swaps whole records of a split."""
    path, other = rng.sample(sorted(version.glob("*.tfrecord*")), 2)
    chunks = split_records(path.read_bytes())
    index = (
        rng.randrange(16) if rng.random() < 0.7 else rng.randrange(len(chunks))
    )  # `eval` reads 16
    kind = rng.choice(["gone", "twice", "none", "of another split", "swapped files"])
    if kind == "gone":
        del chunks[index]
    elif kind == "twice":
        chunks.insert(index, chunks[index])
    elif kind == "none":
        chunks = []
    elif kind == "of another split":
        chunks[index] = split_records(other.read_bytes())[0]
    else:
        chunks, chunks_of_other = split_records(other.read_bytes()), chunks
        other.write_bytes(b"".join(chunks_of_other))
    path.write_bytes(b"".join(chunks))
    return f"record {index} of {path.name}: {kind}"


def split_records(data: bytes) -> list[bytes]:
    """Splits a TFRecord file into records, including lengths and checksums."""
    chunks = []
    while data:
        size = struct.unpack("<Q", data[:8])[0] + 16
        chunks.append(data[:size])
        data = data[size:]
    return chunks
