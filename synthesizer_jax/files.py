"""Paths and atomic file writes, on disks and in Google Cloud Storage buckets."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Protocol, cast

BUCKET = "gs://"

READERS = ("tensorflow", "gcsfs")
"""`etils.epath` needs one of these to access buckets; Orbax also needs ``google.cloud.storage``."""

STORAGE_MODULES = (
    "gcsfs.",
    "aiohttp.",
    "requests.",
    "google.auth.",
    "google.api_core.",
    "google.cloud.",
)
"""Prefixes of the modules whose exceptions are errors of the storage service."""


class _BucketStat(Protocol):
    """The result of `stat` for a path in a bucket, an `etils.epath.Path`."""

    length: int


def storage_path(address: str) -> pathlib.Path:
    """Returns the path of a file or directory on a disk or in Google Cloud Storage.

    A path in a bucket is an `etils.epath.Path`, which has the methods of `pathlib.Path` that this package
    uses.

    Args:
      address: a path, or ``gs://BUCKET/…``; ``gs:/BUCKET/…``, as `pathlib` writes it, is accepted too.

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
    if not (any(map(is_installed, READERS)) and is_installed("google.cloud.storage")):
        raise ModuleNotFoundError(
            f"reading {address} needs libraries that are not installed: "
            "pip install 'synthesizer_jax[gcs]'"
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
    """Returns whether a path is in a bucket, where objects are written atomically and never renamed.

    Raises:
      ValueError: the path is a bucket's address that `pathlib` has normalized to ``gs:/BUCKET/…``, which
        would be a local directory.
    """
    address = str(path)
    if address.startswith("gs:/") and not address.startswith(BUCKET):
        raise ValueError(
            f"{address} is a local path; create paths in buckets with files.storage_path('gs://…')"
        )
    return address.startswith(BUCKET)


def size_of(path: pathlib.Path) -> int:
    """Returns the size of a file in bytes."""
    if in_bucket(path):
        return int(cast(_BucketStat, path.stat()).length)
    return path.stat().st_size


def join(directory: pathlib.Path, path: str) -> pathlib.Path:
    """Joins a directory and a path; returns the path if it is absolute or in a bucket."""
    resolved = storage_path(path)
    return resolved if in_bucket(resolved) or resolved.is_absolute() else directory / resolved


def is_storage_error(error: BaseException) -> bool:
    """Returns whether an exception is an error of the storage service; missing files are not."""
    return type(error).__module__.startswith(STORAGE_MODULES)


def absolute(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute path; paths in buckets are absolute already."""
    return path if in_bucket(path) else path.absolute()


@contextlib.contextmanager
def describing(path: pathlib.Path, remedy: str = "restore it, or delete it") -> Iterator[None]:
    """Context manager of reading a file: what is wrong with its contents is said with its path.

    Args:
      path: the file that is read.
      remedy: the end of the message.

    Raises:
      ValueError: the file is damaged, or is not what it should be.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        OSError,
        RuntimeError,
    ) as error:
        reason = str(error).partition("\n")[0][:250] or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}; {remedy}") from error


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
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # left by an earlier process with this id, or a symbolic link
    try:
        with temporary.open("xb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a directory that appears under its name when the context ends without an error.

    What a killed process has left of the same directory is removed first.

    Args:
      directory: the destination, which does not exist or is empty.

    Yields:
      A directory beside it to write to.

    Raises:
      FileExistsError: the destination exists and is not empty.
      OSError: something cannot be written, such as for want of space; it names the directory or a file.
      ValueError: it is in a bucket, where directories cannot be renamed.
    """
    directory = absolute(directory)
    if not in_bucket(directory):
        directory = directory.resolve()
    else:
        raise ValueError(
            f"{directory} is in a bucket; write to a disk, and copy it with 'gcloud storage cp'"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists; give a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    if directory.exists():
        directory.rmdir()  # fails for a mounted one now, and not when everything is written
    with temporary_directory(directory.parent, f".{directory.name}.incomplete") as staging:
        try:
            yield staging
            staging.rename(directory)
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            sentence = f"{error.strerror}; nothing was written"
            raise OSError(error.errno, sentence, str(directory)) from error


@contextlib.contextmanager
def temporary_directory(parent: pathlib.Path, prefix: str) -> Iterator[pathlib.Path]:
    """Makes a directory that is removed when the context ends, if it is still there.

    Those of the same prefix that killed processes have left are removed first.

    Args:
      parent: the directory to make it in, on a disk.
      prefix: of its name; the rest is random.
    """
    pattern = re.compile(rf"{re.escape(prefix)}-[0-9a-f]{{8}}")
    for path in parent.iterdir():
        if pattern.fullmatch(path.name) and (lock := _try_lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    name = f"{prefix}-{secrets.token_hex(4)}"
    unlocked = parent / f"{name}.new"  # another process does not remove it before it is locked
    unlocked.mkdir()
    lock = _try_lock(unlocked)
    directory = unlocked.rename(parent / name)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _try_lock(directory: pathlib.Path) -> int | None:
    """Returns a descriptor that locks a directory while the process lives; None if it cannot be locked."""
    with contextlib.suppress(OSError):  # another process has it, or the storage has no locks
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    return None


def share_file(path: pathlib.Path) -> None:
    """Lets those read a file who may read its directory; safetensors writes files for the owner alone."""
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o666)


def write_atomic(path: pathlib.Path, content: str | bytes | Iterable[str]) -> pathlib.Path:
    """Writes a file atomically: to a temporary file that is renamed when it is complete.

    Args:
      path: the destination; its directory is created if necessary.
      content: bytes, or one or more strings, which are encoded as UTF-8.

    Returns:
      `path`.
    """
    with open_atomic(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            for string in [content] if isinstance(content, str) else content:
                file.write(string.encode())
    return path


def append(path: pathlib.Path, content: bytes) -> None:
    """Appends to a file; in a bucket, where that is impossible, the whole file is written again."""
    if in_bucket(path):
        path.write_bytes((path.read_bytes() if path.exists() else b"") + content)
        return
    with path.open("ab") as file:
        file.write(content)


@contextlib.contextmanager
def name_write_errors(directory: pathlib.Path) -> Iterator[None]:
    """Names a directory in errors of writing to it that name no file, as those of a full disk.

    Raises:
      OSError: in the place of one without a path, or of the `ValueError` that TensorStore raises.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else getattr(error, "errno", None)
        if number is None or getattr(error, "filename", None) is not None:
            raise
        kept = f"{os.strerror(number)}; what was finished is kept"
        raise OSError(number, kept, str(directory)) from error


def refuse_links(directory: pathlib.Path) -> None:
    """Raises an `OSError` for a link in a directory, through which what is written would go elsewhere."""
    if in_bucket(directory) or not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.is_symlink():
            raise OSError(f"{path} is a link; put what it points to in its place, or remove it")


def check_regular(path: pathlib.Path) -> None:
    """Raises an `OSError` if the path exists but is not a regular file; opening a pipe would block."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file; move it away or replace it by a file")
