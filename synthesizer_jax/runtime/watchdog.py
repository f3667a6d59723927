"""A watchdog that prints the stacks of all threads of a run without progress."""

from __future__ import annotations

import faulthandler
import sys
from typing import TextIO


class Watchdog:
    """Prints the stacks of all threads whenever `reset` was not called for some time.

    Args:
      seconds: time without a call of `reset`; 0 disables the watchdog.
      file: file to print to; None is the original standard error, as its replacement in notebooks may have
        no file descriptor.
    """

    def __init__(self, seconds: float, file: TextIO | None = None):
        self._seconds, self._file = seconds, sys.__stderr__ if file is None else file

    def reset(self) -> None:
        """Restarts the timer."""
        if self._seconds and self._file is not None:
            faulthandler.dump_traceback_later(self._seconds, repeat=True, file=self._file)

    def close(self) -> None:
        """Stops the timer."""
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
