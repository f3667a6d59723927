"""The directory to which the logs of a run are written."""

from __future__ import annotations

import logging
import pathlib
import shutil
import tempfile
import threading

from synthesizer_jax.files import in_bucket
from synthesizer_jax.messages import one_line_error
from synthesizer_jax.runs.events import EVENTS_FILE
from synthesizer_jax.runs.metrics import METRICS_FILE

COPY_SECONDS = 30.0
"""Interval at which the logs of a run in a bucket are copied to it."""

_log = logging.getLogger(__name__)


class LogDirectory:
    """A directory for log files: that of the run, or a temporary one for a run in a bucket.

    Objects in a bucket cannot be appended to. The logs are therefore written to a temporary directory, and
    changed files are copied to the bucket every `COPY_SECONDS` and before every checkpoint. If a copy
    fails, a warning is logged, and the next one is attempted as usual.

    Attributes:
      path: the directory to write to.

    Args:
      directory: directory of the run.
      writes: whether this process writes the logs; if not, nothing is copied.
    """

    def __init__(self, directory: pathlib.Path, *, writes: bool = True):
        self.path, self._directory = directory, directory
        self._copies = writes and in_bucket(directory)
        if not self._copies:
            return
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="synthesizer_jax-logs-"))
        for name in (METRICS_FILE, EVENTS_FILE):
            if (directory / name).exists():
                (self.path / name).write_bytes((directory / name).read_bytes())
        self._copied = self._stamps()
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._copying = threading.Thread(target=self._copy_regularly, name="logs", daemon=True)
        self._copying.start()

    def copy(self) -> None:
        """Copies changed files to the bucket."""
        if self._copies:
            self._copy()

    def close(self) -> None:
        """Copies changed files and, if that succeeds, removes the temporary directory."""
        if not self._copies:
            return
        self._closed.set()
        self._copying.join()
        if self._copy():
            shutil.rmtree(self.path)

    def _copy(self) -> bool:
        with self._lock:
            try:
                for path, stamp in self._stamps().items():
                    if self._copied.get(path) != stamp:
                        target = self._directory / path.relative_to(self.path).as_posix()
                        target.write_bytes(path.read_bytes())
                        self._copied[path] = stamp
            except Exception as error:  # errors of storage have many types
                found = "%s could not be copied to %s now (%s)"
                _log.warning(found, self.path, self._directory, one_line_error(error))
                return False
        return True

    def _stamps(self) -> dict[pathlib.Path, tuple[int, int]]:
        """Returns size and modification time of every file."""
        files = {path: path.stat() for path in self.path.rglob("*") if path.is_file()}
        return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in files.items()}

    def _copy_regularly(self) -> None:
        while not self._closed.wait(COPY_SECONDS):
            self._copy()
