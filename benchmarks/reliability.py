"""Compares a short run that is killed repeatedly with the same run without interruptions.

    python benchmarks/reliability.py --kills 50 --processes 1
    python benchmarks/reliability.py --kills 50 --processes 1 2

At random times, one process of the run receives SIGKILL, SIGTERM or SIGINT. After each signal, the
run is started again. Every few kills, the number of processes changes. All processes together
always have eight devices. Each signal is sent after a random number of steps or seconds, and at
most `--stride` steps after the start. Signals therefore also arrive while modules are imported,
data is read, programs are compiled, the model is evaluated, or checkpoints are written.

At the end, every step must have read the same examples as in the uninterrupted run
(`data_checksum`), and must have the same loss as there. If the number of processes is constant, the
losses must be exactly equal. If the number of processes changes, the losses must be equal within a
relative tolerance of 1e-4. The log must also contain all evaluations. If something differs, the
script fails.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import report

from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.hosts.preemption import EXIT_CODES
from synthesizer_jax.preparation import synthetic
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics

RECIPE = pathlib.Path(__file__).with_name("reliability_run.py")
DEVICES = 8
"""The total number of simulated devices of all processes."""
TOLERANCE = 1e-4
"""The largest allowed relative difference of a loss if the number of processes changes."""
KILLS_BEFORE_CHANGE = 3
"""The number of kills after which the number of processes changes."""
STEPS_BETWEEN_EVALUATIONS = 4

EXPECTED = {
    "SIGKILL": {128 + signal.SIGKILL},
    # If a signal arrives before the run has installed its handlers, the run ends with the second of
    # these exit codes.
    "SIGTERM": {EXIT_CODES[signal.SIGTERM], 128 + signal.SIGTERM},
    "SIGINT": {EXIT_CODES[signal.SIGINT], 128 + signal.SIGINT},
}
"""The allowed exit codes of a run if one of its processes has received a signal."""


def main() -> None:
    """Kills a run repeatedly, compares it with an uninterrupted run, and writes the results."""
    parser = report.arguments(__doc__, kills=10, stride=20, seed=0)
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of processes to alternate between",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = Campaign(args, pathlib.Path(directory)).run()
    name = "reliability " + ("one process" if args.processes == [1] else "changing processes")
    text = describe(result, args)
    report.write(name, text, result=result, options=args, facts=report.machine())
    if result["problems"]:
        raise SystemExit("\n".join(result["problems"]))


def describe(result: dict[str, Any], args: argparse.Namespace) -> str:
    """Returns the section of the page with an introduction, the table of kills and the result."""
    columns = {
        "processes": "processes|d",
        "signal": "signal",
        "kills": "kills|d",
        "codes": "exit codes (times)",
        "seconds": "median time until all processes ended, s|.1f",
        "slowest": "longest time, s|.1f",
        "lost": "steps lost|d",
    }
    processes = " or ".join(map(str, args.processes))
    processes += " process" if processes == "1" else " processes"
    introduction = (
        f"The run of `benchmarks/reliability_run.py` has {result['steps']} steps and was killed "
        f"{args.kills} times. It used {DEVICES} CPU devices in {processes}. *Lost* steps had not "
        "been saved yet, so they were computed again after the next start."
    )
    losses = result["losses"]
    equal = sum(x == 0 for x in losses)
    conclusion = (
        f"{'Every' if result['same'] else 'NOT every'} step read the same examples as in the "
        f"uninterrupted run. The losses of {equal} of {len(losses)} steps are equal to the last "
        f"bit, and the largest relative difference is {max(losses):.1e}. {result['evaluations']} "
        "evaluations were made."
    )
    table = report.table(summarize_kills(result["kills"]), columns)
    return f"{introduction}\n\n{table}\n\n{conclusion}"


class Campaign:
    """Makes an uninterrupted run and a run that is killed repeatedly, in an empty directory."""

    def __init__(self, args: argparse.Namespace, directory: pathlib.Path):
        self.args = args
        self.directory = directory
        self.random = random.Random(args.seed)
        # Between two kills, the run makes about `stride` steps at most. A few more steps make sure
        # that the run does not end before the last kill.
        self.steps = (args.kills + 3) * args.stride
        synthetic.write(directory / "data")

    def run(self) -> dict[str, Any]:
        """Makes both runs, and returns the results, which include a list of problems."""
        start_time = time.perf_counter()
        process = self.start("undisturbed", 1)
        self.wait_for(process, "undisturbed", step=1)
        # The first start also compiles the programs, so later starts should not take much longer.
        self.longest_start = 1.5 * (time.perf_counter() - start_time)
        problems = []
        if process.wait() != 0:
            problems.append("the uninterrupted run failed")

        kills: list[dict[str, Any]] = []
        while len(kills) < self.args.kills:
            turn = len(kills) // KILLS_BEFORE_CHANGE
            kill = self.kill_once(self.args.processes[turn % len(self.args.processes)])
            if kill is None:
                problems.append(f"the run ended after {len(kills)} kills; use a larger --stride")
                break
            print(f"{len(kills) + 1}: {kill}", file=sys.stderr, flush=True)
            kills.append(kill)
            if kill["code"] not in EXPECTED[kill["signal"]]:
                problems.append(f"a kill has an unexpected exit code: {kill}")
        if self.start("killed", 1).wait() != 0:
            problems.append("the run failed after its last start")

        killed, undisturbed = self.records("killed"), self.records("undisturbed")
        same = len(killed) == self.steps and all(
            (a["step"], a["data_checksum"]) == (b["step"], b["data_checksum"])
            for a, b in zip(killed, undisturbed, strict=True)
        )
        losses = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(killed, undisturbed, strict=False)]
        if not same:
            problems.append("the steps did not read the same examples")
        if max(losses) > (0 if self.args.processes == [1] else TOLERANCE):
            problems.append(f"a loss differs by {max(losses):.1e}")
        measured, expected = (
            [r["step"] for r in self.records(w, "eval")] for w in ("killed", "undisturbed")
        )
        if measured != expected:
            problems.append(f"evaluations of {sorted(set(expected) - set(measured))} are missing")
        return {
            "steps": self.steps,
            "kills": kills,
            "same": same,
            "losses": losses,
            "evaluations": f"{len(measured)} of {len(expected)}",
            "problems": problems,
        }

    def kill_once(self, processes: int) -> dict[str, Any] | None:
        """Starts the run and kills one of its processes.

        Returns:
          The signal and its effect, or None if the run ended before it was killed.
        """
        name = self.random.choice(list(EXPECTED))
        last_step = self.last_step("killed")
        last_write = self.last_write()
        process = self.start("killed", processes)
        if self.random.random() < 0.5:
            self.wait_for(
                process, "killed", step=last_step + self.random.randint(1, self.args.stride)
            )
            time.sleep(self.random.uniform(0, 0.5))
        else:
            seconds = self.random.uniform(1, self.longest_start)
            self.wait_for(process, "killed", step=last_step + self.args.stride, seconds=seconds)

        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found = children.read_text(encoding="ascii").split() if children.exists() else []
        start_time = time.perf_counter()
        if found:
            os.kill(int(self.random.choice(found)), signal.Signals[name])
        code = process.wait()
        if code == 0:
            return None
        if not found:
            log = (self.directory / "log").read_text(encoding="utf-8")
            raise SystemExit(f"The run failed before it was killed:\n{log[-3000:]}")

        seconds = time.perf_counter() - start_time
        step = self.last_step("killed")
        saved = max(finished_steps(self.directory / "killed" / "checkpoints"), default=0)
        # Until the restarted run writes to its log, the log still contains steps that an earlier
        # kill lost. Do not count them again.
        lost = max(0, step - saved) if self.last_write() != last_write else 0
        kill = {"processes": processes, "signal": name, "code": code}
        return {**kill, "seconds": seconds, "step": step, "lost": lost}

    def start(self, workdir: str, processes: int) -> subprocess.Popen[bytes]:
        """Starts the training command."""
        command = [sys.executable, "-m", "synthesizer_jax", "local"]
        command += ["--processes", str(processes), "--devices", str(DEVICES // processes), "--"]
        command += ["train", str(RECIPE), "--workdir", str(self.directory / workdir), "--quiet"]
        command += ["--data-dir", str(self.directory / "data")]
        command += ["--set", f"training.steps={self.steps}"]
        command += ["--set", f"evaluation.every={STEPS_BETWEEN_EVALUATIONS}"]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "true"
        environment["JAX_COMPILATION_CACHE_DIR"] = str(self.directory / "compiled")
        log = (self.directory / "log").open("ab")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait_for(
        self,
        process: subprocess.Popen[bytes],
        workdir: str,
        *,
        step: int,
        seconds: float = math.inf,
    ) -> None:
        """Waits until a step is logged, some seconds have passed, or the process has ended."""
        end = time.monotonic() + seconds
        while process.poll() is None and self.last_step(workdir) < step and time.monotonic() < end:
            time.sleep(0.05)

    def records(self, workdir: str, kind: str = "train") -> list[dict[str, Any]]:
        """Returns the logged records of steps or of evaluations."""
        path = self.directory / workdir / METRICS_FILE
        records = read_metrics(path) if path.exists() else []
        return [r for r in records if r["kind"] == kind]

    def last_write(self) -> int:
        """Returns the time when the killed run last wrote to its log, in nanoseconds."""
        path = self.directory / "killed" / METRICS_FILE
        return path.stat().st_mtime_ns if path.exists() else 0

    def last_step(self, workdir: str) -> int:
        """Returns the last logged step of a run."""
        return max((r["step"] for r in self.records(workdir)), default=0)


def summarize_kills(kills: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each combination of a signal and a number of processes."""
    rows = []
    for processes, name in sorted({(k["processes"], k["signal"]) for k in kills}):
        group = [k for k in kills if (k["processes"], k["signal"]) == (processes, name)]
        codes = collections.Counter(k["code"] for k in group)
        rows.append(
            {
                "processes": processes,
                "signal": name,
                "kills": len(group),
                "codes": ", ".join(f"{code} ({n})" for code, n in sorted(codes.items())),
                "seconds": statistics.median(k["seconds"] for k in group),
                "slowest": max(k["seconds"] for k in group),
                "lost": sum(k["lost"] for k in group),
            }
        )
    return rows


if __name__ == "__main__":
    main()
