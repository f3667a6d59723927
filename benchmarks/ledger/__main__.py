"""Makes the runs of the papers' tables, and writes docs/results.md and its picture.

    python -m benchmarks.ledger run cotraining --data-dir DATA --workdir runs/ledger
    python -m benchmarks.ledger speed cotraining --data-dir DATA
    python -m benchmarks.ledger write

`run` makes the runs whose results docs/results.json does not contain yet. It uses the same commands
as a user. When a run has finished, it is added to docs/results.json. After an interruption, the
same command continues with the missing runs. `speed` measures the training steps of all systems of
a table in one process. The systems take turns. `write` writes the page from the existing
measurements. docs/results.toml defines the tables. The module `benchmarks/ledger/data.py` makes the
data sets. The same module trains the vocabularies and writes them to the work directory.
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
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"tables, by default all: {', '.join(TABLES)}"
    )
    parser.add_argument("--data-dir", type=pathlib.Path, help="directory of the data")
    parser.add_argument(
        "--workdir",
        type=pathlib.Path,
        default=pathlib.Path("runs/ledger"),
        help="directory of the runs and vocabularies (default: runs/ledger)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="seeds of the runs, by default those of the table"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="number of measured steps (default: 20)"
    )
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
