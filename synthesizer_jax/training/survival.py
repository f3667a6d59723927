"""Leaving in good order when the machine is taken away."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

EXIT_PREEMPTED = 75
"""Exit code after a SIGTERM: everything is saved, start the same command again (EX_TEMPFAIL)."""


class Preempted(Exception):  # noqa: N818 - an event, not an error
    """The process was asked to stop; the caller saves and leaves with `EXIT_PREEMPTED`."""


class StopSignal:
    """Turns SIGTERM into a saved checkpoint and `EXIT_PREEMPTED`, wherever it arrives.

    Python runs signal handlers between two bytecodes of the main thread, hence not inside a long
    compilation or a data set-up. The interpreter's own C handler does write to a wake-up socket at
    once; a thread waits there. Between two training steps the loop asks `raise_if_stopped`. Work
    that may block stands inside `region(save)`, where the thread itself saves and ends the process:
    the state does not change there. Leaving a region waits for a save that has begun.

    Use as a context manager on the main thread.
    """

    def __init__(self, log: Callable[[str], None] = lambda text: print(text, file=sys.stderr)):
        self._log = log
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._save: Callable[[], None] | None = None
        self._in_region = False

    def __enter__(self) -> StopSignal:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._old_handler = signal.signal(signal.SIGTERM, lambda *_: self._stopped.set())
        self._old_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._wait, name="stop-signal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        signal.signal(signal.SIGTERM, self._old_handler)
        self._sender.close()  # ends the thread: its recv returns nothing
        self._thread.join()
        self._receiver.close()

    def raise_if_stopped(self) -> None:
        """Raises `Preempted` after a SIGTERM; called where the state is whole."""
        if self._stopped.is_set():
            raise Preempted

    @contextlib.contextmanager
    def region(self, save: Callable[[], None] | None = None) -> Iterator[None]:
        """Work that may block for long and does not change the state.

        Args:
          save: writes the state; None where there is nothing that is not saved already.
        """
        self.raise_if_stopped()
        with self._lock:
            self._save, self._in_region = save, True
        try:
            yield
        finally:
            with self._lock:
                self._save, self._in_region = None, False
        self.raise_if_stopped()

    def _wait(self) -> None:
        while numbers := self._receiver.recv(64):
            if signal.SIGTERM not in numbers:
                continue
            self._stopped.set()
            with self._lock:
                if self._in_region:
                    self._leave()

    def _leave(self) -> None:
        if self._save is not None:
            self._save()
        self._log(f"stopped by SIGTERM; exit code {EXIT_PREEMPTED}, start again to continue")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_PREEMPTED)
