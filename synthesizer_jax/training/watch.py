"""Is the run going on, and how much of its time was training?"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from synthesizer_jax.training.storage import check_regular

EVENTS_FILE = "events.jsonl"


class Watchdog:
    """Prints where every thread stands when nothing has moved for a while, and goes on waiting.

    Args:
      seconds: of silence; 0 is never.
      file: where to print; None: the process' own standard error, as what notebooks put in its place
        may be no file.
    """

    def __init__(self, seconds: float, file: TextIO | None = None):
        self._seconds, self._file = seconds, sys.__stderr__ if file is None else file

    def moved(self) -> None:
        """Begins to wait anew."""
        if self._seconds and self._file is not None:
            faulthandler.dump_traceback_later(self._seconds, repeat=True, file=self._file)

    def close(self) -> None:
        """Waits no more."""
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()


class Events:
    """What happened to a run, and when, over all its processes' lives: ``events.jsonl``.

    Args:
      directory: the run's.
      writes: False writes nothing: another process does.
    """

    def __init__(self, directory: pathlib.Path, *, writes: bool = True):
        self._path = directory / EVENTS_FILE if writes else None
        check_regular(directory / EVENTS_FILE)

    def write(self, event: str, *, step: int, at: float | None = None) -> None:
        """Appends ``{"time": seconds since 1970, "event": …, "step": …}``; `at` None is now."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            broken = file.tell() and not self._path.read_bytes().endswith(b"\n")
            line = json.dumps(
                {"time": time.time() if at is None else at, "event": event, "step": step}
            )
            file.write(f"{chr(10) if broken else ''}{line}\n".encode())


def goodput(directory: pathlib.Path, seconds_per_step: float) -> float | None:
    """The share of a run's time since its first start that its finished steps needed.

    Compiling, evaluating, saving, waiting for machines and steps that were lost are the rest (Google's
    *ML goodput*, without the share that the step itself could gain).

    Args:
      directory: the run's.
      seconds_per_step: how long a step takes.

    Returns:
      From 0 to 1; None where the run has no events.
    """
    events = list(read_events(directory))
    if not events:
        return None
    spent = events[-1]["time"] - events[0]["time"]
    return min(1.0, events[-1]["step"] * seconds_per_step / spent) if spent > 0 else None


def read_events(directory: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A run's events in order; what a killed process or a full disk left of a line is none."""
    path = directory / EVENTS_FILE
    check_regular(path)
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            kinds = {"time": int | float, "event": str, "step": int}
            if isinstance(event, dict) and all(
                isinstance(event.get(n), k) for n, k in kinds.items()
            ):
                yield event
