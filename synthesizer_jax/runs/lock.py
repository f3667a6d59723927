"""A lock by which only one training at a time uses a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import IO

from synthesizer_jax.files import in_bucket
from synthesizer_jax.runtime import processes

LOCK_FILE = "train.lock"

NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class InUseError(OSError):
    """Another process trains in the directory."""


@contextlib.contextmanager
def lock_directory(
    directory: pathlib.Path, *, log: Callable[[str], None] = processes.print_line
) -> Iterator[None]:
    """Context manager that locks a directory for this process; a bucket has no locks.

    The system releases the lock when the process ends in any way. If the directory did not exist and is
    empty at the end, it is removed.

    Args:
      directory: the directory; created if it does not exist.
      log: receives a line where the file system has no locks.

    Raises:
      InUseError: another process holds the lock.
    """
    if in_bucket(directory):
        yield
        return
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK_FILE
    try:
        with _open_locked(path, log) as file:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield
            finally:
                path.unlink()
    finally:
        if made:
            with contextlib.suppress(OSError):  # not empty
                directory.rmdir()


def _open_locked(path: pathlib.Path, log: Callable[[str], None]) -> IO[str]:
    """Opens the file and locks it, if the file system supports locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        file = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read(200) or "another process"
            raise InUseError(
                f"{path.parent} is in use: {owner} trains there; wait for its end, or use another "
                "--workdir"
            ) from None
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            log(f"{path.parent}: the file system has no locks; let no other training use it")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its previous owner has removed it in the meantime
