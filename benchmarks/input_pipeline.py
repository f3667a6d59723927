"""Measures how fast batches of a mixture are made: from prepared files, and by SeqIO's pipeline.

    python benchmarks/input_pipeline.py --page docs/performance.md
    python benchmarks/input_pipeline.py --mixture glue_super_glue_proportional --data-dir DIR \\
        --vocabulary spiece.model --page docs/performance.md

All read the same tasks, shuffled, with the same vocabulary and lengths. Every round starts a process for
every system, in turns; medians are reported. Times begin when the stream is opened, after imports.
*First* examples are read from files; later ones are in memory. Then a training step of T5 1.1 *tiny* is
timed on packed and on unpacked rows, in turns. What is missing is prepared in `--data-dir` first; without
it, the mixture is the synthetic one, in a temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import racing
import report

from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.tasks import synthetic

SYSTEMS = {
    f"{label}{', packed' * pack}": {"system": system, "pack": pack}
    for label, system in (("SeqIO's pipeline", "SeqIO"), ("prepared", "prepared"))
    for pack in (False, True)
}
SIZE = "tiny"


def main() -> None:
    """Runs the comparison and writes the tables."""
    args = parse_arguments()
    with prepared_data(args) as paths:
        prepare(args.mixture, paths)
        shared = {**paths, "mixture": args.mixture, "inputs": args.inputs, "targets": args.targets}
        streams = race_streams(args, shared)
        steps = racing.race(
            [
                racing.System(
                    name,
                    "packed_step.py",
                    {**shared, "pack": pack, "batch": args.step_batch, "steps": 4, "size": SIZE},
                )
                for name, pack in (("unpacked", False), ("packed", True))
            ],
            rounds=args.rounds,
        )
    for rows, keys in (
        (streams, ("opened_tokens_per_second", "first_tokens_per_second", "tokens_per_second")),
        (steps, ("tokens_per_second",)),
    ):
        for row in rows:
            for key in keys:
                row[f"{key}_ratio"] = row[key] / rows[0][key]
    report.write(
        f"input_pipeline {args.mixture}",
        section(args, streams, steps),
        result={"streams": streams, "steps": steps},
        options=args,
        facts=report.machine(),
    )


def section(
    args: argparse.Namespace, streams: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> str:
    """Returns both tables with their captions."""
    lengths = f"lengths {args.inputs}/{args.targets}"
    return "\n\n".join(
        [
            f"{args.mixture}, batch {args.batch}, {lengths}; real tokens a second, ratios against the "
            f"first row. *Opened*: the first {args.first:,} examples, with the time to the first batch.",
            report.table(
                streams,
                {
                    "name": "stream",
                    "first_batch_seconds": "first batch, s|.2f",
                    "opened_tokens_per_second": "opened: tokens/s|,.0f",
                    "opened_tokens_per_second_ratio": "ratio|.1f",
                    "first_tokens_per_second": f"first {args.first:,}: tokens/s|,.0f",
                    "first_tokens_per_second_ratio": "ratio|.1f",
                    "tokens_per_second": "later: tokens/s|,.0f",
                    "tokens_per_second_ratio": "ratio|.1f",
                    "filled": "input tokens that are not padding|.1%",
                    "peak_mb": "peak memory, MB|,.0f",
                },
            ),
            f"A training step of T5 1.1 {SIZE}, batch {args.step_batch}, {lengths}.",
            report.table(
                steps,
                {
                    "name": "rows",
                    "seconds": "4 steps, s|.2f",
                    "tokens_per_second": "real tokens/s|,.0f",
                    "tokens_per_second_ratio": "ratio|.2f",
                },
            ),
        ]
    )


def race_streams(args: argparse.Namespace, shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the medians of every system over rounds in fresh processes, which take turns."""
    names = ("batch", "batches", "first")
    settings = {**shared, **{name: getattr(args, name) for name in names}}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for number in range(args.rounds):
        for name, options in SYSTEMS.items():
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            worker = racing.Worker(racing.System(name, "pipeline.py", {**settings, **options}))
            results[name].append({**worker.facts, **worker.run_round()})
            worker.close()
    return [racing.summarize_results(name, {}, rounds) for name, rounds in results.items()]


def prepare(mixture: str, paths: Mapping[str, Any]) -> None:
    """Prepares the mixture's tasks where they are not."""
    vocabulary = paths["vocabulary"]
    command = [sys.executable, "-m", "synthesizer_jax", "data", "prepare", mixture]
    command += ["--data-dir", paths["data_dir"], "--vocabulary", vocabulary["path"]]
    subprocess.run([*command, "--extra-ids", str(vocabulary["extra_ids"])], check=True)


@contextlib.contextmanager
def prepared_data(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the directory of the prepared data sets and their vocabulary."""
    if args.data_dir:
        vocabulary = SentencePiece(str(args.vocabulary))
        yield {"data_dir": str(args.data_dir), "vocabulary": dataclasses.asdict(vocabulary)}
        return
    with tempfile.TemporaryDirectory() as temporary_dir:
        vocabulary = synthetic.vocabulary(pathlib.Path(temporary_dir))
        yield {"data_dir": temporary_dir, "vocabulary": dataclasses.asdict(vocabulary)}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(
        __doc__,
        batch=128,
        inputs=512,
        targets=84,
        batches=20,
        first=10_000,
        rounds=3,
        step_batch=16,
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
