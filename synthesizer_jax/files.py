"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO


@contextlib.contextmanager
def written_aside(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its place when the block has ended; an error leaves nothing of it.

    Args:
      path: its place; the folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.unlink(missing_ok=True)  # left by a process of that number, or a link to elsewhere
    try:
        with aside.open("xb") as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_aside(path: pathlib.Path, content: str | bytes | Iterable[str]) -> pathlib.Path:
    """Writes a file beside its place and renames it when it is whole.

    Args:
      path: its place; the folder is made if need be.
      content: bytes, or texts, which are written as UTF-8.
    """
    with written_aside(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            for text in [content] if isinstance(content, str) else content:
                file.write(text.encode())
    return path
