"""New data sets are written aside and put into place together, all of them or none.

A staging folder lies beside the data sets that it replaces, so that putting them into place is
renaming. While its owner lives it holds a lock on it; a folder that nobody holds is what a killed
process left, and the next one rolls it back and removes it.
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

from synthesizer_jax.files import in_bucket, write_aside

PREFIX = ".import-"
NEW, OLD = "data", "old"
LOCK, PLAN = "owner.lock", "plan.json"

_log = logging.getLogger(__name__)


class Staging:
    """A folder in which new data sets wait for their place.

    Attributes:
      folder: for whatever else is needed on the way.
      data: a TFDS data directory, for the new data sets.
      data_dir: the data directory that they will be put into.
    """

    def __init__(self, folder: pathlib.Path, data_dir: pathlib.Path):
        self.folder, self.data, self.data_dir = folder, folder / NEW, data_dir

    def put(self, directories: Sequence[pathlib.Path]) -> None:
        """Renames finished data sets into their places; those that are there give way.

        What is to be done is written down first. If a renaming fails, those that were done are
        undone; if the process is killed, the next `staging` undoes them.

        Args:
          directories: of versions, in `data`.

        Raises:
          OSError: a place cannot be written; everything is as before.
        """
        names = [str(new.relative_to(self.data)) for new in directories]
        for name in names:
            _check_place(self.data_dir / name)
        plan = self.folder / PLAN
        write_aside(plan, json.dumps(names))
        try:
            for name in names:
                place = self.data_dir / name
                if place.exists():
                    _move(place, self.folder / OLD / name)
                _move(self.data / name, place)
        except BaseException:
            roll_back(self.folder, self.data_dir)
            raise
        plan.unlink()  # from here on the new data sets count


@contextlib.contextmanager
def staging(data_dir: pathlib.Path, name: str) -> Iterator[Staging]:
    """A staging folder that is gone at the end, after what killed processes left has been undone.

    Args:
      data_dir: a TFDS data directory; made if need be.
      name: of what is written, a part of the folder's name.

    Raises:
      ValueError: the directory is in a bucket.
      OSError: something cannot be written; it names the file, or else the folder.
    """
    check_on_disk(data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    recover(data_dir)
    folder, lock = _claim(data_dir, name)
    with lock:
        try:
            yield Staging(folder, data_dir)
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(
                error.errno, f"{error.strerror}; every data set is as before", str(folder)
            ) from error
        finally:
            if not (folder / PLAN).exists():  # else undoing failed: the next one tries again
                shutil.rmtree(folder)


def check_on_disk(data_dir: pathlib.Path) -> None:
    """Raises a `ValueError` where data sets cannot be written: buckets are read only."""
    if in_bucket(data_dir):
        raise ValueError(
            f"data sets are not written to a bucket ({data_dir}); write them to a directory and copy it: "
            f"gcloud storage cp --recursive 'DIRECTORY/*' {data_dir}/"
        )


def recover(data_dir: pathlib.Path) -> None:
    """Undoes and removes what killed processes left; folders of living ones are left alone."""
    for folder in sorted(data_dir.glob(f"{PREFIX}*")):
        lock = None if folder.is_symlink() or not (folder / LOCK).exists() else _hold(folder)
        if lock is None:
            continue
        with lock:
            roll_back(folder, data_dir)
            shutil.rmtree(folder)
        _log.warning("removed %s, which an interrupted import had left", folder)


def roll_back(folder: pathlib.Path, data_dir: pathlib.Path) -> None:
    """Takes new data sets out of their places again, and puts the earlier ones back.

    May be interrupted and done again at any point.

    Raises:
      ValueError: the plan is damaged, or names a place outside of `data_dir`.
    """
    plan = folder / PLAN
    if not plan.exists():
        return
    for name in reversed(_planned(plan, data_dir)):
        place, new, old = data_dir / name, folder / NEW / name, folder / OLD / name
        if place.exists() and not new.exists():
            _move(place, new)
        if old.exists() and not place.exists():
            _move(old, place)
        for parent in place.parents[: len(pathlib.PurePath(name).parts) - 1]:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
    plan.unlink()


def _planned(plan: pathlib.Path, data_dir: pathlib.Path) -> list[str]:
    """The names in a plan; a file that was not written here must not move anything elsewhere."""
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


def _claim(data_dir: pathlib.Path, name: str) -> tuple[pathlib.Path, TextIO]:
    """A new staging folder and the lock on it."""
    while True:
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=data_dir))
        lock = _hold(folder)
        if lock is not None and (folder / LOCK).exists():  # not taken for a dead one meanwhile
            return folder, lock


def _hold(folder: pathlib.Path) -> TextIO | None:
    """The lock on a folder, which ends with the process; None if another process has it."""
    try:
        lock = (folder / LOCK).open("a", encoding="utf-8")
    except FileNotFoundError:  # its owner has just removed it
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _check_place(place: pathlib.Path) -> None:
    """Raises an `OSError` if nothing can be put there."""
    parent = next(parent for parent in place.parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(
            f"{parent} is no folder; move it away; every data set is as before"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{parent} is not writable for you; every data set is as before")


def _move(source: pathlib.Path, target: pathlib.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)
