"""Compares systems, each in a process of its own, that run in turns.

A worker prepares its system, calls `serve`, and then runs one round at every request of the driver;
otherwise it sleeps. This file uses the standard library only, so that workers in other environments can
import it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
"""The Python of the environment that `make bench-peers` creates."""


@dataclasses.dataclass(frozen=True)
class System:
    """One compared system: its name in the table, a file in ``workers/`` and the options that it reads."""

    name: str
    worker: str
    options: dict[str, Any]
    python: str = sys.executable
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def serve(facts: dict[str, Any], run_round: Callable[[], dict[str, float]]) -> None:
    """The main loop of a worker; returns when the driver closes the pipe.

    Every round is run twice, and only the second counts: the first one reloads the memory and caches that
    the other systems have evicted, which is not part of the comparison.
    """
    send(facts)
    reset_peak()
    for _ in sys.stdin:
        run_round()
        send({**run_round(), "peak_mb": peak_mb()})


def answer(facts: dict[str, Any], rows: Iterator[dict[str, Any]]) -> None:
    """The main loop of a worker that has a row of its own for every request of the driver."""
    send(facts)
    for _ in sys.stdin:
        send(next(rows))


def options() -> dict[str, Any]:
    """Returns the worker's options; redirects standard output to standard error from now on."""
    _OUTPUT.append(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    return json.loads(sys.argv[1])


_OUTPUT: list[Any] = []


def send(message: dict[str, Any]) -> None:
    """Sends a line of JSON to the driver."""
    print(json.dumps(message), file=_OUTPUT[0], flush=True)


def time_calls(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Returns the seconds of a call on a device that works asynchronously: the median of seven series.

    A series lasts at least 20 ms where a hundred calls take that long, and is waited for once.
    """
    for _ in range(2):
        wait(call())
    began = time.perf_counter()
    wait(call())
    calls = min(100, 1 + int(0.02 / (time.perf_counter() - began)))
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        seconds.append((time.perf_counter() - began) / calls)
    return statistics.median(seconds)


def timed_row(
    programs: dict[str, Callable[[], Any]], wait: Callable[[Any], Any], flops: dict[str, float]
) -> dict[str, float]:
    """Returns times of ``forward`` and ``both``, the backward pass too, and rates where FLOPs are given."""
    seconds = {name: time_calls(program, wait) for name, program in programs.items()}
    rates = {f"{name}_tflops": work / seconds[name] / 1e12 for name, work in flops.items()}
    return {f"{name}_ms": 1e3 * s for name, s in seconds.items()} | rates


def merge_rows(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The mean of a row that was measured twice; ``spread`` is the largest ratio of two times, less 1."""
    times = [k for k in second if k.endswith(("_ms", "_tflops"))]
    if not times or any(k not in first for k in times):
        return second
    pairs = [sorted((first[k], second[k])) for k in times]
    means = {k: (first[k] + second[k]) / 2 for k in times}
    return {**second, **means, "spread": max((b / a - 1 for a, b in pairs))}


def attention_flops(
    options: dict[str, Any], *, products: int, projections: int
) -> dict[str, float]:
    """The FLOPs of attention by products of ``n × n`` matrices and of projections; all pairs count.

    The backward pass has twice as many of each, and a dot product's logits once more.
    """
    tokens, width = options["batch"] * options["length"], options["heads"] * options["head_dim"]
    product = 2.0 * tokens * options["length"] * width
    linear = 2.0 * tokens * projections * options["d_model"] * width
    both = {1: 3, 2: 7}[products] * product + 3 * linear
    return {"forward": products * product + linear, "both": both}


def reset_peak() -> None:
    """Resets the peak of `peak_mb` to the current resident memory (Linux)."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mb() -> float | None:
    """The peak resident memory since `reset_peak`, in MB; None if the system does not report it."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(float(x.split()[1]) * 1.024e-3 for x in lines if x.startswith("VmHWM"))


class Worker:
    """A running system, which is killed where an answer takes longer than `limit` seconds."""

    def __init__(self, system: System, limit: float | None = None):
        if not pathlib.Path(system.python).exists():
            raise SystemExit(f"{system.name} needs {system.python}; run: make bench-peers")
        self.system, self.limit = system, limit
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads blocks
        command = [system.python, str(HERE / "workers" / system.worker)]
        self.process = subprocess.Popen(
            [*command, json.dumps(system.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors if not os.environ.get("BENCH_VERBOSE") else None,
            env={**os.environ, "PYTHONPATH": _search_path(), **system.environment},
            text=True,
        )
        self.facts = self._read()

    def run_round(self) -> dict[str, Any]:
        """Runs one round."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Terminates the worker."""
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        timer = threading.Timer(self.limit or threading.TIMEOUT_MAX, self.process.kill)
        timer.daemon = True
        timer.start()
        line = self.process.stdout.readline()
        late = not timer.is_alive()
        timer.cancel()
        if not line:
            self.process.communicate()
            self.errors.seek(0)
            cause = f"no answer within {self.limit:.0f} s" if late else self.errors.read()[-3000:]
            raise SystemExit(f"{self.system.name} ended:\n{cause}")
        return json.loads(line)


def _search_path() -> str:
    """The modules of the workers, this package, and what the driver's environment adds."""
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, added)])


def race(systems: Sequence[System], *, rounds: int) -> list[dict[str, Any]]:
    """Runs all systems, which must fit into memory together, in turns; returns a row for each."""
    workers = []
    for system in systems:
        print(f"starting {system.name}", file=sys.stderr, flush=True)
        workers.append(Worker(system))
    results_by_worker: list[list[dict[str, Any]]] = [[] for _ in workers]
    for _ in range(1 + rounds):
        for worker, results in zip(workers, results_by_worker, strict=True):
            results.append(worker.run_round())
    for worker in workers:
        worker.close()
    return [
        summarize_results(w.system.name, w.facts, r[1:])
        for w, r in zip(workers, results_by_worker, strict=True)
    ]


def summarize_results(
    name: str, facts: dict[str, Any], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """The row of a system: its facts, the medians of its measurements, and the largest peak of memory."""
    peaks = [r["peak_mb"] for r in results if r["peak_mb"] is not None]
    medians = {k: statistics.median(r[k] for r in results) for k in results[0] if k != "peak_mb"}
    return {"name": name, **facts, **medians, "peak_mb": max(peaks, default=None)}
