"""The lock that prevents two training processes from using the same run directory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import socket
from collections.abc import Iterator

from synthesizer_jax.base.files import in_bucket, refuse_links

LOCK_FILE = "train.lock"

_log = logging.getLogger(__name__)


class InUseError(OSError):
    """The error that is raised if another process is training in the run directory."""


@contextlib.contextmanager
def lock_directory(directory: pathlib.Path) -> Iterator[None]:
    """Context manager that creates a run directory and locks it for this process.

    The operating system releases the lock when the process ends, even if it crashes. The lock file
    stays in the directory. Buckets have no file locks, so a run in a bucket is not locked. If the
    file system does not support locks, a warning is logged and the run is not locked.

    Args:
      directory: the run directory.

    Raises:
      InUseError: another process holds the lock.
      OSError: the directory contains symbolic links.
    """
    if in_bucket(directory):
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    refuse_links(directory)
    with (directory / LOCK_FILE).open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(200) or "another process"
            raise InUseError(
                f"{directory} is in use: {owner} trains there. Wait until the training ends, or "
                "use another --workdir."
            ) from None
        except OSError as error:
            message = "%s cannot be locked (%s). Make sure that no other process trains there."
            _log.warning(message, directory, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
