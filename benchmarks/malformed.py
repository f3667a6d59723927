"""Runs the command line on damaged inputs and checks how it handles each of them.

    python benchmarks/malformed.py --page docs/reliability.md
    python benchmarks/malformed.py --kinds pretrained --page docs/reliability.md

The valid inputs are small original files of GLUE and SuperGLUE, their data sets, a run with its
checkpoints, logs and settings, recipes, and checkpoints of other libraries. Each attempt damages one of
them in one way (`malformed_*.py`) and runs a command in this process. The command must fail with one line
that names the file or the field (*error*), or succeed: after reporting what it omitted or set aside
(*healed*), or because the damaged input is still valid (*valid*), which is checked by reading the input
independently of the package. The script fails on a traceback, an error that names no location, a hang, a
file changed by a failing command, and a wrong result.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import os
import pathlib
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("GLIBC_TUNABLES", "")  # otherwise `train` would restart this process
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Every program is compiled only once.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import malformed_checkpoints
import malformed_data
import malformed_imports
import malformed_logs
import malformed_pretrained
import malformed_recipes
import malformed_settings
import report
from malformed_cases import Case, CommandResult, Rng, call

Cases = Callable[[pathlib.Path, Rng, int], Iterator[Case]]

KINDS: dict[str, tuple[Cases, int]] = {
    "imports": (malformed_imports.cases, 330),
    "settings": (malformed_settings.cases, 330),
    "recipes": (malformed_recipes.cases, 30),
    "checkpoints": (malformed_checkpoints.cases, 210),
    "logs": (malformed_logs.cases, 110),
    "data": (malformed_data.cases, 110),
    "pretrained": (malformed_pretrained.cases, 560),
}
"""For each kind of input, the generator of attempts and their default number."""

PRETRAINED = "pretrained"
OWN = [kind for kind in KINDS if kind != PRETRAINED]
"""What this package reads of its own; files of other libraries are a campaign of their own."""

ACCEPTED = ("error", "healed", "valid")


@dataclasses.dataclass
class Outcome:
    """The outcome of an attempt.

    Attributes:
      kind: kind of the input.
      damage: description of the damage.
      outcome: one of `ACCEPTED`, or a description of the failure.
      message: the last line of the command's output.
      seconds: duration of the command.
    """

    kind: str
    damage: str
    outcome: str
    message: str
    seconds: float


def main() -> None:
    """Runs all attempts and writes the table."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="malformed-compiled-") as compiled:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled  # before JAX is imported
        outcomes = [o for kind in args.kinds for o in run_attempts(kind, args)]
    failures = [o for o in outcomes if o.outcome not in ACCEPTED]
    section = (
        f"{len(outcomes)} damaged inputs: *error* is one line that names the file or the field, after "
        "which everything is as it was; *healed* is a command that went on and said without what; *valid* "
        "is an input that still says something, read as what it says.\n\n"
        + report.table(summarize(outcomes), {"kind": "input", **{n: f"{n}|d" for n in COLUMNS}})
    )
    results = {"outcomes": [dataclasses.asdict(o) for o in outcomes]}
    # Other choices of kinds have a section of their own in the page.
    name = "malformed" if args.kinds == OWN else "_".join(["malformed", *args.kinds])
    report.write(name, section, result=results, options=args, facts=report.machine())
    if failures:
        raise SystemExit(f"{len(failures)} of {len(outcomes)} attempts went wrong")


def run_attempts(kind: str, args: argparse.Namespace) -> list[Outcome]:
    """Runs all attempts with one kind of input and prints the failures."""
    start = time.perf_counter()
    make_cases, _ = KINDS[kind]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix=f"malformed-{kind}-") as directory:
        rng = random.Random(f"{args.seed} {kind}")
        for case in make_cases(pathlib.Path(directory), rng, getattr(args, kind)):
            outcomes.append(run_attempt(kind, case))
            if outcomes[-1].outcome not in ACCEPTED or args.verbose:
                print(outcomes[-1], file=sys.stderr, flush=True)
    print(f"{kind}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return outcomes


COLUMNS = ("attempts", *ACCEPTED, "wrong")


def summarize(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Counts the outcomes per kind of input and in total."""
    kinds = list(dict.fromkeys(o.kind for o in outcomes))
    groups = {kind: [o for o in outcomes if o.kind == kind] for kind in kinds}
    table = []
    for kind, group in [*groups.items(), ("all", outcomes)]:
        counts = collections.Counter(o.outcome for o in group)
        named = {name: counts[name] for name in ACCEPTED}
        num_wrong = len(group) - sum(named.values())
        table.append({"kind": kind, "attempts": len(group), **named, "wrong": num_wrong})
    return table


def run_attempt(kind: str, case: Case) -> Outcome:
    """Runs a command on a damaged input and determines the outcome."""
    before = digest(case.watched)
    start = time.perf_counter()
    result = call(case.command)
    seconds = time.perf_counter() - start
    try:
        outcome = judge(case, result, unchanged=digest(case.watched) == before)
    except Exception as error:  # an unreadable result is a wrong one
        frame = traceback.extract_tb(error.__traceback__)[-1]
        outcome = f"wrong: {type(error).__name__}: {error} ({frame.name}, line {frame.lineno})"
    last_line = (result.errors.strip() or result.out.strip()).splitlines()[-1:]
    return Outcome(kind, case.name, outcome, "".join(last_line)[:400], round(seconds, 2))


def judge(case: Case, result: CommandResult, *, unchanged: bool) -> str:
    """Determines the outcome of a command."""
    if result.code == 0:
        problem = case.check(result)
        if problem:
            return f"accepted: {problem}"
        output = result.out + result.errors
        return "healed" if any(phrase in output for phrase in case.healing) else "valid"
    if result.code != 2:
        return f"exit code {result.code}"
    lines = [line for line in result.errors.splitlines() if line.strip()]
    if not (lines and lines[-1].startswith("error: ")):
        return "no error in one line"
    if not any(location in lines[-1] for location in case.locations):
        return "an error without a place"
    return "error" if unchanged else "half-written"


def digest(paths: tuple[pathlib.Path, ...]) -> str:
    """A hash of the names and contents of all files below some paths."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted([path, *path.rglob("*")]):
            total.update(str(file).encode())
            if file.is_file():
                total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def parse_arguments() -> argparse.Namespace:
    """Parses the command line, with the number of attempts of each kind."""
    parser = report.arguments(__doc__, seed=0, **{kind: n for kind, (_, n) in KINDS.items()})
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=OWN)
    parser.add_argument("--verbose", action="store_true", help="print every attempt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
