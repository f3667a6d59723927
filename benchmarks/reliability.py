"""Compares a short run that is killed repeatedly with the same run without interruption.

    python benchmarks/reliability.py --kills 50 --processes 1
    python benchmarks/reliability.py --kills 50 --processes 1 2

At random times one process of the group receives SIGKILL, SIGTERM or SIGINT. The run is then started
again, and every few kills the number of processes changes, which share the same eight devices. The time
of a kill is a random number of steps or seconds after the start (but at most `--stride` steps), so kills
also occur while modules are imported, data are read, programs are compiled, the model is evaluated, or
checkpoints are written. In the end every step must have read the same examples as in the uninterrupted
run (`data_checksum`) and have the same loss: exactly if the number of processes is constant, otherwise
with a relative tolerance of 1e-4. Every evaluation must exist, too. Otherwise the script fails.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
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
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.runtime.preemption import EXIT_CODES
from synthesizer_jax.tasks import synthetic

RECIPE = pathlib.Path(__file__).with_name("reliability_run.py")
DEVICES = 8
TOLERANCE = 1e-4

EXPECTED = {
    "SIGKILL": {128 + signal.SIGKILL},
    # The second code occurs before the signal handlers are installed.
    "SIGTERM": {EXIT_CODES[signal.SIGTERM], 128 + signal.SIGTERM},
    "SIGINT": {EXIT_CODES[signal.SIGINT], 128 + signal.SIGINT},
}
"""The allowed exit codes of a group of which one process has received the signal."""


def main() -> None:
    """Runs the campaign and writes its results."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        result = Campaign(args, pathlib.Path(directory)).run()
    kills, losses = result["kills"], result["losses"]
    groups = " and ".join(map(str, args.processes))
    table = (
        f"{len(kills)} kills over {result['steps']} steps of `benchmarks/reliability_run.py`, {DEVICES} "
        f"CPU devices of {groups} process{'' if groups == '1' else 'es'}. *Lost* steps are repeated.\n\n"
        + report.table(
            summarize_kills(kills),
            {
                "processes": "processes|d",
                "signal": "signal",
                "kills": "kills|d",
                "codes": "exit codes (times)",
                "seconds": "group gone after, s: median|.1f",
                "slowest": "slowest|.1f",
                "lost": "steps lost|d",
            },
        )
        + f"\n\nExamples of all steps as in the undisturbed run: {'yes' if result['same'] else 'NO'}. "
        f"Losses equal to the last bit: {sum(x == 0 for x in losses)} of {len(losses)}; largest relative "
        f"difference: {max(losses):.1e}. Evaluations: {result['evaluations']} of "
        f"{result['evaluations_undisturbed']}."
    )
    name = "reliability " + ("one process" if args.processes == [1] else "changing processes")
    report.write(name, table, result=result, options=args, facts=report.machine())
    if result["problems"]:
        raise SystemExit("\n".join(result["problems"]))


@dataclasses.dataclass
class Kill:
    """A kill.

    Attributes:
      processes: number of processes of the group.
      signal: name of the signal.
      moment: description of the time.
      code: exit code of the group.
      seconds: time from the signal to the end of the group.
      step: the last logged step.
      lost: number of steps since the start that are not part of the newest checkpoint.
    """

    processes: int
    signal: str
    moment: str
    code: int
    seconds: float
    step: int
    lost: int


