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
from collections.abc import Callable, Sequence
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


def options() -> dict[str, Any]:
    """Returns the worker's options; redirects standard output to standard error from now on."""
    _OUTPUT.append(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    return json.loads(sys.argv[1])


_OUTPUT: list[Any] = []


def send(message: dict[str, Any]) -> None:
    """Sends a line of JSON to the driver."""
    print(json.dumps(message), file=_OUTPUT[0], flush=True)


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
    """A running system."""

    def __init__(self, system: System):
        if not pathlib.Path(system.python).exists():
            raise SystemExit(f"{system.name} needs {system.python}; run: make bench-peers")
        self.system = system
        command = [system.python, str(HERE / "workers" / system.worker)]
        self.process = subprocess.Popen(
            [*command, json.dumps(system.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("BENCH_VERBOSE") else None,
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
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            raise SystemExit(f"{self.system.name} ended:\n{(errors or '')[-3000:]}")
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


def summarize_results(name: str, facts: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a system: its facts, the medians of its measurements, and the largest peak of memory."""
    peaks = [r["peak_mb"] for r in results if r["peak_mb"] is not None]
    medians = {k: statistics.median(r[k] for r in results) for k in results[0] if k != "peak_mb"}
    return {"name": name, **facts, **medians, "peak_mb": max(peaks, default=None)}
