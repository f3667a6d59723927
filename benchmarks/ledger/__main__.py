"""Makes the runs of the papers' tables, and writes docs/results.md and its picture from their results.

    python -m benchmarks.ledger run cotraining --data-dir DATA --workdir runs/ledger
    python -m benchmarks.ledger speed cotraining --data-dir DATA
    python -m benchmarks.ledger write

`run` makes the runs that docs/results.json lacks, with the commands that a user would type. It adds each
run to the file when it has finished. If it is interrupted and called again, it continues. `speed` measures
the training steps of a table's systems in turns, in one process. `write` needs no run. The tables are in
docs/results.toml. `benchmarks/ledger/data.py` makes the data, and the vocabularies in the work directory.
"""

from __future__ import annotations

import argparse
import pathlib

from benchmarks import report
from benchmarks.ledger import page
from benchmarks.ledger.runs import load, make_runs, measure_speed
from benchmarks.ledger.tables import RESULTS, TABLES


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ledger",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("action", choices=["run", "speed", "write"])
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; by default all")
    parser.add_argument("--data-dir", type=pathlib.Path)
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/ledger"))
    parser.add_argument("--seeds", type=int, nargs="+", help="by default those of the table")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    tables = [TABLES[name] for name in args.tables or TABLES]
    if args.action == "run":
        make_runs(tables, args)
    elif args.action == "speed":
        measure_speed(tables, args)
    else:
        page.draw_overview(TABLES, load())
        report.write_file(RESULTS / "results.md", page.page(TABLES, load()))


if __name__ == "__main__":
    main()
