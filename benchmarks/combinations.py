"""Trains tiny models with random combinations of settings, and checks how every run ends.

    python benchmarks/combinations.py --seed 1 --count 100 --directory runs/combinations
    python benchmarks/combinations.py --seed 1 --only 17 --directory runs/combinations

A combination consists of a model and of settings. It depends only on the seed and on its number.
The training run of every combination is killed by SIGKILL after three steps. Then the run is
continued to its end, and its model is evaluated, used to generate texts, and exported. A training
run may also refuse its settings. In this case, it must print a one-line error and write no files.
The script compares the following things:

- A second run that is not killed must read the same batches and have the same losses. If the second
  run has the same settings, all numbers must be exactly equal. If some settings of the second run
  differ, but do not change the result mathematically, all numbers must be equal within a tolerance.
- The loss of the first batch must not change when the batch's examples are arranged in different
  rows. If the batch is packed, each example is put into a row of its own. If the batch is not
  packed, its rows are reversed and padded further.
- Averaged parameters (`training.ema`) must equal the averages that NumPy computes by the formula.
- `eval` must report the same results as the last evaluation of the run.
- `generate` must return the same texts if the batch size is different. An exported program must
  return the same texts as `generate`.
- If a folder that was exported in the format of transformers or T5X is converted back, the
  parameters must be unchanged.

A combination that ends in any other way counts as *wrong*. For each wrong combination, the script
prints the command that repeats it. The result of each combination is written to
``results-SEED.jsonl`` in the directory. After an interruption, the same command continues with the
next combination.

`combinations_drawing.py` draws the combinations, `combinations_attempt.py` runs and kills them, and
`combinations_checks.py` compares numbers.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# These flags make compilation faster, because compiling the tiny models takes longer than running
# them. The file tests/conftest.py has the same flags.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1",
)

import jax
import report
from combinations_attempt import attempt_group
from combinations_drawing import draw_combination
from combinations_inputs import import_modules, make_inputs

from synthesizer_jax.costs import utilization
from synthesizer_jax.serving import programs

ENDS = ("complete", "refused", "wrong")
"""The ways in which a combination can end."""


def main() -> None:
    """Runs all combinations that have no result yet, and writes the tables."""
    args = parse_arguments()
    if args.show:
        for number in args.only or range(args.count):
            print(number, json.dumps(dataclasses.asdict(draw_combination(args.seed, number))))
        return

    jax.config.update("jax_compilation_cache_dir", str(args.directory / "compiled"))
    utilization.SIDE["cpu"] = 64  # every run times a smaller matrix product
    programs.PLATFORMS = ("cpu",)  # type: ignore[assignment]  # platforms of exported programs
    make_inputs(args.directory)
    import_modules(args.directory)
    gc.freeze()
    gc.set_threshold(50_000)  # tracing creates many long-lived objects

    file = args.directory / f"results-{args.seed}.jsonl"
    finished = read_results(file)
    left = args.only or [number for number in range(args.count) if number not in finished]
    run_groups(make_groups(left, args), file, args)
    if args.only:
        return

    finished = read_results(file)
    results = [finished[number] for number in range(args.count) if number in finished]
    report.write(
        "combinations",
        tables(results),
        result={"combinations": results},
        options=args,
        facts=report.machine(),
    )
    wrong = [result for result in results if result["end"] == "wrong"]
    for result in wrong:
        print(f"{again(args, result['number'])}\n  {result['reason']}", file=sys.stderr)
    if wrong or len(results) < args.count:
        raise SystemExit(f"{len(wrong)} of {len(results)} combinations went wrong")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(__doc__, seed=0, count=100, jobs=1, together=4)
    parser.add_argument("--only", type=int, nargs="+", help="numbers to run, even a second time")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("runs/combinations"))
    parser.add_argument("--keep", action="store_true", help="keep the runs of all combinations")
    parser.add_argument("--show", action="store_true", help="only print what would be drawn")
    args = parser.parse_args()
    args.directory = args.directory.resolve()
    return args


def make_groups(numbers: Sequence[int], args: argparse.Namespace) -> list[list[int]]:
    """Divides combinations into groups of at most `--together` combinations.

    All combinations of a group use the same number of devices.
    """
    groups: list[list[int]] = []
    open_groups: dict[int, list[int]] = {}
    for number in numbers:
        devices = draw_combination(args.seed, number).devices
        group = open_groups.get(devices)
        if group is None or len(group) == args.together:
            group = open_groups[devices] = []
            groups.append(group)
        group.append(number)
    return groups


def run_groups(groups: Sequence[list[int]], file: pathlib.Path, args: argparse.Namespace) -> None:
    """Runs groups of combinations in `--jobs` processes, and appends the results to a file."""
    workers = []
    for job in range(args.jobs):
        pid = os.fork()
        if pid == 0:
            for group in groups[job :: args.jobs]:
                for result in attempt_group(group, args):
                    with file.open("a") as lines:
                        lines.write(json.dumps(result) + "\n")
                    print_result(result, args)
            os._exit(0)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)


def print_result(result: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Prints how a combination ended. If it is wrong, also prints the command that repeats it."""
    number, end = result["number"], result["end"]
    print(number, end, f"{result['seconds']} s", result["twin"], flush=True)
    if end == "wrong":
        print(f"  {result['reason']}\n  {again(args, number)}", flush=True)


def again(args: argparse.Namespace, number: int) -> str:
    """Returns the command that repeats a combination."""
    script = f"benchmarks/{pathlib.Path(__file__).name}"
    return f"python {script} --seed {args.seed} --only {number} --directory {args.directory}"


def read_results(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Returns a dictionary from the number of each combination to its last result."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["number"]: result for result in map(json.loads, lines)}


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns tables that show how combinations ended and how much first and second runs differ."""
    rows = []
    for kind in dict.fromkeys(kind_of(result) for result in results):
        counts = collections.Counter(r["end"] for r in results if kind_of(r) == kind)
        rows.append({"kind": kind, **{end: counts[end] for end in ENDS}})
    columns = {"kind": "model", **{end: f"{end}|d" for end in ENDS}}

    pairs = []
    for twin in sorted({result["twin"] for result in results}):
        group = [r["difference"] for r in results if r["twin"] == twin and r["end"] == "complete"]
        if group:
            pairs.append({"twin": twin, "runs": len(group), "largest": max(group)})
    headings = {
        "twin": "second run",
        "runs": "runs|d",
        "largest": "largest relative difference of a loss|.1e",
    }
    return report.table(rows, columns) + "\n\n" + report.table(pairs, headings)


def kind_of(result: Mapping[str, Any]) -> str:
    """Returns the kind of model that a result belongs to."""
    return result["recipe"].split(":")[0]


if __name__ == "__main__":
    main()