class Campaign:
    """The two runs.

    Args:
      args: the parsed command line.
      directory: an empty directory.
    """

    def __init__(self, args: argparse.Namespace, directory: pathlib.Path):
        self.args, self.directory = args, directory
        self.random = random.Random(args.seed)
        self.steps = (args.kills + 3) * args.stride  # a kill occurs within a stride, or soon after
        synthetic.write(directory / "data")

    def run(self) -> dict[str, Any]:
        """Runs both and returns the results, including a list of problems."""
        start_time = time.perf_counter()
        process = self.start("undisturbed", 1)
        self.wait_for(process, "undisturbed", step=1)
        self.longest_start = 1.5 * (time.perf_counter() - start_time)  # a start that compiles
        problems = [] if process.wait() == 0 else ["the undisturbed run failed"]
        kills: list[Kill] = []
        while len(kills) < self.args.kills:
            processes = self.args.processes[
                len(kills) // self.args.every % len(self.args.processes)
            ]
            kill = self.kill_once(processes)
            if kill is None:
                problems.append(f"the run ended after {len(kills)} kills; raise --stride")
                break
            print(f"{len(kills) + 1}: {kill}", file=sys.stderr, flush=True)
            kills.append(kill)
            if kill.code not in EXPECTED[kill.signal]:
                problems.append(f"exit code {kill.code} after {kill.signal} at step {kill.step}")
        if self.start("killed", 1).wait() != 0:
            problems.append("the last start did not reach the end")
        records, expected_records = self.records("killed"), self.records("undisturbed")
        same = [(r["step"], r["data_checksum"]) for r in records] == [
            (r["step"], r["data_checksum"]) for r in expected_records
        ]
        losses = [
            abs(a["loss"] / b["loss"] - 1) for a, b in zip(records, expected_records, strict=False)
        ]
        if not same or len(records) != self.steps:
            problems.append("the steps did not read the same examples")
        if max(losses) > (0 if self.args.processes == [1] else TOLERANCE):
            problems.append(f"a loss is off by {max(losses):.1e}")
        measured, expected = (
            [r["step"] for r in self.records(w, "eval")] for w in ("killed", "undisturbed")
        )
        if measured != expected:
            problems.append(f"evaluations of {sorted(set(expected) - set(measured))} are missing")
        rows = [dataclasses.asdict(kill) for kill in kills]
        return {
            "steps": self.steps,
            "kills": rows,
            "same": same,
            "losses": losses,
            "evaluations": len(measured),
            "evaluations_undisturbed": len(expected),
            "problems": problems,
        }

    def kill_once(self, processes: int) -> Kill | None:
        """Starts the run and kills one of its processes; returns None if the run ended before."""
        name = self.random.choice(list(EXPECTED))
        last_step, last_write = self.last_step("killed"), self.last_write()
        process = self.start("killed", processes)
        if self.random.choice(self.args.moments) == "step":
            step = last_step + self.random.randint(1, self.args.stride)
            moment = f"step {step}"
            self.wait_for(process, "killed", step=step)
            time.sleep(self.random.uniform(0, 0.5))
        else:
            seconds = self.random.uniform(1, self.longest_start)
            moment = f"second {seconds:.1f}"
            self.wait_for(process, "killed", step=last_step + self.args.stride, seconds=seconds)
        if not (children := child_processes(process.pid)):
            if process.wait() == 0:
                return None
            raise SystemExit(
                f"the run failed by itself:\n{(self.directory / 'log').read_text()[-3000:]}"
            )
        start_time = time.perf_counter()
        os.kill(self.random.choice(children), signal.Signals[name])
        code = process.wait()
        if code == 0:
            return None
        seconds = time.perf_counter() - start_time
        last = self.last_step("killed")
        saved = max(finished_steps(self.directory / "killed" / "checkpoints"), default=0)
        # The log contains the steps lost by an earlier kill until the run writes to it again.
        lost = 0 if self.last_write() == last_write else max(0, last - saved)
        return Kill(processes, name, moment, code, seconds, last, lost)

    def start(self, workdir: str, processes: int) -> subprocess.Popen[bytes]:
        """Starts the training command."""
        command = [
            *(sys.executable, "-m", "synthesizer_jax", "local"),
            *("--processes", str(processes), "--devices", str(DEVICES // processes), "--"),
            *("train", str(RECIPE), "--workdir", str(self.directory / workdir), "--quiet"),
            *("--data-dir", str(self.directory / "data"), "--set", f"training.steps={self.steps}"),
            *("--set", f"evaluation.every={self.args.evaluate}"),
        ]
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
        """The logged records of the steps or of the evaluations."""
        path = self.directory / workdir / METRICS_FILE
        records = read_metrics(path) if path.exists() else []
        return [r for r in records if r["kind"] == kind]

    def last_write(self) -> int:
        """The time of the last write to the killed run's log, in nanoseconds."""
        path = self.directory / "killed" / METRICS_FILE
        return path.stat().st_mtime_ns if path.exists() else 0

    def last_step(self, workdir: str) -> int:
        """The last logged step."""
        return max((r["step"] for r in self.records(workdir)), default=0)


def child_processes(pid: int) -> list[int]:
    """The child processes of a process (Linux)."""
    try:
        content = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except FileNotFoundError:
        return []
    return [int(x) for x in content.split()]


def summarize_kills(kills: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row per number of processes and signal."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for kill in kills:
        groups[kill["processes"], kill["signal"]].append(kill)
    rows = []
    for (processes, name), group in sorted(groups.items()):
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


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(__doc__, kills=10, stride=20, every=3, evaluate=4, seed=0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    moments = ("step", "second")
    parser.add_argument("--moments", nargs="+", choices=moments, default=moments)
    return parser.parse_args()


if __name__ == "__main__":
    main()
