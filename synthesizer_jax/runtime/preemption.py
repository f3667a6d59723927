"""Saving and exiting when the machine is preempted or the user presses Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from synthesizer_jax.runtime import processes

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
"""Exit codes after a signal, when the state is saved. That of SIGTERM is EX_TEMPFAIL: start the same
command again. That of SIGINT is the code of shells: a user stopped the run."""


def exit_on_signals() -> None:
    """Makes signals end the process immediately, until a `StopSignal` handles them."""
    for number, code in EXIT_CODES.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_, code=code: os._exit(code))


class Preempted(Exception):  # noqa: N818 - an event, not an error
    """The process received a signal to stop; the caller saves and exits with `exit_code`."""

    def __init__(self, number: int, *, trained: bool = True):
        self.signal = signal.Signals(number)
        state = "everything is saved" if trained else "nothing has been trained yet"
        super().__init__(f"stopped by {self.signal.name}; {state}, start the same command again")

    @property
    def exit_code(self) -> int:
        """Exit code of the process, see `EXIT_CODES`."""
        return EXIT_CODES[self.signal]


class StopSignal:
    """Context manager that lets a run save a checkpoint and exit after SIGTERM or SIGINT (Ctrl-C).

    Python runs signal handlers between two bytecodes of the main thread, and therefore not during a long
    compilation. The interpreter's C handler, however, immediately writes to a wake-up socket, on which a
    thread waits. Between two steps the training loop checks `received`. Work that may block is executed
    inside `region()`, where the state is saved or there is none, and where another thread ends the process.
    A second SIGINT ends the process immediately, without saving.

    Several processes stop together, after a step: in every step they compare what they have received. What
    they do in a region they do to its end.

    It must be used on the main thread. A signal that is ignored (`nohup`, a background process of a shell)
    remains ignored. In a notebook or an interactive interpreter the process is not ended: a region runs to
    its end, and a second SIGINT raises `KeyboardInterrupt`.

    The caller sets `trained`, whether the run has a state that its next start continues. Before the process
    ends in a region, `release` is called.
    """

    def __init__(self, release: Callable[[], None] = lambda: None):
        self.trained, self._release = True, release
        self._ends_process = not hasattr(sys, "ps1") and "ipykernel" not in sys.modules
        self._lock = threading.Lock()
        self._received = 0
        self._in_region = False

    def __enter__(self) -> StopSignal:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._old_handlers = {
            number: signal.signal(number, self._record)
            for number in EXIT_CODES
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._old_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(
            target=self._wait_for_signals, name="stop-signal", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._sender.close()  # ends the thread: its recv returns no bytes
        self._thread.join()
        self._receiver.close()

    @property
    def received(self) -> int:
        """The number of the signal that this process has received; 0 is none."""
        return self._received

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Context manager for work that may block for long, while the state is saved or there is none.

        Raises:
          Preempted: a signal was received.
        """
        if processes.process_count() > 1:
            yield
            return
        with self._lock:
            self._raise_if_received()
            self._in_region = True
        try:
            yield
        finally:
            with self._lock:  # from here on this thread handles signals
                self._in_region = False
        self._raise_if_received()

    def _raise_if_received(self) -> None:
        if self._received:
            raise Preempted(self._received, trained=self.trained)

    def _record(self, number: int, _: object = None) -> None:
        if self._received and not self._ends_process:
            raise KeyboardInterrupt
        self._received = self._received or number

    def _wait_for_signals(self) -> None:
        interrupts = 0
        while numbers := self._receiver.recv(64):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1 and self._ends_process:
                processes.print_line(
                    "stopped by a second Ctrl-C; steps since the last checkpoint are lost"
                )
                os._exit(EXIT_CODES[signal.SIGINT])
            first = next((number for number in numbers if number in EXIT_CODES), 0)
            self._received = self._received or first
            with self._lock:
                if first and self._in_region and self._ends_process:
                    self._exit(Preempted(self._received, trained=self.trained))

    def _exit(self, preempted: Preempted) -> None:
        self._release()
        processes.print_line(str(preempted))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(preempted.exit_code)


def close_within(seconds: float, what: str, close: Callable[[], None]) -> None:
    """Calls a function, and returns without waiting any longer after a timeout.

    Args:
      seconds: the timeout, after which a line is printed to standard error.
      what: name of what is closed, for that line.
      close: the function; its errors are raised.
    """
    if not processes.Call(close).wait(seconds):
        processes.print_line(
            f"closing {what} has not ended within {seconds:.0f} s; it is left as it is"
        )
