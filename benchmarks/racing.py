"""Systems measured side by side: each lives in a process of its own, and they take turns.

A worker prepares its system, calls `serve`, and then runs one round whenever the driver asks; between
its turns it sleeps. This file needs nothing but the standard library, so that workers of other
environments can import it.
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
"""The environment that `make bench-peers` makes."""


@dataclasses.dataclass(frozen=True)
class System:
    """One compared system.

    Attributes:
      name: what the table calls it.
      worker: file of ``workers/``.
      options: what the worker reads as JSON.
      python: the interpreter of its environment.
      environment: variables it gets besides the driver's.
    """

    name: str
    worker: str
    options: dict[str, Any]
    python: str = sys.executable
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def serve(facts: dict[str, Any], run: Callable[[], dict[str, float]]) -> None:
    """A worker's main loop; returns when the driver has had enough.

    A round is run twice and the second counts: the first brings back into memory and caches what the
    other systems' turns have driven out, which is none of what is compared.

    Args:
      facts: what there is to know before the first round.
      run: one round; returns what was measured.
    """
    answer(facts)
    reset_peak()
    for _ in sys.stdin:
        run()
        answer({**run(), "peak_mb": peak_mb()})


def options() -> dict[str, Any]:
    """The worker's options; from here on whatever is printed goes to standard error."""
    _ANSWERS.append(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    return json.loads(sys.argv[1])


_ANSWERS: list[Any] = []


def answer(message: dict[str, Any]) -> None:
    """One line of JSON to the driver."""
    print(json.dumps(message), file=_ANSWERS[0], flush=True)


def reset_peak() -> None:
    """Makes `peak_mb` start from what is resident now (Linux)."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mb() -> float | None:
    """Largest resident memory since `reset_peak`, in MB; None where the system does not tell."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(float(x.split()[1]) * 1.024e-3 for x in lines if x.startswith("VmHWM"))


class Worker:
    """A running system.

    Raises:
      SystemExit: its environment is missing, or it ended; with what to do.
    """

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
            env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}", **system.environment},
            text=True,
        )
        self.facts = self._read()

    def round(self) -> dict[str, Any]:
        """One round of the system."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends it."""
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            raise SystemExit(f"{self.system.name} ended:\n{(errors or '')[-3000:]}")
        return json.loads(line)


def race(systems: Sequence[System], *, rounds: int, warmup: int = 1) -> list[dict[str, Any]]:
    """Runs all systems in turn and returns a row for each.

    Args:
      systems: at most as many as fit into memory together.
      rounds: counted rounds.
      warmup: rounds before them.

    Returns:
      ``name``, the worker's facts, the median of everything measured (``seconds`` above all), the
      extremes of the seconds, and the largest ``peak_mb``.
    """
    workers = []
    for system in systems:
        print(f"starting {system.name}", file=sys.stderr, flush=True)
        workers.append(Worker(system))
    found: list[list[dict[str, Any]]] = [[] for _ in workers]
    for number in range(warmup + rounds):
        for worker, results in zip(workers, found, strict=True):
            result = worker.round()
            if number >= warmup:
                results.append(result)
    for worker in workers:
        worker.close()
    return [row(w.system.name, w.facts, r) for w, r in zip(workers, found, strict=True)]


def row(name: str, facts: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A system's medians."""
    seconds = [r["seconds"] for r in results]
    peaks = [r["peak_mb"] for r in results if r["peak_mb"] is not None]
    medians = {k: statistics.median(r[k] for r in results) for k in results[0] if k != "peak_mb"}
    return {
        "name": name,
        **facts,
        **medians,
        "fastest": min(seconds),
        "slowest": max(seconds),
        "peak_mb": max(peaks, default=None),
    }
