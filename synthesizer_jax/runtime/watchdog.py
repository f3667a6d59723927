"""A watchdog that prints the stacks of all threads of a run without progress."""

from __future__ import annotations

import faulthandler
import sys
import threading
from typing import TextIO


class Watchdog:
    """Prints the stacks of all threads whenever `reset` was not called for some time.

    Args:
      seconds: time without a call of `reset`; 0 disables the watchdog.
      file: file to print to; None is the original standard error, as its replacement in notebooks may have
        no file descriptor.
    """

    def __init__(self, seconds: float, file: TextIO | None = None):
        self._seconds, self._file = seconds, file or sys.__stderr__
        self._progress, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def reset(self) -> None:
        """Restarts the timer, and starts it the first time."""
        self._progress.set()
        if self._thread is None and self._seconds and self._file is not None:
            self._thread = threading.Thread(target=self._watch, args=(self._file,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stops the timer."""
        self._closed = True
        self._progress.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, file: TextIO) -> None:
        # Not faulthandler.dump_traceback_later: it reads the frames of running threads without holding
        # Python's lock, which can crash the process.
        while not self._closed:
            if not self._progress.wait(self._seconds):
                faulthandler.dump_traceback(file, all_threads=True)
            self._progress.clear()
