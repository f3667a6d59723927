"""Compares systems that take turns. Every system runs in a separate process.

The process of a system is called a worker. A worker prepares the system and calls `serve`. Then the
worker sleeps until the driver asks for a round. This file uses only the standard library, so that
workers in other environments can import it.
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
"""The Python interpreter of the environment that `make bench-peers` creates."""


@dataclasses.dataclass(frozen=True)
class System:
    """A system to compare.

    Attributes:
      name: the name in the table.
      worker: the file of the system's worker in ``workers/``.
      options: the options that the function `options` returns to the worker.
      python: the Python interpreter of the worker.
      environment: additional environment variables of the worker.
    """

    name: str
    worker: str
    options: dict[str, Any]
    python: str = sys.executable
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def serve(facts: dict[str, Any], run_round: Callable[[], dict[str, float]]) -> None:
    """Runs a round whenever the driver asks for it, until the driver closes the pipe.

    Every round is run twice, and only the second run counts. The first run reloads the system's
    data into memory and caches, from which other systems may have evicted it. The comparison should
    not include this time.

    Args:
      facts: values to add to the measurements in the system's row.
      run_round: a function that runs a round and returns its measurements.
    """
    send(facts)
    reset_peak()
    for _ in sys.stdin:
        run_round()
        send({**run_round(), "peak_mb": peak_mb()})


def answer(facts: dict[str, Any], rows: Iterator[dict[str, Any]]) -> None:
    """Sends the next row whenever the driver asks for one, until the driver closes the pipe."""
    send(facts)
    for _ in sys.stdin:
        send(next(rows))


def options() -> dict[str, Any]:
    """Returns the worker's options, and redirects standard output to standard error.

    After this call, only messages to the driver go to the original standard output.
    """
    _OUTPUT.append(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    return json.loads(sys.argv[1])


_OUTPUT: list[Any] = []


def send(message: dict[str, Any]) -> None:
    """Sends a line of JSON to the driver."""
    print(json.dumps(message), file=_OUTPUT[0], flush=True)


def time_calls(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Returns how many seconds a call takes on a device that executes asynchronously.

    The result is the median of seven series of calls. A series lasts at least 20 ms, unless it
    reaches a hundred calls. Within a series, the function waits only for the result of the last
    call.

    Args:
      call: a function that starts the work and returns its result.
      wait: a function that waits for a result.
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
    """Returns the times of programs in ms, and the FLOP rates of programs whose FLOPs are known.

    Args:
      programs: the functions to time. ``forward`` is the forward pass, and ``both`` is the forward
        and backward pass.
      wait: a function that waits for a result.
      flops: the FLOPs of some of the programs.
    """
    seconds = {name: time_calls(program, wait) for name, program in programs.items()}
    rates = {f"{name}_tflops": work / seconds[name] / 1e12 for name, work in flops.items()}
    return {f"{name}_ms": 1e3 * s for name, s in seconds.items()} | rates


def merge_rows(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merges two measurements of a row: returns the means and the spread.

    The value ``spread`` is the largest ratio between two measurements of the same value, minus 1.
    If one of the measurements failed, the second row is returned.
    """
    times = [k for k in second if k.endswith(("_ms", "_tflops"))]
    if not times or any(k not in first for k in times):
        return second
    pairs = [sorted((first[k], second[k])) for k in times]
    means = {k: (first[k] + second[k]) / 2 for k in times}
    return {**second, **means, "spread": max((b / a - 1 for a, b in pairs))}


def attention_flops(
    options: dict[str, Any], *, products: int, projections: int
) -> dict[str, float]:
    """Returns the FLOPs of attention, for the forward pass and for both passes together.

    The FLOPs include masked pairs of positions. The backward pass has twice as many matrix products
    as the forward pass. If the forward pass has two matrix products over pairs of positions, the
    backward pass also computes the logits again.

    Args:
      options: the options of the worker, including the batch size and the length.
      products: the number of matrix products over all pairs of positions in the forward pass, 1 or
        2.
      projections: the number of projections in the forward pass.
    """
    tokens, width = options["batch"] * options["length"], options["heads"] * options["head_dim"]
    product = 2.0 * tokens * options["length"] * width
    linear = 2.0 * tokens * projections * options["d_model"] * width
    both = {1: 3, 2: 7}[products] * product + 3 * linear
    return {"forward": products * product + linear, "both": both}


def reset_peak() -> None:
    """Makes `peak_mb` start again from the memory that is resident now. Works only on Linux."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mb() -> float | None:
    """Returns the peak of the resident memory in MB since the last call of `reset_peak`.

    The result is None if the operating system does not report the peak.
    """
    try:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = next(float(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return kibibytes * 1.024e-3


class Worker:
    """A running process that measures a system.

    Attributes:
      system: the system that is measured.
      limit: the number of seconds after which the process is killed if it has not answered. None
        means that there is no limit.
      facts: the facts that the worker has sent.
    """

    def __init__(self, system: System, limit: float | None = None):
        if not pathlib.Path(system.python).exists():
            raise SystemExit(
                f"{system.name} needs {system.python}. To create it, run: make bench-peers"
            )
        self.system = system
        self.limit = limit
        # Write errors to a file, because a worker would block on a pipe that nobody reads.
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
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
        """Asks the worker for a round, and returns the measurements of the round."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Closes the pipe, so that the worker ends, and waits until it has ended."""
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        """Returns the next message of the worker. Raises `SystemExit` if the worker has ended."""
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
            if late:
                cause = f"no answer within {self.limit:.0f} s"
            else:
                cause = self.errors.read()[-3000:]
            raise SystemExit(f"{self.system.name} ended:\n{cause}")
        return json.loads(line)


def _search_path() -> str:
    """Returns the import path of workers, which includes this folder and the driver's path."""
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, added)])


def race(systems: Sequence[System], *, rounds: int) -> list[dict[str, Any]]:
    """Measures systems that take turns, and returns a row for each system.

    All systems must fit into memory together. The first round is a warm-up and does not count.
    """
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
    """Returns a row with a system's facts, the medians of its measurements and its memory peak."""
    peaks = [r["peak_mb"] for r in results if r["peak_mb"] is not None]
    medians = {k: statistics.median(r[k] for r in results) for k in results[0] if k != "peak_mb"}
    return {"name": name, **facts, **medians, "peak_mb": max(peaks, default=None)}
