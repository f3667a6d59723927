"""The events of a run, such as its start and its checkpoints, in ``events.jsonl``."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import TypedDict

from synthesizer_jax.base.files import append

EVENTS_FILE = "events.jsonl"


class Event(TypedDict):
    """A line of ``events.jsonl``.

    Attributes:
      time: seconds since 1970.
      event: the name of the event.
      step: number of finished steps.
      text: further information for people.
    """

    time: float
    event: str
    step: int
    text: str


def add_event(
    directory: pathlib.Path, event: str, *, step: int, text: str = "", at: float | None = None
) -> None:
    """Appends an event to the file of a run.

    Args:
      directory: the run directory.
      event: the name of the event.
      step: number of finished steps.
      text: further information for people.
      at: the time in seconds since 1970. None means now.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / EVENTS_FILE
    values = Event(time=time.time() if at is None else at, event=event, step=step, text=text)
    line = json.dumps(values).encode() + b"\n"
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        # A process that was killed may have left an incomplete line, so begin the event on a new
        # line.
        line = b"\n" + line
    append(path, line)


def read_events(directory: pathlib.Path) -> Iterator[Event]:
    """Yields the events of a run in order. Lines that are not events are skipped."""
    path = directory / EVENTS_FILE
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            values = json.loads(line)
            yield Event(
                time=float(values["time"]),
                event=str(values["event"]),
                step=int(values["step"]),
                text=str(values.get("text", "")),
            )
