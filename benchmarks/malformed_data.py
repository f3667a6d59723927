"""Damaged TFDS data sets and vocabularies, with which a run is evaluated, trained and decoded."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import struct
from collections.abc import Iterator
from typing import Any

import malformed_run
from malformed_cases import BYTES, Case, Dice, Said, damage_file, good
from malformed_run import STEPS, Run, copies

SET = pathlib.Path("embedded_co_training", "sst2")
VERSION = "1.0.0"


def cases(place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """A fifth are vocabularies."""
    run = malformed_run.make(place)
    vocabularies = count // 5
    yield from stored(run, place / "stored", dice, count - vocabularies)
    yield from vocabulary(run, place / "vocabulary", dice, vocabularies)


# -- TFDS files --------------------------------------------------------------------------------------


def stored(run: Run, place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """The validation split is evaluated, the training split trained on."""
    small = place / "data"
    shutil.copytree(run.data / SET, small / SET)
    for data in copies(small, place, count):
        damages = [
            damage_bytes,
            damage_bytes,
            change_value,
            change_value,
            put_other,
            put_version,
            records,
        ]
        name = dice.choice(damages)(data / SET / VERSION, dice)
        workdir = data.parent / "run"
        if dice.random() < 0.3:
            yield trained(run, data, workdir, name)
        else:
            shutil.copytree(run.run, workdir)
            yield evaluated(run, data, workdir, name)


def evaluated(run: Run, data: pathlib.Path, workdir: pathlib.Path, name: str) -> Case:
    """`eval` gives what it gave with the good data."""

    def check(said: Said) -> str | None:
        same = malformed_run.evaluation(workdir, STEPS) == run.evaluated[STEPS]
        return None if same else "another evaluation"

    command = malformed_run.evaluate(workdir, data)
    return Case(f"{name}; eval", command, (str(data),), (workdir, data), check)


def trained(run: Run, data: pathlib.Path, workdir: pathlib.Path, name: str) -> Case:
    """The first step reads and learns what it did with the good data."""

    def check(said: Said) -> str | None:
        mine, theirs = (malformed_run.records(w / "metrics.jsonl") for w in (workdir, run.run))
        return None if mine == theirs[:1] else f"the first step is {mine}, not {theirs[:1]}"

    command = malformed_run.train(workdir, data, 1)
    return Case(f"{name}; train", command, (str(data),), (workdir, data), check)


# -- vocabularies ------------------------------------------------------------------------------------


def vocabulary(run: Run, place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """The SentencePiece model of a run that is decoded with."""
    workdir = place / "run"
    model = run.data / "embedded_co_training" / "vocabulary.model"
    object_ = json.dumps({"type": "SentencePiece", "path": str(model), "extra_ids": 0})
    settings = (f"vocabulary={object_}", "model.vocab_size=1024")
    good(malformed_run.train(workdir, run.data, 2, *settings))
    for copy in copies(workdir, place, count):
        path = copy / "vocabulary.model"
        if dice.random() < 0.8:
            name = damage_file(path, dice.choice(BYTES), dice)
        else:
            name = put_in_place(path, dice)
        yield decoded(copy, model, name)


def decoded(workdir: pathlib.Path, original: pathlib.Path, name: str) -> Case:
    """Only the model that the run was trained with gives its answers."""
    path = workdir / "vocabulary.model"

    def check(said: Said) -> str | None:
        del said
        return None if path.read_bytes() == original.read_bytes() else "another vocabulary"

    command = malformed_run.generate(workdir)
    return Case(f"vocabulary: {name}; generate", command, (str(path),), (workdir,), check)


# -- damage ------------------------------------------------------------------------------------------


def damage_bytes(version: pathlib.Path, dice: Dice) -> str:
    """Any file's."""
    return damage_file(dice.choice(sorted(version.iterdir())), dice.choice(BYTES), dice)


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


def change_value(version: pathlib.Path, dice: Dice) -> str:
    """A value of one of the two JSON files."""
    path = version / dice.choice(["dataset_info.json", "features.json"])
    data = json.loads(path.read_text(encoding="utf-8"))
    inside = data
    while True:
        key = (
            dice.choice(sorted(inside)) if isinstance(inside, dict) else dice.randrange(len(inside))
        )
        if not (isinstance(inside[key], dict | list) and inside[key]) or dice.random() < 0.15:
            break
        inside = inside[key]
    if dice.random() < 0.2:
        del inside[key]
        what = "gone"
    else:
        inside[key] = dice.choice(VALUES)
        what = f"{str(inside[key])[:40]!a}"
    path.write_text(json.dumps(data), encoding="utf-8")
    return f"{path.name}: {key} is {what}"


def put_other(version: pathlib.Path, dice: Dice) -> str:
    """A file is something else, or the whole version is."""
    path = dice.choice([*sorted(version.iterdir()), *sorted(version.iterdir()), version])
    return put_in_place(path, dice)


def put_in_place(path: pathlib.Path, dice: Dice) -> str:
    """Gone, a directory, a pipe, a link to nowhere, or other contents."""
    kinds = ["gone", "a directory", "a pipe", "a dangling link", "text", "deep", "null"]
    kind = dice.choice(kinds)
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


def put_version(version: pathlib.Path, dice: Dice) -> str:
    """Something beside the version, or in its place."""
    name = dice.choice(
        ["1..0", "²", "2.0.0", "10.0.0", "1.0", "x", "1.0.0-rc", "0.9.9", "１.0.0", ".1.0.0"]
    )
    kind = dice.choice(["a copy", "an empty folder", "a file", "half a copy", "renamed"])
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


def records(version: pathlib.Path, dice: Dice) -> str:
    """Whole records of a split: one gone, one twice, none, those of another split."""
    path, other = dice.sample(sorted(version.glob("*.tfrecord*")), 2)
    found = split(path.read_bytes())
    place = (
        dice.randrange(16) if dice.random() < 0.7 else dice.randrange(len(found))
    )  # `eval` reads 16
    kind = dice.choice(["gone", "twice", "none", "of another split", "swapped files"])
    if kind == "gone":
        del found[place]
    elif kind == "twice":
        found.insert(place, found[place])
    elif kind == "none":
        found = []
    elif kind == "of another split":
        found[place] = split(other.read_bytes())[0]
    else:
        found, theirs = split(other.read_bytes()), found
        other.write_bytes(b"".join(theirs))
    path.write_bytes(b"".join(found))
    return f"record {place} of {path.name}: {kind}"


def split(data: bytes) -> list[bytes]:
    """The records of a TFRecord file, with lengths and checksums."""
    found = []
    while data:
        size = struct.unpack("<Q", data[:8])[0] + 16
        found.append(data[:size])
        data = data[size:]
    return found
