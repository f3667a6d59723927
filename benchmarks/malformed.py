"""Damaged inputs, one after the other, through the command line; what becomes of each.

    python benchmarks/malformed.py --page docs/reliability.md

Good inputs are made first: original files of GLUE and SuperGLUE in small, their data sets, a run with its
checkpoints, logs and settings, recipes. Each attempt damages one of them in one way (`malformed_*.py`) and
runs a command in this process. It must end in one line that names the file or the field (*error*), or work:
after it said what it left out or set aside (*healed*), or because the damage made no difference or the
input is valid all the same (*valid*), which is judged by reading the damaged input with other means than
the package. A traceback, an error without a place, a hang, anything changed by a command that failed, and a
wrong result fail the script.
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

os.environ.setdefault("GLIBC_TUNABLES", "")  # or `train` would start this process once more
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Every program is compiled once for all attempts.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import malformed_checkpoints
import malformed_data
import malformed_imports
import malformed_logs
import malformed_recipes
import malformed_settings
import report
from malformed_cases import Case, Dice, Said, call

Cases = Callable[[pathlib.Path, Dice, int], Iterator[Case]]

KINDS: dict[str, tuple[Cases, int]] = {
    "imports": (malformed_imports.cases, 330),
    "settings": (malformed_settings.cases, 330),
    "recipes": (malformed_recipes.cases, 30),
    "checkpoints": (malformed_checkpoints.cases, 210),
    "logs": (malformed_logs.cases, 110),
    "data": (malformed_data.cases, 110),
}
"""What makes the damaged inputs of a kind, and how many of them."""

GOOD = ("error", "healed", "valid")


@dataclasses.dataclass
class Outcome:
    """What became of an attempt.

    Attributes:
      kind: of the input.
      damage: what was done to it.
      outcome: one of `GOOD`, or what is wrong.
      said: the last line of what the command said.
      seconds: how long it took.
    """

    kind: str
    damage: str
    outcome: str
    said: str
    seconds: float


def main() -> None:
    """Runs the campaign."""
    args = parse()
    with tempfile.TemporaryDirectory(prefix="malformed-compiled-") as compiled:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled  # before JAX is imported
        outcomes = [o for kind in args.kinds for o in attempts(kind, args)]
    bad = [o for o in outcomes if o.outcome not in GOOD]
    text = (
        f"{len(outcomes)} damaged inputs: *error* is one line that names the file or the field, after "
        "which everything is as it was; *healed* is a command that went on and said without what; *valid* "
        "is an input that still says something, read as what it says.\n\n"
        + report.table(rows(outcomes), {"kind": "input", **{n: f"{n}|d" for n in COLUMNS}})
    )
    found = {"outcomes": [dataclasses.asdict(o) for o in outcomes]}
    report.write("malformed", text, result=found, options=args, facts=report.machine())
    if bad:
        raise SystemExit(f"{len(bad)} of {len(outcomes)} attempts went wrong")


def attempts(kind: str, args: argparse.Namespace) -> list[Outcome]:
    """All attempts with one kind of input; those that went wrong are printed."""
    began = time.perf_counter()
    make, _ = KINDS[kind]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix=f"malformed-{kind}-") as place:
        dice = random.Random(f"{args.seed} {kind}")
        for case in make(pathlib.Path(place), dice, getattr(args, kind)):
            outcomes.append(attempt(kind, case))
            if outcomes[-1].outcome not in GOOD or args.verbose:
                print(outcomes[-1], file=sys.stderr, flush=True)
    print(f"{kind}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return outcomes


COLUMNS = ("attempts", *GOOD, "wrong")


def rows(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """A row for each kind of input, and one for all."""
    kinds = list(dict.fromkeys(o.kind for o in outcomes))
    groups = {kind: [o for o in outcomes if o.kind == kind] for kind in kinds}
    table = []
    for kind, found in [*groups.items(), ("all", outcomes)]:
        counts = collections.Counter(o.outcome for o in found)
        named = {name: counts[name] for name in GOOD}
        wrong = len(found) - sum(named.values())
        table.append({"kind": kind, "attempts": len(found), **named, "wrong": wrong})
    return table


def attempt(kind: str, case: Case) -> Outcome:
    """Runs one command on a damaged input, and judges it."""
    before = digest(case.watched)
    began = time.perf_counter()
    said = call(case.command)
    seconds = time.perf_counter() - began
    try:
        outcome = judge(case, said, unchanged=digest(case.watched) == before)
    except Exception as error:  # a result that cannot be read is a wrong one
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = f"wrong: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    last = (said.errors.strip() or said.out.strip()).splitlines()[-1:]
    return Outcome(kind, case.name, outcome, "".join(last)[:400], round(seconds, 2))


def judge(case: Case, said: Said, *, unchanged: bool) -> str:
    """The outcome of a command."""
    if said.code == 0:
        wrong = case.check(said)
        if wrong:
            return f"accepted: {wrong}"
        told = said.out + said.errors
        return "healed" if any(word in told for word in case.healing) else "valid"
    if said.code != 2:
        return f"exit code {said.code}"
    lines = [line for line in said.errors.splitlines() if line.strip()]
    if not (lines and lines[-1].startswith("error: ")):
        return "no error in one line"
    if not any(place in lines[-1] for place in case.places):
        return "an error without a place"
    return "error" if unchanged else "half-written"


def digest(paths: tuple[pathlib.Path, ...]) -> str:
    """Names and contents of all files below some paths."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted([path, *path.rglob("*")]):
            total.update(str(file).encode())
            if file.is_file():
                total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def parse() -> argparse.Namespace:
    """The command line: a number of attempts for every kind."""
    parser = report.arguments(__doc__, seed=0, **{kind: n for kind, (_, n) in KINDS.items()})
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--verbose", action="store_true", help="print every attempt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
