"""Paths, atomic file writes and file errors, on disks and in Google Cloud Storage buckets."""

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

from synthesizer_jax.base.messages import end_sentence

BUCKET = "gs://"
"""The prefix of the address of every file in a bucket."""

STORAGE_LIBRARIES = ("gcsfs", "aiohttp", "requests", "google")
"""The libraries whose exceptions are errors of the storage service."""


def storage_path(address: str) -> pathlib.Path:
    """Returns the path of a file or directory on a disk or in Google Cloud Storage.

    Args:
      address: a path on a disk, or ``gs://BUCKET/…``, which becomes an `etils.epath.Path`. The form
        ``gs:/BUCKET/…`` is accepted too, because `pathlib` shortens the two slashes to one.

    Raises:
      ValueError: if the address has a different scheme, or does not name a directory in a bucket.
      ModuleNotFoundError: if a library that accesses buckets is not installed.
    """
    if not re.match("[A-Za-z][A-Za-z0-9]+:/", address):
        return pathlib.Path(address)
    address = re.sub("^gs:/+", BUCKET, address)
    if not re.match(f"{BUCKET}[a-z0-9][a-z0-9._-]+/+[^/]", address):
        raise ValueError(
            f"{address} is neither a path on a disk nor a path in Google Cloud Storage. Use "
            "DIRECTORY or gs://BUCKET/DIRECTORY."
        )
    # To access buckets, `etils.epath` needs TensorFlow or gcsfs, and Orbax needs
    # google.cloud.storage.
    can_read = is_installed("tensorflow") or is_installed("gcsfs")
    if not (can_read and is_installed("google.cloud.storage")):
        raise ModuleNotFoundError(
            f"Reading {address} needs libraries that are not installed. Install them with pip "
            "install 'synthesizer_jax[gcs]'."
        )
    # By default, TensorFlow caches the metadata of files for some seconds. A cached entry would
    # hide the changes that other processes make.
    os.environ.setdefault("GCS_STAT_CACHE_MAX_AGE", "0")
    from etils import epath

    return cast(pathlib.Path, epath.Path(address))


def is_installed(library: str) -> bool:
    """Returns whether a library can be imported."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        # `find_spec` raises this error if the parent package of the library is not installed.
        return False


def in_bucket(path: pathlib.Path) -> bool:
    """Returns whether a path is in a bucket.

    Files in buckets are always written atomically, and they cannot be renamed.
    """
    return str(path).startswith(BUCKET)


def join(directory: pathlib.Path, path: str) -> pathlib.Path:
    """Joins a directory and a path.

    A path that is absolute or in a bucket is returned unchanged.
    """
    resolved = storage_path(path)
    return resolved if in_bucket(resolved) or resolved.is_absolute() else directory / resolved


def is_storage_error(error: BaseException) -> bool:
    """Returns whether an exception is an error of the storage service.

    A missing file is not an error of the storage service.
    """
    return type(error).__module__.partition(".")[0] in STORAGE_LIBRARIES


def absolute(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute form of a path. A path in a bucket is already absolute."""
    return path if in_bucket(path) else path.absolute()


class _UnreadableError(ValueError):
    """The error that `describing` raises.

    An enclosing `describing` context does not change this error.
    """


