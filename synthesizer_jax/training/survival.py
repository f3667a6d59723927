"""Leaving in good order when the machine is taken away."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import jax

from synthesizer_jax.sharding import hosts

EXIT_PREEMPTED = 75
"""Exit code after a SIGTERM: everything is saved, start the same command again (EX_TEMPFAIL)."""

NEWS = "stop"
NEWS_SECONDS = 1.0
"""How often a process asks whether another one was told to stop."""


def leave_on_sigterm() -> None:
    """Until a `StopSignal` listens there is nothing to save: SIGTERM ends the process as it is."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_PREEMPTED))


class Preempted(Exception):  # noqa: N818 - an event, not an error
    """The process was asked to stop; the caller saves and leaves with `EXIT_PREEMPTED`."""


class StopSignal:
    """Turns SIGTERM into a saved checkpoint and `EXIT_PREEMPTED`, wherever it arrives.

    Python runs signal handlers between two bytecodes of the main thread, hence not inside a long
    compilation or a data set-up. The interpreter's own C handler does write to a wake-up socket at
    once; a thread waits there. Between two training steps the loop asks `stopped`. Work that may
    block stands inside `region(save)`, where the thread itself saves and ends the process: the state
    does not change there. Leaving a region waits for a save that has begun.

    Of several processes all leave together, whichever of them got the signal: it tells the others,
    which take it for their own. All save the same state, because in a region they agree before they
    save, each by its thread or where it enters or leaves, and the loop agrees step by step.

    Use as a context manager on the main thread.
    """

    def __init__(self, log: Callable[[str], None] = lambda text: print(text, file=sys.stderr)):
        self._log = log
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._closed = threading.Event()
        self._save: Callable[[], None] | None = None
        self._region: hosts.Occasion | None = None

    def __enter__(self) -> StopSignal:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._old_handler = signal.signal(signal.SIGTERM, lambda *_: self._stopped.set())
        self._old_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._threads = [threading.Thread(target=self._wait, name="stop-signal", daemon=True)]
        if hosts.count() > 1:
            self._threads.append(threading.Thread(target=self._ask, name="stop-news", daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        signal.signal(signal.SIGTERM, self._old_handler)
        self._closed.set()
        self._sender.close()  # ends the thread: its recv returns nothing
        for thread in self._threads:
            thread.join()
        self._receiver.close()

    @property
    def stopped(self) -> bool:
        """Whether this process knows of a SIGTERM; another one of the group may not know yet."""
        return self._stopped.is_set()

    @contextlib.contextmanager
    def region(self, save: Callable[[], None] | None = None) -> Iterator[None]:
        """Work that may block for long and does not change the state.

        Args:
          save: writes the state; None where there is nothing that is not saved already.
        """
        occasion = hosts.Occasion("region")
        with self._lock:
            stopped = self.stopped
            if not stopped:
                self._save, self._region = save, occasion
        if stopped:
            occasion.everyone(True)
            raise Preempted
        try:
            yield
        except BaseException:
            with self._lock:
                self._save = self._region = None
            raise
        with self._lock:  # from here on the thread leaves the answer to this one
            self._save = self._region = None
        if any(occasion.everyone(self.stopped)):
            raise Preempted

    def _wait(self) -> None:
        while numbers := self._receiver.recv(64):
            if signal.SIGTERM not in numbers:
                continue
            self._stopped.set()
            if hosts.count() > 1:
                hosts.tell(NEWS)
            with self._lock:
                if self._region is not None:
                    self._region.everyone(True)
                    self._leave()

    def _ask(self) -> None:
        """Passes the news of another process's SIGTERM on to `_wait`."""
        while not self._closed.wait(NEWS_SECONDS):
            if hosts.told(NEWS):
                with contextlib.suppress(OSError):  # closed in the meantime
                    self._sender.send(bytes([signal.SIGTERM]))
                return

    def _leave(self) -> None:
        if self._save is not None:
            self._save()
        self._log(f"stopped by SIGTERM; exit code {EXIT_PREEMPTED}, start again to continue")
        sys.stdout.flush()
        sys.stderr.flush()
        jax.distributed.shutdown()  # waits for the others; alone, it does nothing
        os._exit(EXIT_PREEMPTED)
