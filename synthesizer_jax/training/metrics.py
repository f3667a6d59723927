"""Where a run's numbers go: a JSON-lines file and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from synthesizer_jax.files import write_aside
from synthesizer_jax.training.storage import check_regular

METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends numbers to ``metrics.jsonl`` and to TensorBoard's files.

    Args:
      directory: the run's directory.
      restored_step: what a former process wrote for later steps is cut off, so that a continued run
        reads like an undisturbed one; 0 for a fresh run.
      writes: False writes nothing: another process does.
    """

    def __init__(self, directory: pathlib.Path, *, restored_step: int = 0, writes: bool = True):
        self._writes = writes
        if not writes:
            return
        # Written by this thread: that of tensorboardX's own SummaryWriter can keep a process from ending.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        path = directory / METRICS_FILE
        check_regular(path)
        cut_back(path, restored_step)
        self._file = path.open("a", encoding="utf-8")
        board = directory / "tensorboard"
        board.mkdir(exist_ok=True)
        self._board = EventsWriter(str(board / "events"))
        start = SessionLog(status=SessionLog.START)  # TensorBoard drops what came after this step
        self._board.write_event(
            Event(wall_time=time.time(), step=restored_step + 1, session_log=start)
        )

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Writes one line ``{"step": …, "kind": …, name: value, …}``.

        Args:
          step: number of finished steps.
          values: plain numbers; those that are not finite are written as null.
          kind: ``train`` or ``eval``.
        """
        if not self._writes:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        finite = {n: value if math.isfinite(value) else None for n, value in values.items()}
        self._file.write(json.dumps({"step": step, "kind": kind, **finite}) + "\n")
        self._file.flush()
        shown = [
            Summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in finite.items()
            if value is not None
        ]
        self._board.write_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=shown))
        )
        self._board.flush()

    def close(self) -> None:
        """Closes the files; everything has been written."""
        if not self._writes:
            return
        self._file.close()
        self._board.close()


def cut_back(path: pathlib.Path, step: int) -> None:
    """Drops lines of steps after `step`, and what a killed process left unfinished.

    A file with lines that cannot be read is kept beside it, with a warning.
    """
    if not path.exists():
        return
    lines = list(_records(path))
    kept = [line for line, record in lines if record is not None and record["step"] <= step]
    damaged = [number for number, (_, record) in enumerate(lines, 1) if record is None]
    if damaged:
        copy = path.with_name(path.name + ".unreadable")
        write_aside(copy, path.read_bytes())
        _log.warning(
            "%s: %d of its lines, the first is line %d, cannot be read and are left out; the whole file is "
            "kept as %s",
            *(path, len(damaged), damaged[0], copy),
        )
    write_aside(path, b"".join(kept))


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """All records of a metrics file, in order.

    Raises:
      ValueError: a line is no record.
    """
    records = []
    for number, (_, record) in enumerate(_records(path), 1):
        if record is None:
            raise ValueError(f"{path}, line {number} is damaged; remove it to read the others")
        records.append(record)
    return records


def scores(path: pathlib.Path) -> dict[int, float]:
    """The score of every evaluated step that a metrics file tells of; empty where there is no file."""
    records = [record for _, record in _records(path)] if path.exists() else []
    return {
        r["step"]: math.nan if r.get("score") is None else float(r["score"])
        for r in records
        if r is not None and r["kind"] == "eval"
    }


def _records(path: pathlib.Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Lines and their records; None for what is no record. A last line without its end is left out."""
    check_regular(path)
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        yield line + b"\n", record if is_record(record) else None


def is_record(value: Any) -> bool:
    """Whether a JSON value is a line of `MetricsWriter.write`: a step, a kind, numbers and nulls."""
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return False
    numbers = (number for name, number in value.items() if name != "kind")
    return isinstance(value.get("kind"), str) and all(map(is_finite_or_none, numbers))


def is_finite_or_none(value: Any) -> bool:
    """Whether a value is null, or a number that a float can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and abs(value) <= sys.float_info.max)


class Throughput:
    """Steps and tokens per second since the last reading, padding, and how far they use the devices.

    Args:
      capacity: tokens of a batch, padding included.
      utilisations: by name, of a run that does one step a second, as `Trainer.measure_utilisation` gives.
    """

    def __init__(self, capacity: int, utilisations: Mapping[str, float] = {}) -> None:
        self._capacity, self._utilisations = capacity, dict(utilisations)
        self._time, self._steps, self._tokens = time.perf_counter(), 0, 0.0
        self.seconds_per_step = 0.0

    def add(self, tokens: float) -> None:
        """Counts a finished step."""
        self._steps += 1
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Steps and tokens per second, ``padding`` and the utilisations; starts the next interval."""
        now = time.perf_counter()
        seconds = max(now - self._time, 1e-9)
        rates = {
            "steps_per_second": self._steps / seconds,
            "tokens_per_second": self._tokens / seconds,
        }
        if self._steps:
            self.seconds_per_step = seconds / self._steps
            rates["padding"] = 1 - self._tokens / (self._steps * self._capacity)
        for name, share in self._utilisations.items():
            rates[name] = share * rates["steps_per_second"]
        self._time, self._steps, self._tokens = now, 0, 0.0
        return rates
