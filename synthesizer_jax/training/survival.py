"""Leaving in good order when the machine is taken away, or the user presses Ctrl-C."""

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

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
"""Exit codes after a signal, everything saved. SIGTERM's says: start the same command again (EX_TEMPFAIL);
SIGINT's is that of shells, and says that somebody wanted it to end."""

EXIT_PREEMPTED = EXIT_CODES[signal.SIGTERM]

NEWS = "stop"
FROM_OTHERS = 128
"""Added to the number of a signal that another process got."""
NEWS_SECONDS = 1.0
"""How often a process asks whether another one was told to stop."""


def leave_on_signals() -> None:
    """Until a `StopSignal` listens there is nothing to save: a signal ends the process as it is."""
    for number, code in EXIT_CODES.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_, code=code: os._exit(code))


class Preempted(Exception):  # noqa: N818 - an event, not an error
    """The process was asked to stop by a signal; the caller saves and leaves with `exit_code`."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")

    @property
    def exit_code(self) -> int:
        """Of the process, see `EXIT_CODES`."""
        return EXIT_CODES[self.signal]


class StopSignal:
    """Turns SIGTERM and SIGINT (Ctrl-C) into a saved checkpoint and an exit code, wherever they arrive.

    Python runs signal handlers between two bytecodes of the main thread, hence not inside a long
    compilation or a data set-up. The interpreter's own C handler does write to a wake-up socket at
    once; a thread waits there. Between two training steps the loop asks what was `received`. Work that may
    block stands inside `region(save)`, where another thread saves and ends the process: the state
    does not change there. Leaving a region waits for a save that has begun. A second SIGINT ends the
    process at once, whatever is not saved yet.

    Of several processes all leave together, whichever of them got the signal: it tells the others,
    which take it for their own. All save the same state, because in a region they agree before they
    save, each by its thread or where it enters or leaves, and the loop agrees step by step.

    Use as a context manager on the main thread. A signal that the process was told to ignore (`nohup`,
    a shell's background) stays ignored. In a notebook or an interactive interpreter the process is not
    ended: a region goes on to its end, and a second SIGINT is a `KeyboardInterrupt`.
    """

    def __init__(self, log: Callable[[str], None] = hosts.say):
        self._log = log
        self._ends_process = not hasattr(sys, "ps1") and "ipykernel" not in sys.modules
        self._lock = threading.Lock()
        self._received = 0
        self._closed = threading.Event()
        self._save: Callable[[], None] | None = None
        self._region: hosts.Occasion | None = None

    def __enter__(self) -> StopSignal:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._old_handlers = {
            number: signal.signal(number, self._note)
            for number in EXIT_CODES
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._old_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._threads = [threading.Thread(target=self._wait, name="stop-signal", daemon=True)]
        if hosts.count() > 1:
            self._threads.append(threading.Thread(target=self._ask, name="stop-news", daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._closed.set()
        self._sender.close()  # ends the thread: its recv returns nothing
        for thread in self._threads:
            thread.join()
        self._receiver.close()

    @property
    def received(self) -> int:
        """The number of the signal that this process knows of; 0: none. Others may know of one."""
        return self._received

    @contextlib.contextmanager
    def region(self, save: Callable[[], None] | None = None) -> Iterator[None]:
        """Work that may block for long and does not change the state.

        Args:
          save: writes the state; None where there is nothing that is not saved already.
        """
        occasion = hosts.Occasion("region")
        with self._lock:
            received = self.received
            if not received:
                self._save, self._region = save, occasion
        if received:
            raise Preempted(max(occasion.everyone(received)))
        try:
            yield
        except BaseException:
            with self._lock:
                self._save = self._region = None
            raise
        with self._lock:  # from here on the thread leaves the answer to this one
            self._save = self._region = None
        if agreed := max(occasion.everyone(self.received)):
            raise Preempted(agreed)

    def _note(self, number: int, _: object = None) -> None:
        if self._received and not self._ends_process:
            raise KeyboardInterrupt
        self._received = self._received or number

    def _wait(self) -> None:
        interrupts, first = 0, 0
        while numbers := self._receiver.recv(64):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1 and self._ends_process:
                self._log("stopped by a second Ctrl-C; steps since the last checkpoint are lost")
                os._exit(EXIT_CODES[signal.SIGINT])
            if first == 0:
                first = next((n % FROM_OTHERS for n in numbers if n % FROM_OTHERS in EXIT_CODES), 0)
                if first:
                    self._received = self._received or first
                    threading.Thread(target=self._leave_region, daemon=True).start()

    def _leave_region(self) -> None:
        if hosts.count() > 1:
            hosts.tell(NEWS, str(self.received))
        with self._lock:
            if self._region is not None and self._ends_process:
                self._leave(Preempted(max(self._region.everyone(self.received))))

    def _ask(self) -> None:
        """Passes the news of another process's signal on to `_wait`."""
        while not self._closed.wait(NEWS_SECONDS):
            if (number := hosts.told(NEWS)) is not None:
                with contextlib.suppress(OSError):  # closed in the meantime
                    self._sender.send(bytes([FROM_OTHERS + int(number)]))
                return

    def _leave(self, preempted: Preempted) -> None:
        if self._save is not None:
            self._save()
        self._log(farewell(preempted))
        sys.stdout.flush()
        sys.stderr.flush()
        jax.distributed.shutdown()  # waits for the others; alone, it does nothing
        os._exit(preempted.exit_code)


def close_within(seconds: float, what: str, close: Callable[[], None]) -> None:
    """Closes something, and goes on without it when that takes too long.

    Args:
      seconds: until it is left as it is, with a line on standard error.
      what: its name in that line.
      close: raises what it likes.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"close {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        hosts.say(f"closing {what} has not ended within {seconds:.0f} s; it is left as it is")
    if errors:
        raise errors[0]


def farewell(preempted: Preempted) -> str:
    """What is said at the end of a run that a signal stopped."""
    return f"{preempted}; everything is saved, start the same command again to continue"
