"""Attempts to import damaged files of Multi30k, a corpus of parallel lines in two languages."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator

from malformed_cases import Case, CommandResult, Rng

SIZES = {"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000}
"""The published sizes; a corpus of another size is rejected."""


def cases(directory: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields attempts; none of the damaged corpora is valid, so all must be rejected."""
    source, data = directory / "multi30k", directory / "multi30k-data"
    source.mkdir()
    data.mkdir()
    for stem, size in SIZES.items():
        for language in ("en", "de"):
            content = "".join(f"{language} {i}\n" for i in range(size))
            (source / f"{stem}.{language}").write_text(content, encoding="utf-8")
    command = ["data", "import", "multi30k", "--from", str(source), "--data-dir", str(data)]
    for _ in range(count):
        path = rng.choice(sorted(source.iterdir()))
        original = directory / "aside"
        shutil.copyfile(path, original)
        name = damage(path, rng)
        yield Case(f"multi30k, {name}", command, (path.name,), (source, data), report_import)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.replace(original, path)


def report_import(result: CommandResult) -> str:
    """Describes an import that should have been rejected."""
    return f"imported: {result.out.splitlines()[-2:]}"


def damage(path: pathlib.Path, rng: Rng) -> str:
    """Damages a file; returns a description."""
    lines = path.read_bytes().splitlines(keepends=True)
    index = rng.randrange(len(lines) - 1)
    kind = rng.choice(
        ["empty", "blank", "gone", "twice", "cut", "coding", "missing", "pipe", "directory"]
    )
    changed = {
        "empty": [*lines[:index], b"\n", *lines[index + 1 :]],
        "blank": [*lines[:index], b" \t\n", *lines[index + 1 :]],
        "gone": [*lines[:index], *lines[index + 1 :]],
        "twice": [*lines[: index + 1], *lines[index:]],
        "cut": lines[:index],
        "coding": [*lines[:index], b"gr\xfc\xdfe\n", *lines[index + 1 :]],
    }
    path.unlink()
    if kind in changed:
        path.write_bytes(b"".join(changed[kind]))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    return f"{path.name}: line {index + 1} {kind}" if kind in changed else f"{path.name}: {kind}"
