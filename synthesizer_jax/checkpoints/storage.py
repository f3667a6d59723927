"""Properties of storage, and classification of its errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

import jax
from etils import epath

from synthesizer_jax.checkpoints.contents import DamagedError
from synthesizer_jax.data.pipeline import OtherStreamError
from synthesizer_jax.files import in_bucket, is_storage_error
from synthesizer_jax.messages import one_line_error

COMMITTED = "commit_success.txt"
"""Orbax's file that marks a finished checkpoint on storage without atomic renames."""

MOUNTS = pathlib.Path("/proc/mounts")

NO_ANSWER = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|"
    "[Pp]ermission denied|Input/output error|Stale file handle|Too many open files|Connection|"
    r"HTTP response code (?:401|403|408|429|5\d\d)|libcurl"
)
"""Messages of storage failures; readers raise errors of the same types for damaged files."""


def is_damage(error: Exception) -> bool:
    """Whether an error may be due to damaged files, not to storage, memory or the configuration."""
    if isinstance(error, DamagedError):
        return True
    if is_storage_error(error):
        return False
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    if isinstance(error, MemoryError | jax.errors.JaxRuntimeError | OtherStreamError):
        return False
    return NO_ANSWER.search(str(error)) is None


def as_storage_error(error: Exception, directory: pathlib.Path) -> Exception:
    """Returns an `OSError` for a storage failure that a reader reports by another type; else the error."""
    unclear = is_storage_error(error) or NO_ANSWER.search(str(error)) is not None
    if isinstance(error, OSError) or not unclear:
        return error
    return OSError(
        f"{directory} cannot be read now ({one_line_error(error)}); nothing was changed; check its "
        "permissions and the storage, then start again"
    )


def renames_atomically(directory: pathlib.Path) -> bool:
    """Whether renaming is atomic in a directory.

    It is not in a bucket, also if that is mounted with FUSE (gcsfuse, s3fs, …): every object is copied and
    then deleted, so a killed process leaves part of a checkpoint under its final name.
    """
    if in_bucket(directory):
        return False
    if not MOUNTS.exists():
        return True
    kinds = {}
    for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        _, place, kind, *_ = line.split(" ")
        kinds[pathlib.Path(place.replace("\\040", " "))] = kind
    real = pathlib.Path(os.path.realpath(directory))
    kind = next((kinds[p] for p in (real, *real.parents) if p in kinds), "")
    return not kind.startswith("fuse")


def is_committed(checkpoint: pathlib.Path) -> bool:
    """Whether a directory with a checkpoint's final name contains a complete checkpoint."""
    return renames_atomically(checkpoint.parent) or (checkpoint / COMMITTED).exists()


def remove_unfinished(checkpoint: pathlib.Path) -> None:
    """Removes what an interrupted save left under a checkpoint's final name."""
    if checkpoint.exists() and not is_committed(checkpoint):
        epath.Path(checkpoint).rmtree()


def set_aside(checkpoint: pathlib.Path, aside: pathlib.Path) -> None:
    """Renames a damaged checkpoint, without it being finished under either name in the meantime."""
    if not renames_atomically(checkpoint.parent):
        (checkpoint / COMMITTED).unlink(missing_ok=True)
    checkpoint.rename(aside)


class _WaitingLoop(asyncio.SelectorEventLoop):
    """An event loop whose `close` waits for all of its tasks."""

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.wait(tasks))
        super().close()


class _WaitingLoopPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _WaitingLoop()


@contextlib.contextmanager
def finish_tasks() -> Iterator[None]:
    """Context manager that waits for all reads and writes of Orbax before their event loop is closed.

    Orbax raises the first error of many concurrent ones; each of the others would print a traceback.
    """
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_WaitingLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
