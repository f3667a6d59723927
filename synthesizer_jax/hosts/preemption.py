"""Saves the state and exits if the machine is preempted or the user presses Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from synthesizer_jax.hosts import processes

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
"""The exit code for each signal, with which the process exits after the state is saved.

The exit code for SIGTERM is EX_TEMPFAIL, which means that the same command should be started again.
Shells report the exit code for SIGINT when the user has stopped a program with Ctrl-C.
"""


class Preempted(Exception):  # noqa: N818 - an event, not an error
    """Raised when the process has received a signal to stop.

    The code that catches the exception saves the state and exits with `exit_code`.
    """

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(
            f"The process was stopped by {self.signal.name}. Everything is saved. Start the same "
            "command again to continue."
        )

    @property
    def exit_code(self) -> int:
        """The exit code of the process (see `EXIT_CODES`)."""
        return EXIT_CODES[self.signal]


class StopSignal:
    """Context manager that lets a run save a checkpoint and exit after SIGTERM or SIGINT (Ctrl-C).

    The training loop checks `received` between two steps. Work that may block for long, such as a
    compilation, is done inside a `region()`. While a region runs, there is no unsaved state. Inside
    a region, a signal therefore ends the process at once, which is the default behavior of a
    signal. A signal handler that is written in Python could not interrupt a compilation, because
    Python would run the handler only after the compilation. A second SIGINT ends the process at
    once, both inside and outside a region.

    If a run has several processes, all processes stop together after the same step. In every step,
    the processes tell each other which signals they have received. If a run has several processes,
    a signal does not interrupt a region.

    A `StopSignal` must be used on the main thread. A signal that the process already ignores, for
    example under `nohup` or in the background of a shell, is still ignored. In a notebook, an
    interactive interpreter or a container without an init process, a signal does not interrupt a
    region.

    Attributes:
      received: the number of the signal that this process has received, or 0.
    """

    def __init__(self) -> None:
        self._interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        # By default, Linux does not deliver SIGTERM and SIGINT to the first process of a container.
        self._is_init = os.getpid() == 1
        self._handled = [n for n in EXIT_CODES if signal.getsignal(n) is not signal.SIG_IGN]
        self.received = 0

    def __enter__(self) -> StopSignal:
        self._old_handlers = {n: signal.signal(n, self._record) for n in self._handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, _: object = None) -> None:
        """Records the first signal, and makes a second SIGINT end the process."""
        self.received = self.received or number
        if number == signal.SIGINT:
            again = signal.default_int_handler if self._interactive else signal.SIG_DFL
            signal.signal(signal.SIGINT, again)

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Context manager for work that may block for long while there is no unsaved state.

        Raises:
          Preempted: if this process is the only process of the run and has received a signal.
        """
        ends = not (self._interactive or self._is_init) and processes.process_count() == 1
        self._raise_if_received()
        for number in self._handled if ends else ():
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._handled if ends else ():
                signal.signal(number, self._record)
        self._raise_if_received()

    def _raise_if_received(self) -> None:
        """Raises `Preempted` if this is the only process and has received a signal.

        If a run has several processes, the method does nothing, because the processes stop together
        after a step.
        """
        if self.received and processes.process_count() == 1:
            raise Preempted(self.received)
