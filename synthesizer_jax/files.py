"""Files that are whole or not there, on disks and in buckets."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

BUCKET = "gs://"

READERS = ("tensorflow", "gcsfs")
"""`etils.epath` needs one of them for buckets; Orbax needs ``google.cloud.storage`` as well."""


TALKERS = ("gcsfs.", "aiohttp.", "requests.", "google.auth.", "google.api_core.", "google.cloud.")
"""Modules whose errors are storage's."""


def storage_path(text: str) -> pathlib.Path:
    """The path of a file or directory, on a disk or ``gs://BUCKET/…`` in Google Cloud Storage.

    A path in a bucket is an `etils.epath.Path`, which has the methods of a `pathlib.Path` that this package
    uses. What `pathlib` makes of such an address, ``gs:/BUCKET/…``, is understood too.

    Raises:
      ValueError: it is an address of another kind, or names no directory in a bucket.
      ModuleNotFoundError: what reads buckets is not installed.
    """
    if not re.match("[A-Za-z][A-Za-z0-9]+:/", text):
        return pathlib.Path(text)
    text = re.sub("^gs:/+", BUCKET, text)
    if not re.match(f"{BUCKET}[a-z0-9][a-z0-9._-]+/+[^/]", text):
        raise ValueError(
            f"{text} is no path on a disk or in Google Cloud Storage; give DIRECTORY, or gs://BUCKET/DIRECTORY"
        )
    if not (any(map(is_installed, READERS)) and is_installed("google.cloud.storage")):
        raise ModuleNotFoundError(
            f"what reads {text} is not installed: pip install 'synthesizer_jax[gcs]'"
        )
    # TensorFlow would take what was just removed, or has grown, for what it was some seconds ago.
    os.environ.setdefault("GCS_STAT_CACHE_MAX_AGE", "0")
    from etils import epath

    return cast(pathlib.Path, epath.Path(text))


def is_installed(library: str) -> bool:
    """Whether a library can be imported."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # not even the package that it belongs to
        return False


def in_bucket(path: pathlib.Path) -> bool:
    """Whether a path leads into a bucket, where objects appear whole, are never renamed nor appended to.

    Raises:
      ValueError: it is what `pathlib` makes of an address, which would be a directory on this machine.
    """
    text = str(path)
    if text.startswith("gs:/") and not text.startswith(BUCKET):
        raise ValueError(
            f"{text} is not an address any more; make it with files.storage_path('gs://…')"
        )
    return text.startswith(BUCKET)


def size_of(path: pathlib.Path) -> int:
    """Bytes of a file."""
    found: Any = path.stat()
    return int(found.length if in_bucket(path) else found.st_size)  # epath's names are its own


def join(directory: pathlib.Path, path: str) -> pathlib.Path:
    """What a path means in a directory: a file in it, or a path of its own if it is absolute."""
    own = storage_path(path)
    return own if in_bucket(own) or own.is_absolute() else directory / own


def is_storage_error(error: BaseException) -> bool:
    """Whether an error is of a library that talks to buckets; what is not there is `FileNotFoundError`."""
    return type(error).__module__.startswith(TALKERS)


def absolute(path: pathlib.Path) -> pathlib.Path:
    """The path from the root of its storage."""
    return path if in_bucket(path) else path.absolute()


@contextlib.contextmanager
def written_aside(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its place when the block has ended; an error leaves nothing of it.

    What goes into a bucket is held in memory until then.

    Args:
      path: its place; the folder is made if need be.
    """
    if in_bucket(path):
        memory = io.BytesIO()
        yield memory
        path.write_bytes(memory.getvalue())
        return
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
