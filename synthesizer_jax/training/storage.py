"""What storage promises, and what errors say of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

import jax
from etils import epath

from synthesizer_jax.data.pipeline import OtherStreamError
from synthesizer_jax.files import in_bucket, is_storage_error
from synthesizer_jax.training.contents import DamagedError

COMMITTED = "commit_success.txt"
"""Orbax's file in a finished checkpoint; where storage has no atomic rename it alone tells one."""

MOUNTS = pathlib.Path("/proc/mounts")

NO_ANSWER = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|"
    "[Pp]ermission denied|Input/output error|Stale file handle|Too many open files|Connection|"
    r"HTTP response code (?:401|403|408|429|5\d\d)|libcurl"
)
"""What readers say when storage does not answer; they raise the same kinds of errors for damaged files."""


def is_damage(error: Exception) -> bool:
    """Whether an error may come from damaged files; not from storage, memory or a user's mistake."""
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
    """The error itself, or an `OSError` where readers say by another that storage did not answer."""
    unclear = is_storage_error(error) or NO_ANSWER.search(str(error)) is not None
    if isinstance(error, OSError) or not unclear:
        return error
    return OSError(
        f"{directory} cannot be read now ({short(error)}); it was left as it is: look at its permissions "
        "and the storage, and start again"
    )


def short(error: Exception) -> str:
    """An error in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def check_regular(path: pathlib.Path) -> None:
    """Raises an `OSError` where something is there that is no regular file; a pipe would be waited for."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file; move it away, or put the file in its place")


def renames_atomically(directory: pathlib.Path) -> bool:
    """Whether a rename in a directory happens at once, or not at all.

    It does not in a bucket, mounted with FUSE (gcsfuse, s3fs, …) or not: there every object is copied and
    then deleted, and a process that is killed leaves half a checkpoint under its final name.
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
    """Whether a directory with a checkpoint's final name holds a whole checkpoint."""
    return renames_atomically(checkpoint.parent) or (checkpoint / COMMITTED).exists()


def remove_unfinished(checkpoint: pathlib.Path) -> None:
    """Removes what a save that was cut off has left under a checkpoint's final name."""
    if checkpoint.exists() and not is_committed(checkpoint):
        epath.Path(checkpoint).rmtree()


def set_aside(checkpoint: pathlib.Path, aside: pathlib.Path) -> None:
    """Renames a damaged checkpoint, which counts as finished under neither name meanwhile."""
    if not renames_atomically(checkpoint.parent):
        (checkpoint / COMMITTED).unlink(missing_ok=True)
    checkpoint.rename(aside)


class _PatientLoop(asyncio.SelectorEventLoop):
    """An event loop that is closed when everything begun on it has ended."""

    def close(self) -> None:
        if not self.is_closed() and (begun := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.wait(begun))
        super().close()


class _PatientLoops(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _PatientLoop()


@contextlib.contextmanager
def reads_ended() -> Iterator[None]:
    """Ends every read that Orbax begins within, before its event loop is closed.

    Orbax raises the first error of many reads; each of the others would print a traceback.
    """
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_PatientLoops())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
