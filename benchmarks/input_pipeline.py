"""Compares the rates at which this package and SeqIO's pipeline produce batches of a mixture.

    python benchmarks/input_pipeline.py --batch 128
    python benchmarks/input_pipeline.py --mixture glue_v002_proportional --data-dir DIR --vocabulary V

All read the same tasks, shuffled, with the same vocabulary and lengths, each in a process of its own;
rounds alternate, and medians are reported. *First* is the rate of the first `--first` examples, which
this package tokenizes and keeps in memory; *later* is the rate of the batches after them. Without
`--data-dir`, the mixture is the synthetic one, written to a temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import racing
import report

from synthesizer_jax.data import synthetic
from synthesizer_jax.data.vocabularies import SentencePiece

SYSTEMS = {
    "synthesizer_jax": {"system": "synthesizer_jax", "pack": False},
    "SeqIO": {"system": "SeqIO", "pack": False},
    "synthesizer_jax, packed": {"system": "synthesizer_jax", "pack": True},
    "SeqIO, packed": {"system": "SeqIO", "pack": True},
}


def main() -> None:
    """Runs the comparison and writes the table."""
    args = parse_arguments()
    with prepared_data(args) as paths:
        names = ("mixture", "batch", "inputs", "targets", "batches", "first")
        shared = {**paths, **{name: getattr(args, name) for name in names}}
        rows = racing.race(
            [
                racing.System(name, "pipeline.py", {**shared, **system_options})
                for name, system_options in SYSTEMS.items()
            ],
            rounds=args.rounds,
        )
    base = next(r for r in rows if r["name"] == "SeqIO")
    for r in rows:
        for key in ("first_examples_per_second", "examples_per_second"):
            r[f"{key}_ratio"] = r[key] / base[key]
    section = (
        f"{args.mixture}, batch {args.batch}, lengths {args.inputs}/{args.targets}, "
        f"{args.batches} batches a round; ratios against SeqIO's pipeline.\n\n"
        + report.table(
            rows,
            {
                "name": "pipeline",
                "first_batch_seconds": "first batch, s|.2f",
                "first_examples_per_second": f"first {args.first:,}: examples/s|,.0f",
                "first_examples_per_second_ratio": "ratio|.1f",
                "examples_per_second": "later: examples/s|,.0f",
                "examples_per_second_ratio": "ratio|.1f",
                "tokens_per_second": "tokens/s|,.0f",
                "filled": "tokens that are not padding|.0%",
                "peak_mb": "peak memory, MB|,.0f",
            },
        )
    )
    name = f"input_pipeline {args.mixture}"
    report.write(name, section, result={"rows": rows}, options=args, facts=report.machine())


@contextlib.contextmanager
def prepared_data(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the directory of the prepared data sets and their vocabulary."""
    if args.data_dir:
        vocabulary = SentencePiece(str(args.vocabulary))
        yield {"data_dir": str(args.data_dir), "vocabulary": dataclasses.asdict(vocabulary)}
        return
    with tempfile.TemporaryDirectory() as temporary_dir:
        vocabulary = synthetic.prepare(pathlib.Path(temporary_dir)).vocabulary
        yield {"data_dir": temporary_dir, "vocabulary": dataclasses.asdict(vocabulary)}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(
        __doc__, batch=128, inputs=512, targets=62, batches=20, first=20_000, rounds=7
    )
    parser.add_argument("--mixture", default="synthetic_co_training", help="a mixture or task")
    parser.add_argument("--data-dir", type=pathlib.Path, help="directory of prepared data sets")
    parser.add_argument("--vocabulary", type=pathlib.Path, help="a SentencePiece model")
    args = parser.parse_args()
    if args.data_dir and not args.vocabulary:
        parser.error("--data-dir needs --vocabulary, a SentencePiece model")
    return args


if __name__ == "__main__":
    main()
