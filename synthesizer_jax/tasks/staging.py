"""A staging directory in which data sets are written before they are installed atomically.

The staging directory is in the data directory, so that installing a data set is a rename. Its owner
holds a lock on it as long as the process lives. A staging directory whose lock nobody holds was
left by a killed process; the next process rolls it back and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import TextIO

from synthesizer_jax.files import in_bucket, write_atomic
from synthesizer_jax.tasks.storage import keep_splits

PREFIX = ".import-"
NEW, OLD = "data", "old"
LOCK, PLAN = "owner.lock", "plan.json"

_log = logging.getLogger(__name__)


class Staging:
    """A directory for data sets that are not yet installed.

    Attributes:
      folder: the staging directory, for temporary files.
      data: a TFDS data directory in it, for the new data sets.
      data_dir: the data directory that the new data sets are installed in.
    """

    def __init__(self, folder: pathlib.Path, data_dir: pathlib.Path):
        self.folder, self.data, self.data_dir = folder, folder / NEW, data_dir

    def commit(self, directories: Sequence[pathlib.Path], *, renew: bool = False) -> None:
        """Moves finished data sets to their final directories, where they replace or complete others.

        A plan is written first. If a rename fails, the completed ones are undone; if the process is
        killed, the next call of `staging` undoes them.

        Args:
          directories: version directories in `data`.
          renew: see `keep_splits`.

        Raises:
          ValueError: see `keep_splits`; no data set was changed.
          OSError: a directory cannot be written; no data set was changed.
        """
        names = [str(new.relative_to(self.data)) for new in directories]
        for name in names:
            _check_writable(self.data_dir / name)
            keep_splits(self.data_dir / name, self.data / name, renew=renew)
        plan = self.folder / PLAN
        write_atomic(plan, json.dumps(names))
        try:
            for name in names:
                target = self.data_dir / name
                if target.exists():
                    _move(target, self.folder / OLD / name)
                _move(self.data / name, target)
        except BaseException:
            _roll_back(self.folder, self.data_dir)
            raise
        plan.unlink()  # this commits the new data sets


@contextlib.contextmanager
def staging(data_dir: pathlib.Path, name: str) -> Iterator[Staging]:
    """Context manager of a temporary staging directory.

    First rolls back and removes the staging directories of killed processes.

    Args:
      data_dir: a TFDS data directory; created if it does not exist.
      name: of what is written; part of the staging directory's name.

    Raises:
      ValueError: the directory is in a bucket.
      OSError: something cannot be written; the error names the file, or else the directory.
    """
    check_on_disk(data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    _recover(data_dir)
    folder, lock = _create_locked(data_dir, name)
    with lock:
        try:
            yield Staging(folder, data_dir)
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(
                error.errno, f"{error.strerror}; no data set was changed", str(folder)
            ) from error
        finally:
            if not (folder / PLAN).exists():  # else the rollback failed: the next process retries
                shutil.rmtree(folder, ignore_errors=True)  # the next process removes what is left


def check_on_disk(data_dir: pathlib.Path) -> None:
    """Raises a `ValueError` if the data directory is in a bucket; buckets are read-only."""
    if in_bucket(data_dir):
        raise ValueError(
            f"data sets are not written to a bucket ({data_dir}); write them to a directory and copy it: "
            f"gcloud storage cp --recursive 'DIRECTORY/*' {data_dir}/"
        )


def _recover(data_dir: pathlib.Path) -> None:
    """Rolls back and removes what killed processes left.

    Staging directories of running processes are left alone.
    """
    for folder in sorted(data_dir.glob(f"{PREFIX}*")):
        lock = None if folder.is_symlink() or not folder.is_dir() else _try_lock(folder)
        if lock is None:
            continue
        with lock:
            _roll_back(folder, data_dir)
            shutil.rmtree(folder, ignore_errors=True)
        _log.warning("removed %s, which an interrupted import had left", folder)


def _roll_back(folder: pathlib.Path, data_dir: pathlib.Path) -> None:
    """Moves new data sets back to the staging directory, and the replaced ones to where they were.

    It may be interrupted and repeated at any point.

    Raises:
      ValueError: the plan is damaged, or names a directory outside of `data_dir`.
    """
    plan = folder / PLAN
    if not plan.exists():
        return
    for name in reversed(_read_plan(plan, data_dir)):
        target, new, old = data_dir / name, folder / NEW / name, folder / OLD / name
        if target.exists() and not new.exists():
            _move(target, new)
        if old.exists() and not target.exists():
            _move(old, target)
        for parent in target.parents[: len(pathlib.PurePath(name).parts) - 1]:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
    plan.unlink()


def _read_plan(plan: pathlib.Path, data_dir: pathlib.Path) -> list[str]:
    """Returns the names in a plan.

    Raises:
      ValueError: the plan is damaged, or names a directory outside of `data_dir`. Such a file was
        not written by `Staging.commit` and must not cause anything to be moved.
    """
    try:
        names = json.loads(plan.read_text(encoding="utf-8"))
        paths = [pathlib.PurePosixPath(name) for name in names]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{plan} is damaged ({error}); move {plan.parent} away") from error
    for path in paths:
        inside = (data_dir / path.parent).resolve().is_relative_to(data_dir.resolve())
        if not inside or ".." in path.parts or not path.parts:
            raise ValueError(f"{plan} names {path}, outside of {data_dir}; move {plan.parent} away")
    return names


def _create_locked(data_dir: pathlib.Path, name: str) -> tuple[pathlib.Path, TextIO]:
    """Returns a new staging directory and the lock on it."""
    while True:
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=data_dir))
        lock = _try_lock(folder)
        if lock is not None and (folder / LOCK).exists():  # not removed by a `_recover` meanwhile
            return folder, lock


def _try_lock(folder: pathlib.Path) -> TextIO | None:
    """Returns the lock on a directory, which ends with the process; None if another has it."""
    try:
        lock = (folder / LOCK).open("a", encoding="utf-8")
    except FileNotFoundError:  # its owner has just removed the directory
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _check_writable(directory: pathlib.Path) -> None:
    """Raises an `OSError` if the directory cannot be created or replaced."""
    parent = next(parent for parent in directory.parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent} is no folder; move it away; no data set was changed")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{parent} is not writable; no data set was changed")


def _move(source: pathlib.Path, target: pathlib.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)
