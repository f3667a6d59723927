"""Makes the runs of the tables, measures speeds, and adds the results to docs/results.json."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from benchmarks.ledger.tables import RESULTS, Run, Table

NUMBERS = RESULTS / "results.json"


def load() -> dict[str, Any]:
    """Returns the content of docs/results.json: ``runs`` and ``speed``, each by the run's name."""
    return json.loads(NUMBERS.read_text(encoding="utf-8"))


def save(results: dict[str, Any]) -> None:
    """Writes the measurements to docs/results.json."""
    report.write_file(NUMBERS, json.dumps(results, indent=1, sort_keys=True) + "\n")


def versions() -> dict[str, str]:
    """Returns the date, the machine and the versions, because a run's results depend on them."""
    import jax  # here, because writing the page does not use it

    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def commands(run: Run, directory: pathlib.Path, args: argparse.Namespace) -> Iterator[list[str]]:
    """Yields the commands of a run, which train or distill and then evaluate the test split."""
    settings = [f"training.seed={run.seed}"]
    start = ["train", run.recipe]
    if run.teacher:
        start = ["distill", run.recipe, "--teacher", str(args.workdir / run.teacher.directory)]
    else:
        settings.append(f"data.seed={run.seed}")
        if run.table.vocabulary:
            settings.append(f"vocabulary.path={(args.workdir / run.table.vocabulary).resolve()}")
        if run.init_from:
            settings.append(f"init_from={args.workdir / run.init_from.directory}")
    common = ["--workdir", str(directory), "--data-dir", str(args.data_dir)]
    sets = [
        word for setting in (*settings, *run.table.all_settings()) for word in ("--set", setting)
    ]
    yield [*start, *common, *sets]
    if run.table.test:
        yield ["eval", *common, *run.table.test]


def make(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Makes a run and returns its entry.

    If the directory of the run already contains the results, the function takes little time.
    """
    if run.table.computed:
        from benchmarks.ledger import computed  # here, because writing the page does not use it

        value = getattr(computed, run.table.metric)(run)
        return {"metrics": {run.table.metric: round(value, 6)}, "curve": []}
    directory = args.workdir / run.directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = directory.parent / f"{directory.name}.log"
    with open(path, "a", encoding="utf-8") as log:
        for words in commands(run, directory, args):
            command = [sys.executable, "-m", "synthesizer_jax", *words]
            if subprocess.run(command, check=False, stdout=log, stderr=log).returncode:
                raise SystemExit(f"{run.name} with seed {run.seed} failed. See {path}.")
    return read_run(run, directory)


def read_run(run: Run, directory: pathlib.Path) -> dict[str, Any]:
    """Returns the metrics and the curve of a finished run.

    The curve has a pair ``[step, value]`` for each evaluation.
    """
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    # If a step was evaluated more than once, the last evaluation counts.
    evaluations = {r["step"]: r for r in records if r["kind"] == "eval"}
    step = max(evaluations)
    ignored = {"kind", "step", "time", "seconds"}
    metrics = {k: v for k, v in evaluations[step].items() if k not in ignored}
    entry: dict[str, Any] = {"step": step}
    if run.table.test:
        (path,) = (directory / "evaluation" / str(step)).glob("*/results.json")
        found = json.loads(path.read_text(encoding="utf-8"))
        for task in found["tasks"]:
            metrics |= {f"test/{task['task']}/{k}": v for k, v in task["metrics"].items()}
    entry["metrics"] = {k: round(v, 5) for k, v in metrics.items() if isinstance(v, int | float)}
    key = "score" if run.table.test else run.table.metric
    curve = [(s, evaluations[s].get(key)) for s in sorted(evaluations)]
    return entry | {"curve": [[s, round(v, 4)] for s, v in curve if v is not None]}


def make_runs(tables: list[Table], args: argparse.Namespace) -> None:
    """Makes the missing runs of tables, beginning with the runs of the first seed.

    If a run starts from another run, the other run is made first. The other run is made even if its
    results are known, because its directory is needed.
    """
    known = load()["runs"]
    facts = versions()
    runs = [run for table in tables for run in table.runs(args.seeds)]
    missing = [run for run in runs if str(run.seed) not in known.get(run.name, {})]
    print(f"{len(missing)} of {len(runs)} runs are missing.", flush=True)
    starts: dict[pathlib.Path, dict[str, Any]] = {}
    for run in sorted(missing, key=lambda run: run.seed):
        for start in (run.teacher, run.init_from):
            if start and start.directory not in starts:
                starts[start.directory] = make(start, args)
        entry = starts.get(run.directory) or make(run, args)
        results = load()
        results["runs"].setdefault(run.name, {})[str(run.seed)] = entry | facts
        save(results)
        print(f"{run.name} seed {run.seed}: {entry['metrics'][run.table.metric]}", flush=True)


def measure_speed(tables: list[Table], args: argparse.Namespace) -> None:
    """Measures the speed of every system of the tables as the median over `--rounds` steps."""
    from benchmarks.ledger.speed import Timer

    for table in tables:
        timers = {run.name: Timer(run) for run in table.runs([0]) if not run.teacher}
        seconds: dict[tuple[str, str], list[float]] = {}
        for number in range(1 + args.rounds):
            for name, timer in timers.items():
                found = {"step": timer.step()}
                if not table.metric:
                    found["decode"] = timer.decode()
                if number == 0:
                    continue  # the first round compiles
                for kind, value in found.items():
                    seconds.setdefault((name, kind), []).append(value)
        results = load()
        facts = versions()
        for name, timer in timers.items():
            memory = round(timer.memory_mb, 1)
            results["speed"][name] = {"memory_mb": memory, "rounds": args.rounds} | facts
        for (name, kind), values in seconds.items():
            results["speed"][name][f"{kind}_seconds"] = statistics.median(values)
        save(results)
