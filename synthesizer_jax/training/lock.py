"""One training at a time in a directory."""

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
from typing import IO, Any

from synthesizer_jax.files import in_bucket
from synthesizer_jax.sharding import hosts
from synthesizer_jax.training.lease import leased
from synthesizer_jax.training.owner import BEAT_SECONDS, DEAD_SECONDS, InUseError, machine, myself

LOCK_FILE = "train.lock"

NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def locked(directory: pathlib.Path, *, log: Callable[[str], None] = hosts.say) -> Iterator[None]:
    """Holds a directory for this process, until it ends in whatever way.

    On this machine, and on shared file systems that lock for all, the system's own lock says who holds it,
    and drops it when the process dies. Elsewhere the owner writes to the file every `BEAT_SECONDS`; one on
    another machine that has not done so for `DEAD_SECONDS` counts as dead. A bucket has a `lease`.
    A directory that did not exist, and in which nothing was made, is removed again.

    Args:
      directory: made if need be.
      log: takes a line before it is found out whether an owner is dead.

    Raises:
      InUseError: another process holds it.
    """
    if in_bucket(directory):
        with leased(directory, LOCK_FILE, log=log):
            yield
        return
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path, closed = directory / LOCK_FILE, threading.Event()
    try:
        with open_locked(path) as file:
            wait_for_the_dead(file, path, log)
            show_life(file)
            beats = threading.Thread(target=beat, args=(file, closed), name="lock", daemon=True)
            beats.start()
            try:
                yield
            finally:
                closed.set()
                beats.join()
                path.unlink()
    finally:
        if made:
            with contextlib.suppress(OSError):  # something lies in it: the run has begun
                directory.rmdir()


def open_locked(path: pathlib.Path) -> IO[str]:
    """Opens the file with the system's lock on it, where the file system has such locks."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(path.parent, read_owner(file)) from None
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its last owner has removed it in the meantime


def wait_for_the_dead(file: IO[str], path: pathlib.Path, log: Callable[[str], None]) -> None:
    """Returns when the machine that the file names shows no sign of life, or is this one."""
    owner, last = read_owner(file), path.stat().st_mtime
    if owner.get("machine") in (None, machine()):
        return
    log(
        f"{path.parent} is held by a training on {owner.get('host')}; waiting until that has shown no "
        f"sign of life for {DEAD_SECONDS:.0f} s"
    )
    while storage_time(path) - last < DEAD_SECONDS:
        time.sleep(1.0)
        if path.stat().st_mtime != last:
            raise InUseError(path.parent, read_owner(file))


def storage_time(path: pathlib.Path) -> float:
    """The present time by the clock that stamps the files beside `path`."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.touch()
    now = beside.stat().st_mtime
    beside.unlink()
    return now


def beat(file: IO[str], closed: threading.Event) -> None:
    """Writes the sign of life until `closed`."""
    while not closed.wait(BEAT_SECONDS):
        with contextlib.suppress(
            OSError
        ):  # storage does not answer now; the next beat may reach it
            show_life(file)


def show_life(file: IO[str]) -> None:
    """Writes who holds the lock, over what was there: a reader never finds the file empty."""
    file.seek(0)
    file.write(json.dumps(myself()))
    file.truncate()


def read_owner(file: IO[str]) -> dict[str, Any]:
    """Who wrote the file; empty where nobody has."""
    file.seek(0)
    try:
        owner = json.loads(file.read())
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
