"""Paths and atomic file writes, on disks and in Google Cloud Storage buckets."""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import importlib.util
import io
import os
import pathlib
import re
import secrets
import shlex
import shutil
from collections.abc import Iterable, Iterator
from typing import BinaryIO, cast

BUCKET = "gs://"

STORAGE_LIBRARIES = ("gcsfs", "aiohttp", "requests", "google")
"""The libraries whose exceptions are errors of the storage service."""


def storage_path(address: str) -> pathlib.Path:
    """Returns the path of a file or directory on a disk or in Google Cloud Storage.

    Args:
      address: a path, or ``gs://BUCKET/…``, for an `etils.epath.Path`; ``gs:/BUCKET/…``, as `pathlib`
        writes it, is accepted too.

    Raises:
      ValueError: the address has another scheme, or does not name a directory in a bucket.
      ModuleNotFoundError: a library that accesses buckets is not installed.
    """
    if not re.match("[A-Za-z][A-Za-z0-9]+:/", address):
        return pathlib.Path(address)
    address = re.sub("^gs:/+", BUCKET, address)
    if not re.match(f"{BUCKET}[a-z0-9][a-z0-9._-]+/+[^/]", address):
        raise ValueError(
            f"{address} is not a path on a disk or in Google Cloud Storage; use DIRECTORY or "
            "gs://BUCKET/DIRECTORY"
        )
    # `etils.epath` needs one of the first two, Orbax the third.
    can_read = is_installed("tensorflow") or is_installed("gcsfs")
    if not (can_read and is_installed("google.cloud.storage")):
        raise ModuleNotFoundError(
            f"reading {address} needs libraries that are not installed: pip install 'synthesizer_jax[gcs]'"
        )
    # By default TensorFlow caches the metadata of files for some seconds, and would not see changes.
    os.environ.setdefault("GCS_STAT_CACHE_MAX_AGE", "0")
    from etils import epath

    return cast(pathlib.Path, epath.Path(address))


def is_installed(library: str) -> bool:
    """Returns whether a library can be imported."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def in_bucket(path: pathlib.Path) -> bool:
    """Returns whether a path is in a bucket, where objects are written atomically and never renamed."""
    return str(path).startswith(BUCKET)


def join(directory: pathlib.Path, path: str) -> pathlib.Path:
    """Joins a directory and a path; returns the path if it is absolute or in a bucket."""
    resolved = storage_path(path)
    return resolved if in_bucket(resolved) or resolved.is_absolute() else directory / resolved


def is_storage_error(error: BaseException) -> bool:
    """Returns whether an exception is an error of the storage service; missing files are not."""
    return type(error).__module__.partition(".")[0] in STORAGE_LIBRARIES


def absolute(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute path; paths in buckets are absolute already."""
    return path if in_bucket(path) else path.absolute()


