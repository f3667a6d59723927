"""Damaged files of Multi30k, whose two languages belong together line by line."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator

from malformed_cases import Case, Dice, Said

SIZES = {"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000}
"""The published ones: a corpus of another size is refused."""


def cases(place: pathlib.Path, dice: Dice, count: int) -> Iterator[Case]:
    """None of these can be read as the corpus, so that every one must be refused."""
    source, data = place / "multi30k", place / "multi30k-data"
    source.mkdir()
    data.mkdir()
    for stem, size in SIZES.items():
        for language in ("en", "de"):
            text = "".join(f"{language} {i}\n" for i in range(size))
            (source / f"{stem}.{language}").write_text(text, encoding="utf-8")
    command = ["data", "import", "multi30k", "--from", str(source), "--data-dir", str(data)]
    for _ in range(count):
        path = dice.choice(sorted(source.iterdir()))
        aside = place / "aside"
        shutil.copyfile(path, aside)
        name = damage(path, dice)
        yield Case(f"multi30k, {name}", command, (path.name,), (source, data), refused)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.replace(aside, path)


def refused(said: Said) -> str:
    """What is wrong with any import of these."""
    return f"imported: {said.out.splitlines()[-2:]}"


def damage(path: pathlib.Path, dice: Dice) -> str:
    """One damage; says which."""
    lines = path.read_bytes().splitlines(keepends=True)
    place = dice.randrange(len(lines) - 1)
    kind = dice.choice(
        ["empty", "blank", "gone", "twice", "cut", "coding", "missing", "pipe", "directory"]
    )
    changed = {
        "empty": [*lines[:place], b"\n", *lines[place + 1 :]],
        "blank": [*lines[:place], b" \t\n", *lines[place + 1 :]],
        "gone": [*lines[:place], *lines[place + 1 :]],
        "twice": [*lines[: place + 1], *lines[place:]],
        "cut": lines[:place],
        "coding": [*lines[:place], b"gr\xfc\xdfe\n", *lines[place + 1 :]],
    }
    path.unlink()
    if kind in changed:
        path.write_bytes(b"".join(changed[kind]))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    return f"{path.name}: line {place + 1} {kind}" if kind in changed else f"{path.name}: {kind}"
