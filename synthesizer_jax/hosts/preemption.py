"""Saving and exiting when the machine is preempted or the user presses Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from synthesizer_jax.hosts import processes

EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
"""Exit codes after a signal, when the state is saved. That of SIGTERM is EX_TEMPFAIL: start the same
command again. That of SIGINT is the code of shells: a user stopped the run."""


class Preempted(Exception):  # noqa: N818 - an event, not an error
    """The process received a signal to stop; the caller saves and exits with `exit_code`."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(
            f"stopped by {self.signal.name}; everything is saved, start the same command again"
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the process, see `EXIT_CODES`."""
        return EXIT_CODES[self.signal]


class StopSignal:
    """Context manager that lets a run save a checkpoint and exit after SIGTERM or SIGINT (Ctrl-C).

    Between two steps the training loop checks `received`. Work that may block is executed inside
    `region()`, where the state is saved or there is none, and where signals end the process at once, as
    they do by default; Python would run its handlers only after a long compilation. So does a second SIGINT
    anywhere.

    Several processes stop together, after a step: in every step they compare what they have received. What
    they do in a region they do to its end.

    It must be used on the main thread. A signal that is ignored (`nohup`, a background process of a shell)
    remains ignored. In a notebook, an interactive interpreter or a container without an init process a
    region runs to its end.

    Attributes:
      received: the number of the signal that this process has received; 0 is none.
    """

    def __init__(self) -> None:
        self._interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
        # Linux protects the first process of a container from signals by default.
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
        self.received = self.received or number
        if number == signal.SIGINT:
            again = signal.default_int_handler if self._interactive else signal.SIG_DFL
            signal.signal(signal.SIGINT, again)

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Context manager for work that may block for long, while the state is saved or there is none.

        Raises:
          Preempted: a signal was received.
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
        if self.received and processes.process_count() == 1:
            raise Preempted(self.received)
