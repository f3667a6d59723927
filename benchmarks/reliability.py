"""A short run, killed again and again, beside the same run undisturbed.

    python benchmarks/reliability.py --kills 50 --processes 1
    python benchmarks/reliability.py --kills 50 --processes 1 2

At random moments one process of the group gets SIGKILL, SIGTERM or SIGINT; the run is started again, every
few kills with another number of processes that have the same eight devices. A kill comes so many steps
after a start, or so many seconds (or as soon as `--stride` steps are done): also while modules load, data
is read, programs are compiled, the model is evaluated, checkpoints are written. At the end every step must
have read the examples that the undisturbed run read (`data_checksum`) and have its loss, to the last bit
with one number of processes, to a relative 1e-4 with several; and every evaluation must be there. The
script fails where it is not so.
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

from synthesizer_jax.data import embedded
from synthesizer_jax.training.checkpoints import finished_steps
from synthesizer_jax.training.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.training.survival import EXIT_CODES

RECIPE = pathlib.Path(__file__).with_name("reliability_run.py")
DEVICES = 8
TOLERANCE = 1e-4

EXPECTED = {
    "SIGKILL": {128 + signal.SIGKILL},
    # The second before anything has begun.
    "SIGTERM": {EXIT_CODES[signal.SIGTERM], 128 + signal.SIGTERM},
    "SIGINT": {EXIT_CODES[signal.SIGINT], 128 + signal.SIGINT},
}
"""Exit codes of a group of which one process got the signal."""


def main() -> None:
    """Runs the campaign and prints what became of it."""
    args = parse()
    with tempfile.TemporaryDirectory() as place:
        found = Campaign(args, pathlib.Path(place)).run()
    kills, losses = found["kills"], found["losses"]
    groups = " and ".join(map(str, args.processes))
    text = (
        f"{len(kills)} kills over {found['steps']} steps of `benchmarks/reliability_run.py`, {DEVICES} CPU "
        f"devices of {groups} process{'' if groups == '1' else 'es'}. *Lost* are steps done again.\n\n"
        + report.table(
            summary(kills),
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
        + f"\n\nExamples of all steps as in the undisturbed run: {'yes' if found['same'] else 'NO'}. "
        f"Losses equal to the last bit: {sum(x == 0 for x in losses)} of {len(losses)}; largest relative "
        f"difference: {max(losses):.1e}. Evaluations: {found['evaluations']} of "
        f"{found['evaluations_undisturbed']}."
    )
    name = "reliability " + ("one process" if args.processes == [1] else "changing processes")
    report.write(name, text, result=found, options=args, facts=report.machine())
    if found["problems"]:
        raise SystemExit("\n".join(found["problems"]))


@dataclasses.dataclass
class Kill:
    """One kill.

    Attributes:
      processes: of the group.
      signal: its name.
      moment: how it was chosen.
      code: the group's exit code.
      seconds: from the signal until the group was gone.
      step: the last one logged.
      lost: steps of this start that the newest checkpoint does not hold.
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
      args: the command line.
      place: an empty directory.
    """

    def __init__(self, args: argparse.Namespace, place: pathlib.Path):
        self.args, self.place = args, place
        self.random = random.Random(args.seed)
        self.steps = (args.kills + 3) * args.stride  # a kill comes within a stride, or soon after
        embedded.prepare(place / "data")

    def run(self) -> dict[str, Any]:
        """Everything that was seen, and the problems."""
        began = time.perf_counter()
        process = self.start("undisturbed", 1)
        self.wait_for(process, "undisturbed", step=1)
        self.longest = 1.5 * (time.perf_counter() - began)  # a start that compiles
        problems = [] if process.wait() == 0 else ["the undisturbed run failed"]
        kills: list[Kill] = []
        while len(kills) < self.args.kills:
            processes = self.args.processes[
                len(kills) // self.args.every % len(self.args.processes)
            ]
            kill = self.leg(processes)
            if kill is None:
                problems.append(f"the run ended after {len(kills)} kills; raise --stride")
                break
            print(f"{len(kills) + 1}: {kill}", file=sys.stderr, flush=True)
            kills.append(kill)
            if kill.code not in EXPECTED[kill.signal]:
                problems.append(f"exit code {kill.code} after {kill.signal} at step {kill.step}")
        if self.start("killed", 1).wait() != 0:
            problems.append("the last start did not reach the end")
        mine, theirs = self.lines("killed"), self.lines("undisturbed")
        same = [(r["step"], r["data_checksum"]) for r in mine] == [
            (r["step"], r["data_checksum"]) for r in theirs
        ]
        losses = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(mine, theirs, strict=False)]
        if not same or len(mine) != self.steps:
            problems.append("the steps did not read the same examples")
        if max(losses) > (0 if self.args.processes == [1] else TOLERANCE):
            problems.append(f"a loss is off by {max(losses):.1e}")
        measured, expected = (
            [r["step"] for r in self.lines(w, "eval")] for w in ("killed", "undisturbed")
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

    def leg(self, processes: int) -> Kill | None:
        """Starts the run, kills one of its processes; None where the run ended before."""
        name = self.random.choice(list(EXPECTED))
        done, written = self.last_step("killed"), self.written()
        process = self.start("killed", processes)
        if self.random.choice(self.args.moments) == "step":
            step = done + self.random.randint(1, self.args.stride)
            moment = f"step {step}"
            self.wait_for(process, "killed", step=step)
            time.sleep(self.random.uniform(0, 0.5))
        else:
            seconds = self.random.uniform(1, self.longest)
            moment = f"second {seconds:.1f}"
            self.wait_for(process, "killed", step=done + self.args.stride, seconds=seconds)
        if not (children := children_of(process.pid)):
            if process.wait() == 0:
                return None
            raise SystemExit(
                f"the run failed by itself:\n{(self.place / 'log').read_text()[-3000:]}"
            )
        began = time.perf_counter()
        os.kill(self.random.choice(children), signal.Signals[name])
        code = process.wait()
        if code == 0:
            return None
        seconds = time.perf_counter() - began
        last = self.last_step("killed")
        saved = max(finished_steps(self.place / "killed" / "checkpoints"), default=0)
        # Lines of steps that an earlier kill lost stay until a start begins to write.
        lost = 0 if self.written() == written else max(0, last - saved)
        return Kill(processes, name, moment, code, seconds, last, lost)

    def start(self, workdir: str, processes: int) -> subprocess.Popen[bytes]:
        """The real training command on so many processes."""
        command = [
            *(sys.executable, "-m", "synthesizer_jax", "local"),
            *("--processes", str(processes), "--devices", str(DEVICES // processes), "--"),
            *("train", str(RECIPE), "--workdir", str(self.place / workdir), "--quiet"),
            *("--data-dir", str(self.place / "data"), "--set", f"training.steps={self.steps}"),
            *("--set", f"evaluation.every={self.args.evaluate}"),
        ]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "true"
        environment["JAX_COMPILATION_CACHE_DIR"] = str(self.place / "compiled")
        log = (self.place / "log").open("ab")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait_for(
        self,
        process: subprocess.Popen[bytes],
        workdir: str,
        *,
        step: int,
        seconds: float = math.inf,
    ) -> None:
        """Returns when a step is logged, so many seconds have passed, or the process has ended."""
        end = time.monotonic() + seconds
        while process.poll() is None and self.last_step(workdir) < step and time.monotonic() < end:
            time.sleep(0.05)

    def lines(self, workdir: str, kind: str = "train") -> list[dict[str, Any]]:
        """What the steps, or the evaluations, logged."""
        path = self.place / workdir / METRICS_FILE
        records = read_metrics(path) if path.exists() else []
        return [r for r in records if r["kind"] == kind]

    def written(self) -> int:
        """When the killed run's lines were written last, in nanoseconds."""
        path = self.place / "killed" / METRICS_FILE
        return path.stat().st_mtime_ns if path.exists() else 0

    def last_step(self, workdir: str) -> int:
        """The newest step that is logged."""
        return max((r["step"] for r in self.lines(workdir)), default=0)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started (Linux)."""
    try:
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except FileNotFoundError:
        return []
    return [int(x) for x in text.split()]


def summary(kills: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each number of processes and signal."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for kill in kills:
        groups[kill["processes"], kill["signal"]].append(kill)
    rows = []
    for (processes, name), found in sorted(groups.items()):
        codes = collections.Counter(k["code"] for k in found)
        rows.append(
            {
                "processes": processes,
                "signal": name,
                "kills": len(found),
                "codes": ", ".join(f"{code} ({n})" for code, n in sorted(codes.items())),
                "seconds": statistics.median(k["seconds"] for k in found),
                "slowest": max(k["seconds"] for k in found),
                "lost": sum(k["lost"] for k in found),
            }
        )
    return rows


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(__doc__, kills=10, stride=20, every=3, evaluate=4, seed=0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    moments = ("step", "second")
    parser.add_argument("--moments", nargs="+", choices=moments, default=moments)
    return parser.parse_args()


if __name__ == "__main__":
    main()
