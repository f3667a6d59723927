"""The metrics of a run, which are written as JSON lines and for TensorBoard, and its throughput."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from synthesizer_jax.base.files import append, in_bucket, write_atomic
from synthesizer_jax.base.registry import JSON

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes metrics to ``metrics.jsonl`` and to TensorBoard's files.

    In a bucket, metrics are written only when `flush` is called, because files in a bucket cannot
    be appended to and every write replaces the whole file.

    Args:
      directory: the run directory.
      restored_step: the step from which the run continues, or 0 for a new run. Metrics of later
        steps are removed from the file, because the run will write them again.

    Attributes:
      removed: the kind and the step of all metrics that were removed.
    """

    def __init__(self, directory: pathlib.Path, *, restored_step: int = 0):
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / METRICS_FILE
        self._lines = b""  # lines that are not in the file yet
        self._flushes = not in_bucket(directory)
        self._folder = directory / "tensorboard"
        self._restored_step = restored_step
        self.removed = _truncate_metrics(self._path, restored_step)

    @functools.cached_property
    def _board(self) -> EventsWriter:
        """The writer of TensorBoard's event file.

        The file is opened when the first metrics are written, because tensorboardX is slow to
        import.
        """
        # Use `EventsWriter`, which writes in the calling thread. tensorboardX's SummaryWriter would
        # write in a background thread that may prevent the process from ending.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder.mkdir(exist_ok=True)
        board = EventsWriter(str(self._folder / "events"))
        # The START event makes TensorBoard ignore events of later steps that an earlier process
        # wrote.
        start = SessionLog(status=SessionLog.START)
        board.write_event(
            Event(wall_time=time.time(), step=self._restored_step + 1, session_log=start)
        )
        return board

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Writes the metrics of a step as one line ``{"step": …, "kind": …, name: value, …}``.

        Args:
          step: number of finished steps.
          values: the metrics by name. NaN and infinities are written as null.
          kind: ``train`` or ``eval``.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines += json.dumps({"step": step, "kind": kind, **finite}).encode() + b"\n"

        shown = [
            Summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in finite.items()
            if value is not None
        ]
        self._board.write_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=shown))
        )

        if self._flushes:
            self.flush()

    def flush(self) -> None:
        """Writes all metrics that are still in memory."""
        if self._lines:
            append(self._path, self._lines)
            self._lines = b""
            self._board.flush()

    def close(self) -> None:
        """Writes all metrics that are still in memory and closes the files."""
        self.flush()
        if "_board" in vars(self):
            self._board.close()


def _truncate_metrics(path: pathlib.Path, step: int) -> set[tuple[str, int]]:
    """Removes damaged lines and all records of steps after `step` from a metrics file.

    Damaged lines are reported by a warning.

    Returns:
      The kind and the step of every removed record.
    """
    if not path.exists():
        return set()
    lines = _read_records(path)
    damaged = [number for number, (_, record) in enumerate(lines, 1) if record is None]
    if damaged:
        _log.warning("Line %d of %s is damaged. Damaged lines are removed.", damaged[0], path)

    kept = []
    removed = set()
    for line, record in lines:
        if record is None:
            continue
        if record["step"] <= step:
            kept.append(line)
        else:
            removed.add((record["kind"], record["step"]))
    write_atomic(path, b"".join(kept))
    return removed


def read_metrics(path: pathlib.Path) -> list[dict[str, JSON]]:
    """Returns all records of a metrics file in order.

    Raises:
      ValueError: a line is damaged.
    """
    records = []
    for number, (_, record) in enumerate(_read_records(path), 1):
        if record is None:
            raise ValueError(f"Line {number} of {path} is damaged. Remove it to read the others.")
        records.append(record)
    return records


def read_scores(path: pathlib.Path) -> dict[int, float]:
    """Returns the score of every evaluated step in a metrics file.

    The score is NaN if an evaluation had no score. The result is empty if the file does not exist.
    """
    if not path.exists():
        return {}
    scores = {}
    for _, record in _read_records(path):
        if record is not None and record["kind"] == "eval":
            score = record.get("score")
            scores[record["step"]] = math.nan if score is None else float(score)
    return scores


def _read_records(path: pathlib.Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Returns all complete lines of a metrics file, each with its record, or None if it is damaged.

    The last line is left out if it does not end with a line break, because it is incomplete.
    """
    records: list[tuple[bytes, dict[str, Any] | None]] = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
            numbers = [x for name, x in record.items() if name != "kind" and x is not None]
            # Check that the values are numbers, because `abs` raises a TypeError for other values.
            valid = (
                isinstance(record["kind"], str)
                and "step" in record
                and all(abs(x) <= sys.float_info.max for x in numbers)
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            valid = False
        records.append((line + b"\n", record if valid else None))
    return records


class Throughput:
    """Measures steps and tokens per second, the fraction of padding, and device utilization.

    Attributes:
      utilizations: the utilizations at a rate of one step per second, by name, from
        `Trainer.measure_utilization`.
    """

    def __init__(self) -> None:
        self.utilizations: Mapping[str, float] = {}
        self._restart(time.perf_counter())

    def _restart(self, now: float) -> None:
        """Starts a new measurement."""
        self._start = now
        self._steps = 0
        self._tokens = 0.0
        self._capacity = 0

    def add(self, tokens: float, *, capacity: int) -> None:
        """Counts a finished step.

        Args:
          tokens: number of real tokens in the batch.
          capacity: number of positions in the batch, including padding.
        """
        self._steps += 1
        self._tokens += tokens
        self._capacity += capacity

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager for work that does not count as training time, such as compilation."""
        start = time.perf_counter()
        yield
        # Move the start of the measurement, which has the same effect as subtracting the pause.
        self._start += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Returns the rates, the fraction of ``padding`` and the utilizations since the last call.

        Each call starts a new measurement.
        """
        now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        rates = {
            "steps_per_second": self._steps / seconds,
            "tokens_per_second": self._tokens / seconds,
        }
        if self._steps:
            rates["padding"] = 1 - self._tokens / self._capacity
        for name, share in self.utilizations.items():
            rates[name] = share * rates["steps_per_second"]
        self._restart(now)
        return rates