@contextlib.contextmanager
def describing(path: pathlib.Path, remedy: str = "restore it, or delete it") -> Iterator[None]:
    """Context manager of reading a file: raises errors of its contents as a `ValueError` with its path."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:250] or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}; {remedy}") from error


def decode_lines(file: BinaryIO, path: pathlib.Path | None) -> Iterator[str]:
    """Yields the lines of UTF-8 text without their ends, LF or CRLF, and without byte-order marks.

    A CR or U+2028 is text, so that the lines of two files that belong together stay together. A line that
    is not the first begins with a byte-order mark if files with marks were joined.

    Args:
      file: the file, which is closed in the end.
      path: the path of the file, for errors; None: it is the standard input.

    Raises:
      ValueError: a line is not UTF-8. The message has the line and the command that converts the file.
    """
    seen_utf8 = False
    with file:
        for number, line in enumerate(file, 1):
            content = line.removesuffix(b"\n").removesuffix(b"\r").removeprefix(codecs.BOM_UTF8)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                where, byte = f"{path or 'stdin'}, line {number}", content[error.start]
                remedy = _decoding_remedy(path, seen_utf8=seen_utf8)
                raise ValueError(f"{where}: the byte 0x{byte:02x} is not UTF-8; {remedy}") from None
            seen_utf8 = seen_utf8 or not text.isascii()
            yield text


def _decoding_remedy(path: pathlib.Path | None, *, seen_utf8: bool) -> str:
    """Returns what to do about a file with bytes that are not UTF-8.

    A file of which earlier lines are UTF-8 with other characters than ASCII is damaged. Conversion from
    Latin-1 would spoil these lines.
    """
    name = "FILE" if path is None else shlex.quote(str(path))
    unpack = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get("" if path is None else path.suffix, "cat")
    if seen_utf8:
        return (
            "earlier lines are UTF-8, so correct this one, or leave such bytes out: "
            f"{unpack} {name} | iconv -c -f utf-8 -t utf-8 > NEW"
        )
    return (
        "if the file is Latin-1, as Excel writes it, convert it: "
        f"{unpack} {name} | iconv -f cp1252 -t utf-8 > NEW"
    )


@contextlib.contextmanager
def open_atomic(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces `path` when the context ends without an error.

    A file in a bucket is buffered in memory until then.

    Args:
      path: the destination; its directory is created if necessary.
    """
    if in_bucket(path):
        buffer = io.BytesIO()
        yield buffer
        path.write_bytes(buffer.getvalue())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with name_write_errors(path, "the file is not written"):
            with temporary.open("xb") as file:
                yield file
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a directory that gets its name when the context ends without an error.

    What a killed process has left of the same directory is removed first.

    Raises:
      FileExistsError: the destination exists and is not empty, at the start or, because another process
        has made it, in the end.
      OSError: the disk is full.
      ValueError: it is in a bucket, where directories cannot be renamed.
    """
    if in_bucket(directory):
        raise ValueError(
            f"{directory} is in a bucket; write to a disk, and copy it with 'gcloud storage cp'"
        )
    directory = directory.resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists; give a new directory")
    with name_write_errors(directory, "nothing was written"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            directory.rmdir()  # fails for a mounted one now, and not when everything is written
        with temporary_directory(directory.parent, f".{directory.name}.incomplete") as staging:
            yield staging
            try:
                staging.rename(directory)
            except OSError as error:
                if not directory.exists():
                    raise
                reason = f"{directory} exists, as another process has made it; give a new directory"
                raise FileExistsError(reason) from error


@contextlib.contextmanager
def temporary_directory(parent: pathlib.Path, prefix: str) -> Iterator[pathlib.Path]:
    """Makes a directory on a disk that is removed when the context ends, if it is still there.

    Those with the same prefix of the name that killed processes have left are removed first.
    """
    for path in parent.iterdir():
        if path.name.startswith(f"{prefix}-") and (lock := _try_lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    name = secrets.token_hex(4)
    directory, unlocked = parent / f"{prefix}-{name}", parent / f".{name}"
    unlocked.mkdir()
    lock = _try_lock(unlocked)
    unlocked.rename(directory)  # from here on others may find it, and see that it is locked
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _try_lock(directory: pathlib.Path) -> int | None:
    """Returns a descriptor that locks a directory while the process lives; None if it cannot be locked."""
    descriptor = None
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it or has removed it, or the storage has no locks
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def write_atomic(path: pathlib.Path, content: str | bytes | Iterable[str]) -> pathlib.Path:
    """Writes bytes, or one or more strings as UTF-8, as `open_atomic` does, and returns the path."""
    with open_atomic(path) as file:
        for part in [content] if isinstance(content, str | bytes) else content:
            file.write(part.encode() if isinstance(part, str) else part)
    return path


def append(path: pathlib.Path, content: bytes) -> None:
    """Appends to a file; in a bucket, where that is impossible, the whole file is written again."""
    if in_bucket(path):
        path.write_bytes((path.read_bytes() if path.exists() else b"") + content)
        return
    with path.open("ab") as file:
        file.write(content)


_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Errors of a disk that is full, broken or not writable."""


@contextlib.contextmanager
def name_write_errors(path: pathlib.Path, outcome: str) -> Iterator[None]:
    """Context manager that raises the errors of a full disk as one `OSError`, with a path and the outcome.

    Python's error does not name the file, or it names a temporary one. Those of libraries are dumps of
    what they wrote.

    Args:
      path: the file or directory that the user knows.
      outcome: what is there now, such as ``what was finished is kept``.
    """
    try:
        yield
    except Exception as error:
        number = _write_error(error)
        if number is None:
            raise
        raise OSError(number, f"{os.strerror(number)}; {outcome}", str(path)) from error


def _write_error(error: Exception) -> int | None:
    """Returns the number of the operating system's error that writing has failed with; None: another error.

    Exceptions of libraries have only its text: those of TensorStore, safetensors, ArrayRecord, TensorFlow.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _WRITE_ERRORS else None
    return next((number for number in _WRITE_ERRORS if os.strerror(number) in str(error)), None)


def refuse_links(directory: pathlib.Path) -> None:
    """Raises an `OSError` for a link in a directory, through which what is written would go elsewhere."""
    if in_bucket(directory) or not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.is_symlink():
            raise OSError(f"{path} is a link; put what it points to in its place, or remove it")
