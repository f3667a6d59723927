"""A lock by which only one training at a time uses a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import IO

from synthesizer_jax.files import in_bucket, refuse_links
from synthesizer_jax.runs.lease import hold_lease
from synthesizer_jax.runs.owner import InUseError, Owner, describe_process
from synthesizer_jax.runtime import processes

LOCK_FILE = "train.lock"

NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def lock_directory(
    directory: pathlib.Path, *, log: Callable[[str], None] = processes.print_line
) -> Iterator[None]:
    """Context manager that locks a directory for this process.

    On a disk, this is a lock of the system, which is released when the process ends in any way; a bucket
    has a `lease`. If the directory did not exist and is empty at the end, it is removed.

    Args:
      directory: the directory; created if it does not exist.
      log: receives a line where the file system has no locks, or before waiting for a lease to expire.

    Raises:
      InUseError: another process holds the lock.
      OSError: the directory holds a link, see `refuse_links`.
    """
    if in_bucket(directory):
        with hold_lease(directory, LOCK_FILE, log=log):
            yield
        return
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    refuse_links(directory)
    path = directory / LOCK_FILE
    try:
        with _open_locked(path, log) as file:
            file.truncate(0)
            file.write(json.dumps(describe_process()))
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
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(path.parent, _read_owner(file)) from None
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            log(f"{path.parent}: the file system has no locks; let no other training use it")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its previous owner has removed it in the meantime


def _read_owner(file: IO[str]) -> Owner:
    """Returns the owner in the file; an empty dictionary if there is none."""
    try:
        owner = json.loads(file.read())
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}