@contextlib.contextmanager
def describing(path: pathlib.Path, remedy: str = "Restore it, or delete it.") -> Iterator[None]:
    """Context manager that raises a `ValueError` if the contents of a file cannot be read.

    Errors about missing files and missing permissions are raised unchanged. If two `describing`
    contexts are nested, only the inner one replaces the error.

    Args:
      path: the path of the file, for the error message.
      remedy: a sentence that says what the user can do. The sentence is added at the end of the
        error message.

    Raises:
      ValueError: if the contents of the file cannot be read.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, _UnreadableError):
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:250] or type(error).__name__
        raise _UnreadableError(f"{path} cannot be read: {end_sentence(reason)} {remedy}") from error


def decode_lines(file: BinaryIO, path: pathlib.Path | None) -> Iterator[str]:
    """Yields the lines of UTF-8 text without line ends and byte-order marks.

    Lines end with LF or CRLF. Other characters that could end a line, such as CR and U+2028, are
    read as text. If characters such as CR ended a line, the lines of two parallel files might not
    correspond to each other. A byte-order mark is removed from the beginning of every line, because
    a file that was concatenated from several files can contain several byte-order marks.

    Args:
      file: the file to read. The file is closed after its last line has been read.
      path: the path of the file, for error messages. `None` means standard input.

    Raises:
      ValueError: if a line is not UTF-8. The message contains the number of the line and the
        command that converts the file.
    """
    seen_utf8 = False
    with file:
        for number, line in enumerate(file, 1):
            content = line.removesuffix(b"\n").removesuffix(b"\r").removeprefix(codecs.BOM_UTF8)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = content[error.start]
                remedy = _decoding_remedy(path, seen_utf8=seen_utf8)
                raise ValueError(
                    f"{path or 'stdin'}, line {number}: the byte 0x{byte:02x} is not UTF-8. "
                    f"{remedy}"
                ) from None
            seen_utf8 = seen_utf8 or not text.isascii()
            yield text


def _decoding_remedy(path: pathlib.Path | None, *, seen_utf8: bool) -> str:
    """Returns a sentence that says how to repair a file with bytes that are not UTF-8.

    If earlier lines contain non-ASCII characters in UTF-8, the file is damaged, and a conversion
    from Latin-1 would spoil the earlier lines. For a damaged file, the returned sentence suggests a
    different repair.

    Args:
      path: the path of the file. `None` means standard input.
      seen_utf8: whether earlier lines contain non-ASCII characters.
    """
    name = "FILE" if path is None else shlex.quote(str(path))
    suffix = "" if path is None else path.suffix
    unpack = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(suffix, "cat")
    if seen_utf8:
        return (
            "Earlier lines are UTF-8, so correct this line, or remove all bytes that are not UTF-8 "
            f"({unpack} {name} | iconv -c -f utf-8 -t utf-8 > NEW)."
        )
    return (
        "If the file is in Latin-1, as Excel writes it, convert it "
        f"({unpack} {name} | iconv -f cp1252 -t utf-8 > NEW)."
    )


@contextlib.contextmanager
def open_atomic(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` when the context ends without an error.

    If `path` is in a bucket, the contents are held in memory until the context ends.

    Args:
      path: the destination. The parent directory of `path` is created if necessary.
    """
    if in_bucket(path):
        buffer = io.BytesIO()
        yield buffer
        path.write_bytes(buffer.getvalue())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with name_write_errors(path, "The file was not written"):
            with temporary.open("xb") as file:
                yield file
            # The temporary file is in the same directory as the old file, so the file system can
            # replace the old file atomically.
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary directory, which is renamed when the context ends without an error.

    Temporary directories that killed processes have left behind for the same destination are
    removed first.

    Raises:
      FileExistsError: if the destination exists and is not empty. The error can also be raised at
        the end of the context, if another process has created the destination in the meantime.
      OSError: if the disk is full.
      ValueError: if the destination is in a bucket, where directories cannot be renamed.
    """
    if in_bucket(directory):
        raise ValueError(
            f"{directory} is in a bucket, where directories cannot be renamed. Write to a disk, "
            "and copy the directory with 'gcloud storage cp'."
        )
    directory = directory.resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} already exists. Choose a new directory.")
    with name_write_errors(directory, "Nothing was written"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            # Remove an empty destination now. If the removal fails, for example because the
            # destination is a mount point, the error is raised before anything is written.
            directory.rmdir()
        with temporary_directory(directory.parent, f".{directory.name}.incomplete") as staging:
            yield staging
            try:
                staging.rename(directory)
            except OSError as error:
                if not directory.exists():
                    raise
                raise FileExistsError(
                    f"{directory} already exists, because another process has created it. Choose a "
                    "new directory."
                ) from error


@contextlib.contextmanager
def temporary_directory(parent: pathlib.Path, prefix: str) -> Iterator[pathlib.Path]:
    """Makes a directory on a disk, and removes the directory when the context ends.

    The caller may rename the directory before the context ends. A renamed directory is kept.

    Directories with the same prefix that were left behind by killed processes are removed first.

    Args:
      parent: the directory in which the temporary directory is made.
      prefix: the beginning of the name of the temporary directory.
    """
    for path in parent.iterdir():
        if not path.name.startswith(f"{prefix}-"):
            continue
        # Every process holds a lock on its temporary directory. If this process can lock a
        # directory, the process that made the directory has ended.
        lock = _try_lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    # The directory is locked before it gets its final name. When other processes can find the
    # directory, it is already locked, so other processes do not remove it.
    name = secrets.token_hex(4)
    directory = parent / f"{prefix}-{name}"
    hidden = parent / f".{name}"
    hidden.mkdir()
    lock = _try_lock(hidden)
    hidden.rename(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _try_lock(directory: pathlib.Path) -> int | None:
    """Locks a directory until the process ends or closes the returned file descriptor.

    Returns:
      The file descriptor, or `None` if the directory cannot be locked.
    """
    descriptor = None
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Another process has locked or removed the directory, or the storage does not support
        # locks.
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def write_atomic(path: pathlib.Path, content: str | bytes | Iterable[str]) -> pathlib.Path:
    """Writes a file atomically (see `open_atomic`), and returns its path.

    Args:
      path: the destination.
      content: bytes, a string, or several strings. Strings are written as UTF-8.
    """
    with open_atomic(path) as file:
        for part in [content] if isinstance(content, str | bytes) else content:
            file.write(part.encode() if isinstance(part, str) else part)
    return path


def append(path: pathlib.Path, content: bytes) -> None:
    """Appends bytes to a file.

    A file in a bucket cannot be appended to, so the whole file is written again.
    """
    if in_bucket(path):
        path.write_bytes((path.read_bytes() if path.exists() else b"") + content)
        return
    with path.open("ab") as file:
        file.write(content)


_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""The operating system's error numbers for a disk that is full, broken or not writable."""


