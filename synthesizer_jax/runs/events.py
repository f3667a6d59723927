"""The events of a run, and the share of its time that was training."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import TypedDict

from synthesizer_jax.files import append

EVENTS_FILE = "events.jsonl"


class Event(TypedDict):
    """A line of ``events.jsonl``; the time is in seconds since 1970."""

    time: float
    event: str
    step: int


def add_event(directory: pathlib.Path, event: str, *, step: int, at: float | None = None) -> None:
    """Appends an `Event` to the file of a run; `at` is its time, None is now."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / EVENTS_FILE
    broken = path.exists() and not path.read_bytes().endswith(b"\n")
    values: Event = {"time": time.time() if at is None else at, "event": event, "step": step}
    append(path, b"\n" * broken + json.dumps(values).encode() + b"\n")


def goodput(directory: pathlib.Path, seconds_per_step: float) -> float | None:
    """Returns the fraction of the time since the start of a run that its finished steps took.

    The rest is compilation, evaluation, saving, waiting for machines and lost steps (Google's *ML goodput*,
    without the efficiency of the step itself).

    Args:
      directory: directory of the run.
      seconds_per_step: duration of a step.

    Returns:
      A number from 0 to 1; None if the run has no events.
    """
    events = list(read_events(directory))
    if not events:
        return None
    spent = events[-1]["time"] - events[0]["time"]
    return min(1.0, events[-1]["step"] * seconds_per_step / spent) if spent > 0 else None


def read_events(directory: pathlib.Path) -> Iterator[Event]:
    """Yields the events of a run in order; lines that are none are skipped."""
    path = directory / EVENTS_FILE
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            values = json.loads(line)
            yield Event(
                time=float(values["time"]), event=str(values["event"]), step=int(values["step"])
            )


def has_stopped(directory: pathlib.Path) -> bool:
    """Returns whether a run has stopped early, and was not continued since."""
    last = [event["event"] for event in read_events(directory)][-2:]
    return last == ["stopped", "end"]
