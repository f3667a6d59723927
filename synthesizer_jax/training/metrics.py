"""Where a run's numbers go: a JSON-lines file, TensorBoard, the terminal."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends numbers to ``metrics.jsonl`` and to TensorBoard.

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
        from tensorboardX import SummaryWriter

        directory.mkdir(parents=True, exist_ok=True)
        path = directory / METRICS_FILE
        cut_back(path, restored_step)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(
            str(directory / "tensorboard"), purge_step=restored_step + 1, flush_secs=30
        )

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Writes one line ``{"step": …, "kind": …, name: value, …}``.

        Args:
          step: number of finished steps.
          values: plain numbers.
          kind: ``train`` or ``eval``.
        """
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flushes everything."""
        if not self._writes:
            return
        self._file.close()
        self._board.close()


def cut_back(path: pathlib.Path, step: int) -> None:
    """Drops lines of steps after `step`, and a line that a killed process left unfinished."""
    if not path.exists():
        return
    kept = [line for line, record in _records(path) if record["step"] <= step]
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    os.replace(aside, path)


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """All records of a metrics file, in order."""
    return [record for _, record in _records(path)]


def _records(path: pathlib.Path) -> list[tuple[str, dict[str, Any]]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [(line, json.loads(line)) for line in lines if line.endswith("\n")]


class Throughput:
    """Steps and tokens per second since the last reading, and the model FLOP/s utilisation.

    Args:
      utilisation: MFU of a run that does one step a second; None: unknown.
    """

    def __init__(self, utilisation: float | None = None) -> None:
        self._utilisation = utilisation
        self._time, self._steps, self._tokens = time.perf_counter(), 0, 0.0
        self.seconds_per_step = 0.0

    def add(self, tokens: float) -> None:
        """Counts a finished step."""
        self._steps += 1
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """``steps_per_second``, ``tokens_per_second`` and ``mfu``; starts the next interval."""
        now = time.perf_counter()
        seconds = max(now - self._time, 1e-9)
        rates = {
            "steps_per_second": self._steps / seconds,
            "tokens_per_second": self._tokens / seconds,
        }
        if self._steps:
            self.seconds_per_step = seconds / self._steps
        if self._utilisation is not None:
            rates["mfu"] = self._utilisation * rates["steps_per_second"]
        self._time, self._steps, self._tokens = now, 0, 0.0
        return rates


class ProgressBar:
    """The terminal's line: step, loss, rates, time left. Silent where nobody looks.

    Args:
      total: number of steps of the run.
      start: number of steps already done.
      title: what stands in front.
      visible: False shows nothing.
    """

    def __init__(self, total: int, *, start: int = 0, title: str = "", visible: bool = True):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            disable=not visible,
        )
        self._task = self._progress.add_task(title, total=total, completed=start, numbers="")
        self._progress.start()

    def advance(self, step: int) -> None:
        """Moves to a number of finished steps."""
        self._progress.update(self._task, completed=step)

    def show(self, values: Mapping[str, float]) -> None:
        """Shows the newest loss and rates."""
        numbers = (
            f"loss {values['loss']:.3f}  {values['steps_per_second']:.1f} steps/s  "
            f"{values['tokens_per_second']:,.0f} tokens/s"
        )
        if "mfu" in values:
            numbers += f"  MFU {values['mfu']:.0%}"
        self._progress.update(self._task, numbers=numbers)

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Ends the display."""
        self._progress.stop()