@contextlib.contextmanager
def name_write_errors(path: pathlib.Path, outcome: str) -> Iterator[None]:
    """Context manager that replaces errors about a full or broken disk with a clear `OSError`.

    The message of Python's own error names a temporary file, or no file at all. The messages of
    some libraries contain parts of the data to be written. The message of the new error contains
    `path` and `outcome`.

    Args:
      path: the file or directory that the message names. The user should know this path, unlike the
        path of a temporary file.
      outcome: a sentence that says what has been written, such as ``Nothing was written``. The
        sentence has no full stop, because Python appends a colon and the path.
    """
    try:
        yield
    except Exception as error:
        number = _write_error(error)
        if number is None:
            raise
        reason = f"{os.strerror(number)}. {outcome}"
        raise OSError(number, reason, str(path)) from error


def _write_error(error: Exception) -> int | None:
    """Returns the operating system's error number of a write error, or `None` for other errors.

    The exceptions of some libraries (TensorStore, safetensors, ArrayRecord and TensorFlow) contain
    only the text of the operating system's error and not the error number. For these exceptions,
    the function searches the message for the operating system's text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _WRITE_ERRORS else None
    return next((number for number in _WRITE_ERRORS if os.strerror(number) in str(error)), None)


def refuse_links(directory: pathlib.Path) -> None:
    """Raises an `OSError` if a directory contains a symbolic link.

    Writing through a symbolic link would change files outside the directory.
    """
    if in_bucket(directory) or not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.is_symlink():
            raise OSError(
                f"{path} is a symbolic link. Replace it with the file or directory that it points "
                "to, or remove it."
            )
