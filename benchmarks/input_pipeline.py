"""Measures how fast prepared files and SeqIO's pipeline make the batches of a mixture.

    python benchmarks/input_pipeline.py --mixture glue_super_glue_proportional --data-dir DATA \\
        --vocabulary spiece.model --page docs/performance.md

All systems read the same tasks in shuffled order, with the same vocabulary and lengths. In every
round, each system runs in a new process, one system after the other. The table shows the medians
over all rounds. The clock starts after the imports, when the stream is opened. Examples in the
column *first* are read from files. Examples in the column *later* are already in memory. Before the
first round, the script prepares data that is not prepared yet.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from typing import Any

import racing
import report

RATES = {"opened": "opened: tokens/s", "first": "first: tokens/s", "later": "later: tokens/s"}
"""The headings of the measured rates, by their keys."""


def main() -> None:
    """Runs the comparison and writes the table."""
    args = parse_arguments()
    command = [sys.executable, "-m", "synthesizer_jax", "data", "prepare", args.mixture]
    command += ["--data-dir", str(args.data_dir), "--vocabulary", str(args.vocabulary)]
    subprocess.run(command, check=True)
    systems = [
        make_system(args, name, pack=pack)
        for name in ("SeqIO's pipeline", "prepared")
        for pack in (False, True)
    ]
    rounds: list[list[dict[str, Any]]] = [[] for _ in systems]
    for number in range(args.rounds):
        for system, results in zip(systems, rounds, strict=True):
            print(f"round {number + 1}: {system.name}", file=sys.stderr, flush=True)
            worker = racing.Worker(system)
            results.append({**worker.facts, **worker.run_round()})
            worker.close()
    rows = [racing.summarize_results(s.name, {}, r) for s, r in zip(systems, rounds, strict=True)]
    columns = {"name": "stream", "first_batch_seconds": "first batch, s|.2f"}
    for rate, heading in RATES.items():
        for row in rows:
            row[f"{rate}_ratio"] = row[rate] / rows[0][rate]
        columns[rate] = f"{heading}|,.0f"
        columns[f"{rate}_ratio"] = "ratio|.1f"
    columns["filled"] = "input tokens that are not padding|.1%"
    columns["peak_mb"] = "peak memory, MB|,.0f"
    text = (
        f"Real tokens per second of the mixture `{args.mixture}`, in batches of {args.batch} rows "
        f"with {args.inputs} input and {args.targets} target tokens. Each *ratio* is relative to "
        f"the first row. *opened* is the rate of the first {args.first:,} examples, including the "
        "time to the first batch, and *first* is the same rate without this time. *later* is the "
        f"rate of the examples after them.\n\n{report.table(rows, columns)}"
    )
    name = f"input_pipeline {args.mixture}"
    report.write(name, text, result={"rows": rows}, options=args, facts=report.machine())


def make_system(args: argparse.Namespace, name: str, *, pack: bool) -> racing.System:
    """Returns the system that measures an input stream, with or without packing."""
    options = {**vars(args), "system": name, "pack": pack}
    for key in ("data_dir", "vocabulary", "json", "page"):
        options[key] = str(options[key])  # a path is not JSON
    if pack:
        name += ", packed"
    return racing.System(name, "pipeline.py", options)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    numbers = {"batch": 128, "inputs": 512, "targets": 84, "batches": 20, "first": 10_000}
    parser = report.arguments(__doc__, **numbers, rounds=3)
    parser.add_argument("--mixture", default="glue_super_glue_proportional", help="mixture to read")
    parser.add_argument(
        "--data-dir", type=pathlib.Path, required=True, help="directory of the data sets"
    )
    parser.add_argument(
        "--vocabulary", type=pathlib.Path, required=True, help="SentencePiece model"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
