"""Where a run's logs are written."""

from __future__ import annotations

import logging
import pathlib
import shutil
import tempfile
import threading

from synthesizer_jax.files import in_bucket
from synthesizer_jax.training.metrics import METRICS_FILE
from synthesizer_jax.training.storage import short
from synthesizer_jax.training.watch import EVENTS_FILE

COPY_SECONDS = 30.0
"""How often the logs of a run in a bucket are copied there between two checkpoints."""

_log = logging.getLogger(__name__)


class Logs:
    """A directory for files that grow: the run's own, or one that is copied into the run's bucket.

    Objects in a bucket cannot be appended to. There the logs lie in a temporary directory, from which those
    that have changed are copied: every `COPY_SECONDS`, and before every checkpoint. Training does not fail
    for its logs: where storage does not take them, a warning says so, and the next copy has them.

    Attributes:
      path: where to write.

    Args:
      directory: the run's.
      writes: False copies nothing: another process writes the logs.
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
        self._copying = threading.Thread(target=self._copy_often, name="logs", daemon=True)
        self._copying.start()

    def copy(self) -> None:
        """Copies what has changed to the bucket."""
        if self._copies:
            self._copy()

    def close(self) -> None:
        """Copies the rest, and removes the temporary directory unless it holds what could not be copied."""
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
                        place = self._directory / path.relative_to(self.path).as_posix()
                        place.write_bytes(path.read_bytes())
                        self._copied[path] = stamp
            except Exception as error:  # storage's, of whatever kind
                found = "%s could not be copied to %s now (%s)"
                _log.warning(found, self.path, self._directory, short(error))
                return False
        return True

    def _stamps(self) -> dict[pathlib.Path, tuple[int, int]]:
        """Size and time of every file."""
        files = {path: path.stat() for path in self.path.rglob("*") if path.is_file()}
        return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in files.items()}

    def _copy_often(self) -> None:
        while not self._closed.wait(COPY_SECONDS):
            self._copy()
