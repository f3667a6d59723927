"""The events of a run."""

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
    """A line of ``events.jsonl``; the time is in seconds since 1970, the text tells a person more."""

    time: float
    event: str
    step: int
    text: str


def add_event(
    directory: pathlib.Path, event: str, *, step: int, text: str = "", at: float | None = None
) -> None:
    """Appends an `Event` to the file of a run; `at` is its time, None is now."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / EVENTS_FILE
    broken = path.exists() and not path.read_bytes().endswith(b"\n")
    now = time.time() if at is None else at
    values = Event(time=now, event=event, step=step, text=text)
    append(path, b"\n" * broken + json.dumps(values).encode() + b"\n")


def read_events(directory: pathlib.Path) -> Iterator[Event]:
    """Yields the events of a run in order; lines that are none are skipped."""
    path = directory / EVENTS_FILE
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            values = json.loads(line)
            step, text = int(values["step"]), str(values.get("text", ""))
            moment, event = float(values["time"]), str(values["event"])
            yield Event(time=moment, event=event, step=step, text=text)
