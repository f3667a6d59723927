"""A lock by which only one training at a time uses a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from synthesizer_jax.files import in_bucket
from synthesizer_jax.runs.lease import hold_lease
from synthesizer_jax.runs.owner import (
    BEAT_SECONDS,
    DEAD_SECONDS,
    InUseError,
    Owner,
    describe_process,
    machine_id,
)
from synthesizer_jax.runtime import processes

LOCK_FILE = "train.lock"

NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def lock_directory(
    directory: pathlib.Path, *, log: Callable[[str], None] = processes.print_line
) -> Iterator[None]:
    """Context manager that locks a directory for this process.

    On a local disk and on shared file systems with locks, this is a lock of the system, which is released
    when the process ends in any way. For other file systems the owner also writes to the lock file every
    `BEAT_SECONDS`; a lock of another machine that was not renewed for `DEAD_SECONDS` has expired. A bucket
    has a `lease`. If the directory did not exist and is empty at the end, it is removed.

    Args:
      directory: the directory; created if it does not exist.
      log: receives a line before waiting for the lock of another machine to expire.

    Raises:
      InUseError: another process holds the lock.
    """
    if in_bucket(directory):
        with hold_lease(directory, LOCK_FILE, log=log):
            yield
        return
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path, closed = directory / LOCK_FILE, threading.Event()
    try:
        with _open_locked(path) as file:
            _wait_for_dead_owner(file, path, log)
            _write_heartbeat(file)
            beats = threading.Thread(
                target=_heartbeat, args=(file, closed), name="lock", daemon=True
            )
            beats.start()
            try:
                yield
            finally:
                closed.set()
                beats.join()
                path.unlink()
    finally:
        if made:
            with contextlib.suppress(OSError):  # not empty
                directory.rmdir()


def _open_locked(path: pathlib.Path) -> IO[str]:
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
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its previous owner has removed it in the meantime


def _wait_for_dead_owner(file: IO[str], path: pathlib.Path, log: Callable[[str], None]) -> None:
    """Waits until the lock of another machine has expired."""
    owner, last = _read_owner(file), path.stat().st_mtime
    if owner.get("machine") in (None, machine_id()):
        return
    log(
        f"{path.parent} is locked by a training on {owner.get('host')}; waiting until its lock has not "
        f"been renewed for {DEAD_SECONDS:.0f} s"
    )
    while _storage_time(path) - last < DEAD_SECONDS:
        time.sleep(1.0)
        if path.stat().st_mtime != last:
            raise InUseError(path.parent, _read_owner(file))


def _storage_time(path: pathlib.Path) -> float:
    """Returns the current time by the clock of the file system of `path`."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.touch()
    now = beside.stat().st_mtime
    beside.unlink()
    return now


def _heartbeat(file: IO[str], closed: threading.Event) -> None:
    """Renews the lock until `closed`."""
    while not closed.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):  # the next attempt may succeed
            _write_heartbeat(file)


def _write_heartbeat(file: IO[str]) -> None:
    """Writes the owner over the old content, so that readers never find the file empty."""
    file.seek(0)
    file.write(json.dumps(describe_process()))
    file.truncate()


def _read_owner(file: IO[str]) -> Owner:
    """Returns the owner in the file; an empty dictionary if there is none."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
